"""Resolved settings of one engine and one model: frozen, plain, no defaults hidden elsewhere.

Knows nothing of YAML, profiles or workloads (`bench.spec` builds these) and nothing of torch.
Invariant: a configuration that passed its `check()` cannot fail an engine by its numbers' types or
by a geometry the network does not have; names of policies are checked where they are looked up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from deepinfer.errors import UserError, check_int, is_int, is_number

DTYPES = ("float32", "bfloat16", "float16")
# Far below it logits / temperature leave the range of float32 and probabilities become NaN, and a
# thousandth is as good as greedy already.
MIN_TEMPERATURE = 1e-3
MAX_DRAFTS = 5  # with the token they follow, six rows a step: what rings have room for
MAX_TIMEOUT_S = 1e6  # eleven days; the clocks that count it down end at some larger number


def check_state_slots(value: object) -> None:
    """Raise UserError for a `num_state_slots` of which nobody could take one."""
    check_int("num_state_slots", value, 0)
    if value == 1:
        raise UserError(
            "num_state_slots: 1 leaves no usable slot",
            hint="0 = by max_num_seqs, or at least 2",
        )


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything the host side of an engine needs to know.

    Attributes:
        block_size: token positions per KV block.
        num_blocks: blocks in the pool, block 0 included; `num_blocks - 1` can be handed out.
        max_num_seqs: most requests running at once.
        num_state_slots: slots in the pool of a model whose requests have state, slot 0 included;
            0 = `sizing.num_state_slots` of `max_num_seqs`.
        max_num_batched_tokens: token budget of a step; a longer prompt is computed in chunks.
        max_model_len: most tokens (prompt + output) a request may have.
        release: release policy, a name in `deepinfer.release.POLICIES`.
        free_order: in which order one table's blocks join the free list (`FREE_ORDERS`).
        discipline: where blocks join and leave the free list (`DISCIPLINES`).
        fence: `step` = one event for all blocks a step withholds, `block` = one event per block.
        admission: `prompt` reserves the blocks of the tokens there are, `lifetime` those of the
            longest the request may become (so it is never preempted).
        preemption: which running request gives way, a name in `deepinfer.scheduler.PREEMPTION`.
        fork_copy: `last` copies the last block of a fork even if it is full (the engine of
            the book), `partial` only if rows will be written into it.
        prefix_cache: whether blocks are found by what they hold, and shared by all requests whose
            tokens begin alike.
        store_bytes: bytes of host memory for rows that outlive their blocks; 0 = no store.
        store_directory: where they are kept beyond the process, too; None = nowhere.
        store_directory_bytes: most bytes of its files.
        load_stream: where kept rows come back, a name in `deepinfer.names.LOAD_STREAMS`.
        overlap: how many steps are planned before the last result is known, a name in
            `deepinfer.names.OVERLAPS`: `off`, `on` (one), `2`.
        drafts: most draft tokens that a step verifies for each request; 0 = none.
        drafter: who proposes them, a name in `deepinfer.names.DRAFTERS`.
        checks: `off`, `all`, or checkers (`deepinfer.names.CHECKS`) joined by `+`.
        timeout_s: longest the host waits for a step's result, or for a fence, in seconds; 0 = no
            limit.
        seed: of the `shuffled` free order.
    """

    block_size: int = 128
    num_blocks: int = 129
    max_num_seqs: int = 64
    num_state_slots: int = 0
    max_num_batched_tokens: int = 1024
    max_model_len: int = 8192
    release: str = "deferred"
    free_order: str = "reverse"
    discipline: str = "fifo"
    fence: str = "step"
    admission: str = "prompt"
    preemption: str = "newest"
    fork_copy: str = "last"
    prefix_cache: bool = False
    store_bytes: int = 0
    store_directory: Path | None = None
    store_directory_bytes: int = 0
    load_stream: str = "load"
    overlap: str = "off"
    drafts: int = 0
    drafter: str = "ngram"
    checks: str = "off"
    timeout_s: float = 300.0
    seed: int = 0

    @property
    def looks_ahead(self) -> bool:
        """Whether steps may be planned before the tokens they go on from are known."""
        return self.drafts > 0 or self.overlap != "off"

    @property
    def uses_draft_layers(self) -> bool:
        """Whether the model's own draft layers propose; else they take no room."""
        return self.drafts > 0 and self.drafter == "mtp"

    def check(self) -> None:
        """Raise UserError, naming the key, for a number that is of another type or out of range."""
        for key in ("block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            check_int(key, getattr(self, key), 1)
        check_int("num_blocks", self.num_blocks, 2)
        check_int("drafts", self.drafts, 0)
        if self.drafts > MAX_DRAFTS:
            raise UserError(f"drafts: {self.drafts}; expected at most {MAX_DRAFTS} a step")
        check_int("seed", self.seed, 0)
        check_int("store_bytes", self.store_bytes, 0)
        check_int("store_directory_bytes", self.store_directory_bytes, 0)
        self._check_store()
        check_state_slots(self.num_state_slots)
        if not is_number(self.timeout_s) or not 0 <= self.timeout_s <= MAX_TIMEOUT_S:
            raise UserError(f"timeout_s: {self.timeout_s!r}; expected 0 to {MAX_TIMEOUT_S:g}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise UserError(
                f"max_num_batched_tokens: {self.max_num_batched_tokens} is less than "
                f"max_num_seqs {self.max_num_seqs}",
                hint="every running request needs a token of the budget in each step",
            )

    def _check_store(self) -> None:
        directory, num_bytes = self.store_directory, self.store_directory_bytes
        if directory is not None and not isinstance(directory, Path):
            raise UserError(f"store_directory: {directory!r}; expected a pathlib.Path, or None")
        if directory is not None and not self.store_bytes:
            raise UserError(
                f"store_directory: {directory} is for a store, and store_bytes is 0",
                hint="store_bytes: as many as the rows of a few requests take, or more",
            )
        if (directory is not None) != (num_bytes > 0):
            raise UserError(
                f"store_directory_bytes: {num_bytes} with store_directory: {directory}",
                hint="give both, or neither",
            )


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Geometry of a Qwen3 network; the names are those of a Hugging Face `config.json`.

    `path` names a folder with `config.json` and safetensors; without it the weights are drawn from
    `seed`. `dtype` is a torch dtype name.
    """

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rope_theta: float = 1e6
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = True
    dtype: str = "float32"
    seed: int = 0
    path: Path | None = None

    def check(self) -> None:
        """Raise UserError, naming the key, for a geometry this network cannot have."""
        for key in (
            *("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads"),
            *("head_dim", "intermediate_size", "vocab_size"),
        ):
            check_int(key, getattr(self, key), 1)
        if self.head_dim % 2:
            raise UserError(f"head_dim: {self.head_dim}; must be even, for rotary pairs")
        if self.num_attention_heads % self.num_key_value_heads:
            raise UserError(
                f"num_attention_heads: {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        for key in ("rope_theta", "rms_norm_eps"):
            value = getattr(self, key)
            if not is_number(value) or not 0 < value < math.inf:
                raise UserError(f"{key}: {value!r}; expected a positive number")
        if self.dtype not in DTYPES:
            raise UserError(f"dtype: {self.dtype!r} is not one of {', '.join(DTYPES)}")
        if not is_int(self.seed):
            raise UserError(f"seed: {self.seed!r}; expected an integer")
