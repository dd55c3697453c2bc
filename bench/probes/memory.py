"""Whose memory it is: from what the driver counts down to the bytes of live tokens, step by step.

    NVML used > this process > torch reserved > torch allocated > weights, pools, workspace
                                                  KV pool > owned > live tokens, state pool > owned

All layers are read at one moment of a step: it is in flight and past its release point. What lies
between a layer and the one inside it has a name: the gap. Knows the collectors and the engine's
tables; knows no output format. Invariant: a figure that this machine does not have is None with its
reason; no layer is computed from another one's absence.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.arrivals import RequestSpec
from bench.collect.allocator import AllocatorCollector
from bench.collect.nvml import NvmlCollector
from bench.collect.process import ProcessCollector
from bench.probes.watched_engine import draw_requests, nothing_ran, num_wrong, run_plain
from bench.runner import Target
from bench.spec import Resolved
from deepinfer.engine import LLMEngine
from deepinfer.errors import UserError
from deepinfer.sequence import blocks_for

NO_STATE_POOL = "this model keeps no fixed-size state: all of it is in KV blocks"
NOT_RESIDENT = "more than the process has resident: pages of the pool nobody wrote yet take none"
MIB = 2**20


@dataclass(frozen=True, slots=True)
class MemorySample:
    """All layers at one moment, in bytes; None where `MemoryProfile.undefined` says why.

    Attributes:
        time_s: since the round's first step.
        torch_allocated: the allocator's peak while the step was submitted.
        free, withheld, owned: bytes of blocks in that state; block 0 is in none of them.
        state_pool: state slots, slot 0 included; None if requests have none.
        states_free, states_withheld, states_owned: as of blocks.
        live: bytes of committed rows in owned blocks, each shared row once.
        num_live_tokens: these rows.
    """

    step: int
    time_s: float
    nvml_used: int | None
    nvml_process: int | None
    process_rss: int | None
    torch_reserved: int | None
    torch_allocated: int | None
    weights: int
    kv_pool: int
    free: int
    withheld: int
    owned: int
    live: int
    num_live_tokens: int
    state_pool: int | None = None
    states_free: int = 0
    states_withheld: int = 0
    states_owned: int = 0


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """A layer of the waterfall, and what of it the layer inside does not explain.

    Attributes:
        depth: how far inside it lies.
        size, gap: in bytes; None where undefined.
        gap_name: what the gap is.
    """

    layer: str
    depth: int
    size: int | None
    gap_name: str = ""
    gap: int | None = None


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """One round's memory.

    Attributes:
        samples: one for each step, in order.
        num_wrong: requests with wrong tokens.
        undefined: layer -> why it has no size.
        notes: what was done to the input.
    """

    samples: tuple[MemorySample, ...]
    undefined: dict[str, str]
    device: str
    release: str
    block_size: int
    num_wrong: int
    notes: tuple[str, ...]

    @property
    def fullest(self) -> MemorySample:
        """The first step with the most live tokens."""
        return max(self.samples, key=lambda sample: sample.num_live_tokens)


def profile_memory(
    resolved: Resolved,
    *,
    snapshot: Path | None = None,
    on_probe: Callable[[str], None] = lambda name: None,
) -> MemoryProfile:
    """Run the workload once and read every layer in each step.

    `snapshot` is where torch's allocator history goes (for pytorch.org/memory_viz). Raises
    UserError where the device has none.
    """
    on_probe("memory")
    target = Target(resolved)
    try:
        history = None if snapshot is None else _AllocatorHistory(target, resolved.device)
        requests = draw_requests(resolved)
        engine = _MemoryEngine(resolved, target, requests)
        with engine:
            result = run_plain(resolved, target, requests, engine)
        if history is not None and snapshot is not None:
            history.dump(snapshot)
        if not engine.samples:
            raise nothing_ran(resolved)
        wrong = num_wrong(resolved, target, result)
    finally:
        target.close()
    return MemoryProfile(
        samples=tuple(engine.samples),
        undefined=engine.reasons,
        device=resolved.device,
        release=resolved.engine.release,
        block_size=resolved.engine.block_size,
        num_wrong=wrong,
        notes=resolved.notes,
    )


class _MemoryEngine(LLMEngine):
    """An engine that reads all layers behind each submit."""

    def __init__(self, resolved: Resolved, target: Target, requests: list[RequestSpec]) -> None:
        super().__init__(
            resolved.model,
            resolved.engine,
            device=target.device_of(resolved),
            weights=target.weights,
            drafter=target.drafter(resolved, requests),
        )
        self.samples: list[MemorySample] = []
        self.reasons: dict[str, str] = {}
        self._weights = target.weights.num_parameters() * target.weights.norm.element_size()
        self._first_ns = 0
        self._stack = ExitStack()
        self._nvml = self._stack.enter_context(NvmlCollector())
        self._process = self._stack.enter_context(ProcessCollector())

    def submit(self) -> bool:
        """As `LLMEngine.submit`; then a sample."""
        with AllocatorCollector() as allocator:
            submitted = super().submit()
            if submitted:
                self._take_sample(allocator)
        return submitted

    def close(self) -> None:
        """As `LLMEngine.close`; NVML is let go of, too."""
        self._stack.close()
        super().close()

    def _take_sample(self, allocator: AllocatorCollector) -> None:
        assert self._in_flight, "a step is in flight"
        figures: dict[str, Any] = {}
        for name, collector in (
            ("NVML", self._nvml),
            ("torch allocator", allocator),
            ("process", self._process),
        ):
            reading = collector.read()
            figures |= reading.values
            if reading.reason:
                self.reasons.setdefault(name, reading.reason)
        cache, blocks = self.cache, self.blocks
        started_ns = self._in_flight[-1].readings[0].at_ns
        if not self.samples:
            self._first_ns = started_ns
        num_live = num_live_tokens(self)
        self.samples.append(
            MemorySample(
                step=self._in_flight[-1].plan.step,
                time_s=(started_ns - self._first_ns) / 1e9,
                nvml_used=figures["nvml_used_bytes"],
                nvml_process=figures["nvml_process_bytes"],
                process_rss=figures["process_rss_bytes"],
                torch_reserved=figures["torch_reserved_bytes"],
                torch_allocated=figures["torch_peak_allocated_bytes"],
                weights=self._weights,
                kv_pool=cache.num_blocks * cache.bytes_per_block,
                free=blocks.num_free * cache.bytes_per_block,
                withheld=blocks.num_withheld * cache.bytes_per_block,
                owned=blocks.num_held * cache.bytes_per_block,
                live=num_live * cache.bytes_per_block // cache.block_size,
                num_live_tokens=num_live,
                **self._state_bytes(),
            )
        )

    def _state_bytes(self) -> dict[str, int]:
        """Of the state slots; nothing where there are none."""
        if self.states is None:
            return {}
        slots, size = self.states.slots, self.cache.bytes_per_slot
        return {
            "state_pool": slots.num_blocks * size,
            "states_free": slots.num_free * size,
            "states_withheld": slots.num_withheld * size,
            "states_owned": slots.num_held * size,
        }


def num_live_tokens(engine: LLMEngine) -> int:
    """Committed rows of all requests; a row that several share counts once.

    A block's rows are filled from its start, so of its holders the one with the most counts.
    """
    seqs, block_size = engine.scheduler.seqs, engine.config.block_size
    filled = np.zeros(engine.blocks.num_blocks, np.int64)
    for seq in engine.scheduler.running:
        _fill(filled, seqs.table(seq.row), int(seqs.num_computed_tokens[seq.row]), block_size)
    for seq in engine.scheduler.waiting:
        _fill(filled, seq.forked_table, seq.num_computed_tokens, block_size)
    return int(filled.sum())


def _fill(filled: Any, table: Any, num_tokens: int, block_size: int) -> None:
    used = np.asarray(table[: blocks_for(num_tokens, block_size)], np.intp)
    rows = np.minimum(num_tokens - block_size * np.arange(len(used)), block_size)
    filled[used] = np.maximum(filled[used], rows)


class _AllocatorHistory:
    """torch's record of every allocation, from now on."""

    def __init__(self, target: Target, device: str) -> None:
        import torch.cuda.memory as memory

        if target.device.torch_device.type != "cuda":
            raise UserError(
                f"--snapshot: device {device} has no history of allocations; expected cuda",
                hint="the table needs no snapshot: leave --snapshot out",
            )
        self._memory: Any = memory
        self._memory._record_memory_history()

    def dump(self, path: Path) -> None:
        """Write the record and stop recording. Raises UserError if the file cannot be written."""
        try:
            self._memory._dump_snapshot(str(path))
        except OSError as error:
            raise UserError(f"--snapshot {path}: {error.strerror or error}") from error
        finally:
            self._memory._record_memory_history(enabled=None)


