"""StepPlan -> device work -> sampled ids: the streams and events of a step.

Each step is at most three operations: the copies of blocks and of state slots on stream `copy`, the
forward pass with sampling on stream `compute`. Ordered by events:

    copy      wait(end of step n-1)   copy_blocks n, copy_states n   record(copied)
    compute                           wait(copied)    record(start)   forward n   record(end)

Who else must read state slots between two steps (`deepinfer.transfers`) does so with the copies.

What an operation computes is the `Runner`'s. Where plans look ahead, what is open in them is put in
right before, and what was sampled is carried on right behind, by `deepinfer.carry`.

Knows nothing of requests or of who owns a block: it touches what the plan names. Invariant: a
submit call never waits for the device; but where work runs inside the call (CUDA), one with an
exact `Carry` waits for what the step before has found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from deepinfer.carry import Carry
from deepinfer.device.base import COMPUTE, Device, Event, Readback, Stream
from deepinfer.observer import KV, RECORD, STAGING, STATE, Access
from deepinfer.plan import Int32, StepPlan, StepResult, WrongRows
from deepinfer.step_inputs import Sampled, StepInputs


@dataclass(frozen=True, slots=True)
class StepReadback:
    """What a step computed, on its way to the host.

    Attributes:
        token_ids, logprobs: int32 [M] and float32 [M]; None if nothing samples.
        wrong_rows: of `Sampled`.
        accepted: leaves in a result what is part of the sequences; None where all of it is.
        ran: gives the plan as it ran; None where that is as it was made, or nobody asks.
    """

    token_ids: Readback | None = None
    logprobs: Readback | None = None
    wrong_rows: Callable[[], WrongRows] | None = None
    accepted: Callable[[StepResult], StepResult] | None = None
    ran: Callable[[], StepPlan] | None = None

    def result(self, step: int) -> StepResult:
        """The result of `step`; valid once an event recorded behind it has passed."""
        token_ids, logprobs, wrong_rows = self.token_ids, self.logprobs, self.wrong_rows
        result = StepResult(
            step,
            np.empty(0, np.int32) if token_ids is None else token_ids.numpy(),
            np.empty(0, np.float32) if logprobs is None else logprobs.numpy(),
            None if wrong_rows is None else wrong_rows(),
        )
        return result if self.accepted is None else self.accepted(result)


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

    def forward(self, inputs: StepInputs) -> Sampled:
        """Write the rows of the step's tokens, attend, sample."""
        ...


class InFlightStep:
    """A step submitted whose result has not been read.

    Attributes:
        step: the plan's number.
        plan: as it was made, and once the step is collected as it really ran, where somebody asks.
        start, end: events; `end` passes when the step's tokens are ready to be read.
    """

    def __init__(self, plan: StepPlan, device: Device) -> None:
        self.step, self.plan = plan.step, plan
        self._device = device
        self.start: Event = device.event(timing=True)
        self.end: Event = device.event(timing=True)
        self._readback = StepReadback()
        self._device_ms: float | None = None
        self._recycled = False

    def record_start(self, stream: Stream) -> None:
        """Mark on `stream` where the step's device time begins."""
        stream.record(self.start)

    def deliver(self, readback: StepReadback) -> None:
        """Inside submitted work: what the step computed is on its way to the host."""
        self._readback = readback

    def collect(self, timeout_s: float | None = None) -> StepResult:
        """Wait for the step and read its tokens. Raises what the wait for an event raises."""
        self.end.synchronize(timeout_s)
        self._device.on_host("collect", reads=(_number(RECORD, self.step),))
        self._device_ms = self.end.elapsed_ms(self.start)
        if self._readback.ran is not None:
            self.plan = self._readback.ran()
        return self._readback.result(self.step)

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
        carry: what steps hand on to the next ones; None where plans do not look ahead.
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
        device, carry, accepted, ran = self._device, self._carry, None, None
        if carry is None:
            sampled = self.runner.forward(StepInputs(plan, device.upload(plan.token_ids)))
        else:
            inputs = carry.put_in(plan)
            sampled, ran = self.runner.forward(inputs), carry.ran(inputs)
            accepted = carry.accept(plan, sampled.token_ids)
        token_ids, logprobs = (
            None if part is None else device.download(part)
            for part in (sampled.token_ids, sampled.logprobs)
        )
        flight.deliver(StepReadback(token_ids, logprobs, sampled.wrong_rows, accepted, ran))


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
