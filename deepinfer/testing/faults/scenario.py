"""A short, eventful life for one engine: everything that can go wrong gets its chance.

Requests arrive, fork, finish and are aborted, in a pool so small that they are preempted; blocks
are loaded and saved beside them on a stream of its own; the device runs behind and stops anywhere.
All of it is drawn from one seed.

Knows neither faults nor checkers. Invariant: the scenario does only what a user of the engine may
do, so whatever is found wrong is the engine's doing.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from deepinfer.config import EngineConfig, ModelConfig
from deepinfer.device.cpu import SteppedCpuDevice
from deepinfer.engine import LLMEngine
from deepinfer.errors import DeepInferError, StaleRecordError, UnknownRequestError
from deepinfer.models.hybrid.layer_plan import V4, Compressor, HybridConfig, Layer
from deepinfer.outputs import StepOutput
from deepinfer.sequence import SamplingParams
from deepinfer.testing.transfers import Transfers

MODEL = ModelConfig(
    num_hidden_layers=1,
    hidden_size=32,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    intermediate_size=32,
    vocab_size=64,
)
MODEL_WITH_STATE = HybridConfig(
    family=V4,
    layers=(
        Layer(0),
        Layer(
            1,
            4,
            Compressor(4, gated=True, overlap=True, position_bias=True),
            source=1,
            selector=1,
            index_keys="pooled",
        ),
    ),
    vocab_size=MODEL.vocab_size,
    hidden_size=32,
    num_attention_heads=2,
    head_dim=32,
    qk_rope_head_dim=8,
    q_lora_rank=16,
    o_groups=2,
    o_lora_rank=8,
    sliding_window=8,
    index_n_heads=2,
    index_head_dim=32,
    index_topk=3,
    moe_intermediate_size=16,
    n_routed_experts=4,
    num_experts_per_tok=2,
    max_draft_tokens=0,
)
CONFIG = EngineConfig(
    block_size=4,
    num_blocks=17,
    discipline="lifo",  # what is free too early is handed out at once
    max_num_seqs=6,
    max_num_batched_tokens=16,
    max_model_len=72,  # more than the pool has room for: some requests can never fit
    checks="tags+order+conservation",
)
# An engine that moves rows itself, to a store with room for few entries. These end every 128
# tokens, so all lengths are 16 times as long, and as many steps compute them.
WITH_STORE: dict[str, Any] = {
    "block_size": 16 * CONFIG.block_size,
    "max_num_batched_tokens": 16 * CONFIG.max_num_batched_tokens,
    "max_model_len": 16 * CONFIG.max_model_len,
    "store_bytes": 100_000,
}
LONGEST = 10  # blocks of a request that can fit
MAX_LOADS = 3  # whose blocks the client holds at once


class StallError(DeepInferError):
    """Requests are unfinished, and the engine runs none of them."""


@dataclass(frozen=True, slots=True)
class Odds:
    """How likely each thing is in one step, 0 to 1."""

    arrival: float = 0.5
    too_long: float = 0.05
    fork: float = 0.6
    orphan: float = 0.3  # a fork whose parent is aborted at once
    abort: float = 0.1
    abort_in_flight: float = 0.15
    late_abort: float = 0.15  # of a request that has ended, by a client that does not know yet
    again: float = 0.7  # a prompt that begins with an earlier one, where there is a store
    abort_loading: float = 0.3  # of a request that has begun to load, before it runs
    save: float = 0.3
    load: float = 0.5


class Scenario:
    """Drives one engine on a stepped device, with a client beside it or (None) alone.

    Attributes:
        tokens: what each request that has finished said.
        told: by step, what its record showed when it could last be read.
    """

    def __init__(
        self,
        engine: LLMEngine,
        device: SteppedCpuDevice,
        seed: int,
        transfers: Transfers | None,
        odds: Odds | None = None,
    ) -> None:
        self._engine = engine
        self._device = device
        self._transfers = transfers
        self._rng = np.random.default_rng(seed)
        self._odds = odds or Odds()
        self.tokens: dict[str, list[int]] = {}
        self.told: dict[int, tuple[list[str], list[int]]] = {}
        self._outputs: list[StepOutput] = []  # whose records may be readable still
        self._num_names = 0
        self._scale = engine.config.block_size // CONFIG.block_size
        self._prompts: deque[np.ndarray] = deque(maxlen=3)
        self._ended: deque[str] = deque(maxlen=2)

    def step(self) -> None:
        """One step of the engine and what happens around it. Raises StallError."""
        rng, odds, engine = self._rng, self._odds, self._engine
        if rng.random() < odds.arrival:
            self._arrive()
        if rng.random() < odds.fork:
            self._fork()
        if rng.random() < odds.abort:
            self._abort()
        if rng.random() < odds.late_abort and self._ended:
            with suppress(UnknownRequestError):
                engine.abort(self._ended.pop())
        self._transfer()
        self._read()
        if not self._submit():
            return
        self._read()
        self._abort_loading()
        self._progress()
        self._transfer()
        if rng.random() < odds.abort_in_flight:
            self._abort()
        self._progress()
        self._transfer()
        output = engine.collect()
        self._outputs.append(output)
        self._read()
        self._ended += [ended.request_id for ended in output.finished]
        self.tokens |= {ended.request_id: ended.token_ids.tolist() for ended in output.finished}

    # -- what happens ----------------------------------------------------------------------------

    def _submit(self) -> bool:
        """Queue what may be in flight; if nothing is, give who waits the client's blocks."""
        if self._engine.submit_all():
            return True
        if self._transfers is not None and self._transfers.held:
            for name in self._transfers.held:
                self._transfers.drop(name)
            if self._engine.submit_all():
                return True
        if self._engine.has_unfinished():
            raise StallError("requests are unfinished, and none can run")
        return False

    def _arrive(self) -> None:
        too_long = self._rng.random() < self._odds.too_long
        num_tokens = int(self._rng.integers(1, 24))
        num_new = 0 if too_long else int(self._rng.integers(1, 24))
        prompt = self._prompt(num_tokens * self._scale)
        if too_long:
            num_new = max(1, self._engine.config.max_model_len - len(prompt))
        self._engine.add_request(self._new_id(), prompt, SamplingParams(max_tokens=num_new))

    def _fork(self) -> None:
        running = self._engine.scheduler.running
        if not running:
            return
        parent = running[int(self._rng.integers(len(running)))]
        length = int(self._engine.scheduler.seqs.num_tokens[parent.row])
        sampling = SamplingParams(max_tokens=int(self._rng.integers(1, 8)), temperature=1.0)
        if length >= LONGEST * self._engine.config.block_size:
            return
        own, shared = 0, length
        if self._rng.random() < 0.5:
            own = int(self._rng.integers(1, 6)) * self._scale
            shared = int(self._rng.integers(1, length + 1))
        self._engine.fork(
            parent.request_id,
            self._new_id(),
            sampling,
            own_token_ids=self._tokens(own),
            num_shared_tokens=shared,
        )
        if self._rng.random() < self._odds.orphan:
            self._engine.abort(parent.request_id)

    def _abort(self) -> None:
        scheduler = self._engine.scheduler
        ids = [seq.request_id for seq in (*scheduler.running, *scheduler.waiting)]
        if ids:
            self._engine.abort(ids[int(self._rng.integers(len(ids)))])

    def _abort_loading(self) -> None:
        for load in self._engine.scheduler.loads:
            if self._rng.random() < self._odds.abort_loading:
                self._engine.abort(load.seq.request_id)

    def _transfer(self) -> None:
        """Begin a load or a save, or end a load."""
        if self._transfers is None:
            return
        rng, running = self._rng, self._engine.scheduler.running
        if rng.random() < self._odds.save and running:
            seq = running[int(rng.integers(len(running)))]
            if self._engine.scheduler.seqs.num_computed_tokens[seq.row]:
                self._transfers.save_out(self._new_id("save"), seq.request_id)
        held = list(self._transfers.held)
        if held and rng.random() < 0.5:
            name = held[int(rng.integers(len(held)))]
            (self._transfers.use if rng.random() < 0.7 else self._transfers.drop)(name)
        elif rng.random() < self._odds.load and len(held) < MAX_LOADS:
            self._transfers.load_in(self._new_id("load"), int(rng.integers(1, 9)))
        self._transfers.tidy()

    def _read(self) -> None:
        """Read every record that can be read, as a caller who keeps outputs as long as may be."""
        outputs, self._outputs = self._outputs, []
        for output in outputs:
            with suppress(StaleRecordError):
                shown = output.request_ids, output.token_ids.tolist()
                self.told[output.stats.step] = shown
                self._outputs.append(output)

    def _progress(self) -> None:
        """Let the device run some operations, in any order that streams and events allow."""
        for _ in range(int(self._rng.integers(0, 4))):
            names = self._device.runnable()
            if names:
                self._device.advance(names[int(self._rng.integers(len(names)))])

    # -- small change ----------------------------------------------------------------------------

    def _new_id(self, kind: str = "r") -> str:
        self._num_names += 1
        return f"{kind}{self._num_names}"

    def _prompt(self, num_tokens: int) -> np.ndarray:
        """New tokens, or where there is a store behind a prompt that may be kept there."""
        prompt = self._tokens(num_tokens)
        if self._engine.store is None:
            return prompt
        if self._prompts and self._rng.random() < self._odds.again:
            earlier = self._prompts[int(self._rng.integers(len(self._prompts)))]
            prompt = np.concatenate((earlier, prompt[: 2 * self._scale]))
        if len(prompt) < LONGEST * self._engine.config.block_size:
            self._prompts.append(prompt)
        return prompt

    def _tokens(self, count: int) -> np.ndarray:
        return self._rng.integers(0, self._engine.model.vocab_size, count)