# -- the waterfall -------------------------------------------------------------------------------


def waterfall(sample: MemorySample) -> list[MemoryRow]:
    """The layers at one moment, the outermost first, each with its gap."""
    inside = sample.weights + sample.kv_pool + (sample.state_pool or 0)
    other = _less(sample.process_rss, inside)
    block_0 = sample.kv_pool - sample.free - sample.withheld - sample.owned
    workspace = _less(sample.torch_allocated, inside)
    on_gpu = sample.torch_allocated is not None
    return [
        MemoryRow(
            *("NVML used", 0, sample.nvml_used, "other processes"),
            _less(sample.nvml_used, sample.nvml_process),
        ),
        MemoryRow(
            *("this process, on the GPU", 1, sample.nvml_process, "context and libraries"),
            _less(sample.nvml_process, sample.torch_reserved),
        ),
        MemoryRow(
            *("torch reserved", 2, sample.torch_reserved, "cached or in fragments"),
            _less(sample.torch_reserved, sample.torch_allocated),
        ),
        MemoryRow("torch allocated", 3, sample.torch_allocated),
        MemoryRow(
            *("this process, resident", 0, sample.process_rss, "Python, torch, packed weights"),
            None if on_gpu or other is None or other < 0 else other,
        ),
        MemoryRow("weights", 4, sample.weights),
        *_states(sample),
        MemoryRow("workspace", 4, workspace),
        MemoryRow("KV pool", 4, sample.kv_pool, "block 0, nobody's", block_0),
        MemoryRow("free blocks", 5, sample.free),
        MemoryRow("withheld blocks", 5, sample.withheld),
        MemoryRow(
            *("owned blocks", 5, sample.owned, "half-empty tails and reserved rows"),
            sample.owned - sample.live,
        ),
        MemoryRow("live tokens", 6, sample.live),
    ]


