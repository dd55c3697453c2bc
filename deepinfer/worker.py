"""StepPlan -> device work -> sampled ids: the streams and events of a step.

Each step is at most three operations: the copies of blocks and of state slots on stream `copy`, the
forward pass with sampling on stream `compute`. Ordered by events:

    copy      wait(end of step n-1)   copy_blocks n, copy_states n   record(copied)
    compute                           wait(copied)    record(start)   forward n   record(end)

Who else must read state slots between two steps (`deepinfer.transfers`) does so with the copies.

What an operation computes is the `Runner`'s. Where plans look ahead, what is open in them is put in
right before, and what was sampled is carried on right behind: by the runner itself, if all that is
open are tokens (`deepinfer.last_tokens`), else by `deepinfer.carry`.

Knows nothing of requests or of who owns a block: it touches what the plan names. Invariant: a
submit call never waits for the device; but where work runs inside the call (CUDA), one with a
`Carry` waits for what the step before has found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from deepinfer.carry import NO_TOKENS, Accepted, Carry
from deepinfer.device.base import COMPUTE, Device, Event, Readback, Stream
from deepinfer.observer import KV, RECORD, STAGING, STATE, Access
from deepinfer.plan import PLACEHOLDER, AheadResult, Int32, StepPlan, StepResult, WrongRows


@dataclass(frozen=True, slots=True)
class StepReadback:
    """What a step computed, on its way to the host.

    Attributes:
        token_ids, logprobs: int32 [M] and float32 [M]; None if nothing samples.
        wrong_rows: gives what was wrong with the rows read, once the step is done; None where rows
            are not tagged.
        newest: int32 [K], tokens that took the place of the plan's placeholders; None if none did,
            or nobody asks.
    """

    token_ids: Readback | None = None
    logprobs: Readback | None = None
    wrong_rows: Callable[[], WrongRows] | None = None
    newest: Readback | None = None

    def result(self, step: int) -> StepResult:
        """The result of `step`; valid once an event recorded behind it has passed."""
        token_ids, logprobs, wrong_rows = self.token_ids, self.logprobs, self.wrong_rows
        return StepResult(
            step,
            np.empty(0, np.int32) if token_ids is None else token_ids.numpy(),
            np.empty(0, np.float32) if logprobs is None else logprobs.numpy(),
            None if wrong_rows is None else wrong_rows(),
        )


class Runner(Protocol):
    """What a step computes, and the rows it keeps. Called inside submitted work only."""

    def copy_blocks(self, pairs: Int32) -> None:
        """Copy whole blocks: int32 [C, 2], (source, destination).

        All sources are read before any destination is written.
        """
        ...

    def copy_states(self, pairs: Int32) -> None:
        """Copy whole state slots, as `copy_blocks` copies blocks.

        Never called where plans have none: the model's requests have no state.
        """
        ...

    def forward(self, plan: StepPlan) -> StepReadback:
        """Write the rows of the plan's tokens, attend, sample."""
        ...


class InFlightStep:
    """A step submitted whose result has not been read.

    Attributes:
        step: the plan's number.
        plan: as it was made, and once the step is collected as it really ran; with placeholders
            still, where nobody asks what became of them.
        start, end: events; `end` passes when the step's tokens are ready to be read.
    """

    def __init__(self, plan: StepPlan, device: Device) -> None:
        self.step, self.plan = plan.step, plan
        self._device = device
        self.start: Event = device.event(timing=True)
        self.end: Event = device.event(timing=True)
        self._readback = StepReadback()
        self._accepted: Callable[..., Accepted] | None = None
        self._device_ms: float | None = None
        self._recycled = False

    def record_start(self, stream: Stream) -> None:
        """Mark on `stream` where the step's device time begins."""
        stream.record(self.start)

    def deliver(
        self, readback: StepReadback, accepted: Callable[..., Accepted] | None = None
    ) -> None:
        """Inside submitted work: what the step computed is on its way to the host.

        `accepted`, of `Carry.accept`, where the plan looked ahead.
        """
        self._readback, self._accepted = readback, accepted

    def collect(self, timeout_s: float | None = None) -> StepResult:
        """Wait for the step and read its tokens. Raises what the wait for an event raises."""
        self.end.synchronize(timeout_s)
        self._device.on_host("collect", reads=(_number(RECORD, self.step),))
        self._device_ms = self.end.elapsed_ms(self.start)
        result, newest = self._readback.result(self.step), self._readback.newest
        if newest is not None:
            token_ids = self.plan.token_ids.copy()
            token_ids[token_ids == PLACEHOLDER] = newest.numpy()
            self.plan = replace(self.plan, token_ids=token_ids)
        if self._accepted is None:
            ahead = self.plan.ahead
            if ahead is not None:
                result = replace(result, ahead=AheadResult.without_drafts(ahead))
            return result
        accepted = self._accepted(result.logprobs)
        return StepResult(
            self.step, accepted.token_ids, accepted.logprobs, result.tags, accepted.ahead
        )

    def device_ms(self) -> float:
        """Device time of forward and sampling in milliseconds; only after `collect`."""
        assert self._device_ms is not None, "collect() comes first"
        return self._device_ms

    def gap_ms(self, before: InFlightStep) -> float:
        """Device time between the end of the step before and this one's start; both collected."""
        return self.start.elapsed_ms(before.end)

    def recycle(self) -> None:
        """Give both events back to the device's pool; `end` must not be used afterwards."""
        if not self._recycled:
            self._recycled = True
            self._device.recycle(self.start)
            self._device.recycle(self.end)

    @property
    def recycled(self) -> bool:
        """Whether `recycle` was called."""
        return self._recycled


