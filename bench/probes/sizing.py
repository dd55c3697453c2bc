"""How many blocks a profile's memory has room for: weights and largest steps, measured.

The largest steps are run in an engine with a pool just large enough: as many tokens as a step may
have, once in as few prompts as they fit and once in as many as may run. On a GPU NVML and torch's
allocator say what that took; elsewhere the process's resident memory does, out of a budget.

Each measurement for a run has a process of its own: libraries and memory that an earlier one left
behind would make the second answer another one than the first.

Knows devices and engines; `deepinfer.sizing` divides. Invariant: everything taken is given back,
and the lines of the result add up to what there was.
"""

from __future__ import annotations

import dataclasses
import gc
import re
import signal
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from bench.cache_geometry import cache_of
from bench.collect.nvml import NvmlCollector
from bench.spec import PoolQuestion
from deepinfer.config import EngineConfig
from deepinfer.device import open_device
from deepinfer.device.base import Device
from deepinfer.engine import LLMEngine
from deepinfer.errors import UserError
from deepinfer.runners import Model, Weights, load_model
from deepinfer.sequence import SamplingParams
from deepinfer.sizing import Needs, Reading, Sizing, size_pool

PROC = Path("/proc/self")
Steps = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class MeasuredSizing:
    """How many blocks there could be.

    Attributes:
        sizing: the waterfall and the number of blocks.
        needs: of the model; a block has its row tags beside it.
        steps: prompt lengths of each step that was run.
        notes: what a reader must know of how it was measured.
    """

    sizing: Sizing
    needs: Needs
    steps: Steps
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Strict-JSON form."""
        return {
            "num_blocks": self.sizing.num_blocks,
            "lines": [{"name": name, "bytes": size} for name, size in self.sizing.lines],
            "bytes_for_blocks": self.sizing.bytes_for_blocks,
            "needs": dataclasses.asdict(self.needs),
            "steps": [list(step) for step in self.steps],
            "notes": list(self.notes),
        }


def measure_apart(question: PoolQuestion) -> MeasuredSizing:
    """`measure_sizing` in a new process.

    Raises what that raises, and UserError if the process was ended from outside.
    """
    silent = (signal.SIGINT, signal.SIG_DFL)  # Ctrl-C is this process's to tell of
    with ProcessPoolExecutor(
        1, mp_context=get_context("spawn"), initializer=signal.signal, initargs=silent
    ) as process:
        try:
            return process.submit(measure_sizing, question).result()
        except BrokenProcessPool as error:
            raise UserError(
                "num_blocks: auto: what measured it was ended from outside, as the system does "
                "when memory runs out",
                hint="less of max_num_batched_tokens or max_num_seqs, or a number of blocks",
            ) from error


def measure_sizing(question: PoolQuestion) -> MeasuredSizing:
    """Measure on the device of the question, in this process.

    Raises UserError if there is no room for a block, or memory cannot be measured here.
    """
    model, config = question.model, question.engine
    cache, steps = cache_of("", model, config), largest_steps(config)
    device = open_device(question.device)
    try:
        gauge = _gauge(device, question.memory_bytes)
        start = gauge.read(0)
        weights = device.run(lambda: load_model(model, device), label="weights")
        peak = _peak_activation(gauge, model, _room_for(config, steps), device, weights, steps)
        now = gauge.read(weight_bytes(weights))
        needs = Needs(
            weights=weight_bytes(weights),
            peak_activation=peak,
            num_slots=cache.num_slots,
            bytes_per_slot=cache.bytes_per_slot,
            bytes_per_block=cache.bytes_per_block + cache.tag_bytes_per_block,
        )
        return MeasuredSizing(size_pool(start, now, needs), needs, steps, gauge.notes)
    finally:
        device.close()


def largest_steps(config: EngineConfig) -> Steps:
    """Prompt lengths of two steps of `max_num_batched_tokens`: the fewest prompts, and the most.

    A request with drafts has logits of each of them: it counts as so many prompts more.
    """
    budget, longest = config.max_num_batched_tokens, config.max_model_len - 1
    most = min(config.max_num_seqs * (1 + config.drafts), budget)
    fewest = min(-(-budget // longest), most)
    return tuple(
        _shared_out(min(budget, count * longest), count) for count in dict.fromkeys((fewest, most))
    )


def _shared_out(total: int, count: int) -> tuple[int, ...]:
    """`total` as `count` numbers that differ by one at most."""
    return tuple(total // count + (i < total % count) for i in range(count))


def _room_for(config: EngineConfig, steps: Steps) -> EngineConfig:
    """The same engine with pools for one of these steps at a time; no drafts, no checkers."""
    blocks = max(sum(-(-(length + 1) // config.block_size) for length in step) for step in steps)
    return dataclasses.replace(
        config,
        num_blocks=blocks + 1,
        max_num_seqs=max(map(len, steps)),
        num_state_slots=0,
        drafts=0,
        checks="off",
    )


def _peak_activation(
    gauge: _Gauge,
    model: Model,
    config: EngineConfig,
    device: Device,
    weights: Weights,
    steps: Steps,
) -> int:
    """Most bytes that a step held beside what there was before it."""
    rng = np.random.default_rng(0)
    with LLMEngine(model, config, device=device, weights=weights) as engine:
        gauge.start_peak()
        for number, step in enumerate(steps):
            for i, length in enumerate(step):
                prompt = rng.integers(0, model.vocab_size, length)
                engine.add_request(f"{number}.{i}", prompt, SamplingParams(max_tokens=1))
            while engine.has_unfinished():
                engine.step()
        peak = gauge.peak()
    gc.collect()  # the pool goes back before the next reading
    return peak


def weight_bytes(weights: Any) -> int:
    """Bytes of all tensors in a tree of dataclasses and sequences; shared storage counts once."""
    sizes: dict[int, int] = {}

    def visit(node: Any) -> None:
        if dataclasses.is_dataclass(node):
            for each in dataclasses.fields(node):
                visit(getattr(node, each.name))
        elif isinstance(node, list | tuple):
            for part in node:
                visit(part)
        elif hasattr(node, "untyped_storage"):
            storage = node.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()

    visit(weights)
    return sum(sizes.values())


class _Gauge(Protocol):
    """Memory of one device as `deepinfer.sizing` reads it."""

    notes: tuple[str, ...]

    def read(self, held: int) -> Reading:
        """Memory now; `held` bytes of tensors are known to be alive."""
        ...

    def start_peak(self) -> None:
        """Count the peak from here."""
        ...

    def peak(self) -> int:
        """Most bytes held since `start_peak`, beside those held then."""
        ...


def _gauge(device: Device, budget: int | None) -> _Gauge:
    memory = device.memory()
    free = memory.free_bytes
    assert free is not None, "every device that computes knows its free memory"
    limit = free if budget is None else min(free, budget)
    if memory.reserved_bytes is None:
        return _HostGauge(limit)
    return _GpuGauge(device, free - limit)


class _HostGauge:
    """Resident memory of this process, out of a budget that is all free at the first reading."""

    def __init__(self, budget: int) -> None:
        self._budget, self._before = budget, 0
        self._start: int | None = None  # a page can be gone between two looks, and is nobody's
        self.notes: tuple[str, ...] = (
            f"out of {budget:,} bytes; steps measured as resident memory",
        )

    def read(self, held: int) -> Reading:
        """See `_Gauge`."""
        own = _resident("VmRSS")
        if self._start is None:
            self._start = own
        return Reading(self._budget - (own - self._start), own, torch=held, torch_unused=0)

    def start_peak(self) -> None:
        """See `_Gauge`."""
        try:
            (PROC / "clear_refs").write_text("5")  # the peak becomes what is resident now
        except OSError as error:
            raise UserError(f"peak memory cannot be measured here: {error}") from error
        self._before = _resident("VmRSS")

    def peak(self) -> int:
        """See `_Gauge`."""
        return max(_resident("VmHWM") - self._before, 0)


def _resident(name: str) -> int:
    """A figure of /proc/self/status in bytes."""
    try:
        text = (PROC / "status").read_text()
    except OSError as error:
        raise UserError(f"memory of this process cannot be measured here: {error}") from error
    found = re.search(rf"^{name}:\s+(\d+) kB$", text, re.MULTILINE)
    if found is None:
        raise UserError(f"memory of this process cannot be measured here: no {name} in {PROC}")
    return int(found[1]) * 1024


class _GpuGauge:
    """NVML's word on this process and torch's on its allocator; `kept` bytes are not to be used."""

    def __init__(self, device: Device, kept: int) -> None:
        self._device, self._kept, self._before = device, kept, 0
        self.notes: tuple[str, ...] = ()

    def read(self, held: int) -> Reading:
        """See `_Gauge`."""
        memory = self._device.memory()
        total, free = memory.total_bytes or 0, memory.free_bytes or 0
        reserved, allocated = memory.reserved_bytes or 0, memory.allocated_bytes or 0
        with NvmlCollector() as nvml:
            answer = nvml.read()
        own = answer.values["nvml_process_bytes"]
        if own is None:
            own = total - free
            self.notes = (
                f"memory of this process is not known ({answer.reason}): all that was taken since "
                "the start counts as its own",
            )
        return Reading(free - self._kept, int(own), reserved, reserved - allocated)

    def start_peak(self) -> None:
        """See `_Gauge`."""
        import torch

        torch.cuda.reset_peak_memory_stats()
        self._before = self._device.memory().allocated_bytes or 0

    def peak(self) -> int:
        """See `_Gauge`."""
        return (self._device.memory().peak_allocated_bytes or 0) - self._before