def _states(sample: MemorySample) -> list[MemoryRow]:
    """The state pool and its parts."""
    if sample.state_pool is None:
        return [MemoryRow("state pool", 4, None)]
    parts = {
        "free state slots": sample.states_free,
        "withheld state slots": sample.states_withheld,
        "owned state slots": sample.states_owned,
    }
    slot_0 = sample.state_pool - sum(parts.values())
    return [
        MemoryRow("state pool", 4, sample.state_pool, "slot 0, nobody's", slot_0),
        *(MemoryRow(layer, 5, size) for layer, size in parts.items()),
    ]


def undefined_layers(profile: MemoryProfile) -> dict[str, str]:
    """Why each layer of the waterfall that has no size has none."""
    nvml, allocator = (profile.undefined.get(name, "") for name in ("NVML", "torch allocator"))
    reasons = {
        "NVML used": nvml,
        "this process, on the GPU": nvml,
        "torch reserved": allocator,
        "torch allocated": allocator,
        "workspace": allocator,
        "this process, resident": profile.undefined.get("process", ""),
        "state pool": NO_STATE_POOL,
    }
    rows = waterfall(profile.fullest)
    found = {row.layer: reasons[row.layer] for row in rows if row.size is None}
    resident = next(row for row in rows if row.layer == "this process, resident")
    if resident.size is not None and resident.gap is None:
        on_gpu = profile.fullest.torch_allocated is not None
        why = "weights and pools are on the GPU, not in this" if on_gpu else NOT_RESIDENT
        found[resident.gap_name] = why
    return found


def _less(outer: int | None, inner: int | None) -> int | None:
    return None if outer is None or inner is None else outer - inner