class Worker:
    """Queues the steps of one runner. Per step: `submit_copies`, then `submit_forward`.

    Args:
        carry: what steps hand on to the next ones; None where plans do not look ahead, or where
            the runner does it.
    """

    def __init__(
        self, runner: Runner, device: Device, block_size: int, carry: Carry | None = None
    ) -> None:
        self.runner = runner
        self._carry = carry
        self._device = device
        self._block_size = block_size
        self._copy_stream = device.stream("copy")
        self._compute_stream = device.stream(COMPUTE)
        self._copied = device.event()
        self._previous: InFlightStep | None = None

    def submit_copies(self, plan: StepPlan) -> None:
        """Queue the plan's copies, behind everything the previous step writes.

        An event recorded on stream `copy` right after this call passes when they are done.
        """
        blocks, states = plan.block_copies, plan.state_copies
        if not len(blocks) and not len(states):
            return
        with self.between_steps():
            if len(blocks):
                self._submit_copy(lambda: self.runner.copy_blocks(blocks), KV, blocks, plan.step)
            if len(states):
                self._submit_copy(lambda: self.runner.copy_states(states), STATE, states, plan.step)

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        """What is queued inside on stream `copy` comes behind all that the last step submitted
        writes, and before all that is written by the next one to be."""
        if self._previous is not None and not self._previous.recycled:
            self._copy_stream.wait(self._previous.end)
        yield
        self._copy_stream.record(self._copied)
        self._compute_stream.wait(self._copied)

    def _submit_copy(self, copy: Callable[[], None], kind: str, pairs: Int32, step: int) -> None:
        self._copy_stream.submit(
            copy,
            reads=(Access(kind, pairs[:, 0]), _number(STAGING, step)),
            writes=(Access(kind, pairs[:, 1]),),
            label=f"copy_{'blocks' if kind == KV else 'states'} step {step}",
        )

    def submit_forward(self, plan: StepPlan) -> InFlightStep:
        """Queue forward and sampling of `plan`, behind its copies."""
        flight = InFlightStep(plan, self._device)
        read, written = _touched_rows(plan, self._block_size)
        states = (Access(STATE, plan.state_ids, holders=plan.rows),) if len(plan.state_ids) else ()
        flight.record_start(self._compute_stream)
        self._compute_stream.submit(
            lambda: self._run(plan, flight),
            reads=(read, *states, _number(STAGING, plan.step)),
            writes=(written, *states, _number(RECORD, plan.step)),
            label=f"forward step {plan.step}",
        )
        self._compute_stream.record(flight.end)
        self._previous = flight
        return flight

    def _run(self, plan: StepPlan, flight: InFlightStep) -> None:
        """Inside submitted work: one step."""
        if self._carry is None:
            flight.deliver(self.runner.forward(plan))
            return
        resolved, readback, token_ids = self._carry.resolve(plan), StepReadback(), NO_TOKENS
        if resolved.plan is not None:
            flight.plan = resolved.plan
            readback = self.runner.forward(resolved.plan)
        if readback.token_ids is not None:
            token_ids = self._device.read(readback.token_ids)
        flight.deliver(readback, self._carry.accept(plan, resolved, token_ids))


def _touched_rows(plan: StepPlan, block_size: int) -> tuple[Access, Access]:
    """The rows of KV blocks a step reads and writes, for whoever watches the device seam."""
    starts = np.arange(plan.block_tables.shape[1], dtype=np.int32) * block_size
    in_block = np.minimum(plan.context_lens[:, None] - starts, block_size)
    seqs, columns = (in_block > 0).nonzero()
    read = Access(
        KV,
        plan.block_tables[seqs, columns],
        np.zeros(len(seqs), np.int32),
        in_block[seqs, columns],
        plan.rows[seqs],
    )
    ahead = plan.ahead
    if ahead is not None and np.count_nonzero(ahead.num_unsure):
        # It may begin as many positions further back as there are drafts in flight.
        written = plan.context_lens - plan.num_scheduled - ahead.num_unsure
        first = np.clip(written[:, None] - starts, 0, block_size)
        seqs, columns = (first < in_block).nonzero()
        blocks, holders = plan.block_tables[seqs, columns], plan.rows[seqs]
        return read, Access(KV, blocks, first[seqs, columns], in_block[seqs, columns], holders)
    blocks, offsets = np.divmod(plan.slot_mapping, block_size)
    holders = plan.rows.repeat(plan.num_scheduled)
    return read, Access(KV, blocks, offsets, offsets + 1, holders)


def _number(kind: str, number: int) -> Access:
    return Access(kind, np.array([number]))
