"""A whole engine without a network, and beside it what everything should be.

    user calls -> LLMEngine (scheduler, block manager, release queue, worker) -> stepped device
                                                 TokenRunner, Transfers moves rows of numbers

Only what a step computes is replaced: requests, blocks, fences, streams and events are the real
ones. The world knows the tokens of every live request and how many of its rows are committed, so it
can say for each row that is read what it must hold; it knows no release policy.

Invariant: the world's own books follow from what it asked for and what it was answered, never from
the engine's; what does not fit is noted in `problems`, one line each.

Where plans look ahead, nobody tells the world a step's tokens before it has run. It then goes by
what a request's tokens must be (`right_answer`), and drafts are these, some of them replaced.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np

from deepinfer.block_manager import BlockManager, Verdict
from deepinfer.config import EngineConfig
from deepinfer.device.base import COMPUTE, Device
from deepinfer.device.cpu import SteppedCpuDevice
from deepinfer.device.wrapper import DeviceWrapper
from deepinfer.drafters.acceptance import Acceptance
from deepinfer.drafters.replay import ReplayDrafter
from deepinfer.engine import LLMEngine
from deepinfer.errors import OwnershipError
from deepinfer.observer import Observer
from deepinfer.outputs import RequestOutput, StepOutput
from deepinfer.plan import Int32, StepPlan, StepResult
from deepinfer.release import Fence, ReleaseQueue
from deepinfer.runners import state_pool
from deepinfer.scheduler import Scheduler
from deepinfer.sequence import SamplingParams
from deepinfer.step_account import SubmittedStep
from deepinfer.testing.model import VOCAB_SIZE, model_of, right_answer
from deepinfer.testing.tokens import EMPTY, TokenRows, TokenRunner, extend, prefixes
from deepinfer.testing.transfers import Transfers

HALF_RIGHT = Acceptance(((0.5,),))


@dataclass(frozen=True, slots=True)
class Flight:
    """A step in flight.

    Attributes:
        plan: as it was made.
        names: its requests.
        turns: how often each of them had got a row by then.
    """

    plan: StepPlan
    names: list[str]
    turns: list[int]


class OneStream(DeviceWrapper):
    """A device all of whose streams are one: everything runs in the order submitted."""

    def stream(self, name: str) -> Any:
        """The one stream."""
        return super().stream(COMPUTE)


class _Engine(LLMEngine):
    """An engine that shows the world each plan before it is queued."""

    world: World

    def _plan(self) -> StepPlan | None:
        plan = super()._plan()
        self.world.planned(plan)
        return plan

    def _result(self, step: SubmittedStep) -> StepResult:
        result, said = super()._result(step), self.world.said
        return result if said is None else replace(result, token_ids=said)


class World:
    """One engine on a stepped device, what it should do, and transfers beside it.

    With `num_state_slots` in its configuration the requests have state.

    Args:
        config: of the engine.
        device: a stepped device, or one in front of it; by default a new one.
        block_manager: the class of the block pool.
        observers: told of all that happens.
        acceptance: how often drafts are right, where there are any.

    Attributes:
        tokens: of every live request.
        ended: of every other one: why it ended, and its tokens.
        computed: committed rows of every running request.
        in_flight: steps submitted and not collected, oldest first.
        rows: what transfers move.
        problems: what was not as it should be; wrong rows are counted instead.
        num_actions: calls that changed something: requests, steps, transfers.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        device: Device | None = None,
        block_manager: type[BlockManager] = BlockManager,
        observers: Sequence[Observer] = (),
        acceptance: Acceptance = HALF_RIGHT,
    ) -> None:
        config.check()
        self.config = config
        self.device = self.choices = device or SteppedCpuDevice()
        if isinstance(device, OneStream):
            self.choices = device.inner
        self._has_state = config.num_state_slots > 0
        model = model_of(config)
        states = state_pool(model, config)
        self.runner = TokenRunner(
            config.num_blocks,
            config.block_size,
            VOCAB_SIZE,
            *(() if states is None else (states.num_slots, states.max_rewind)),
        )
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, tuple[str, list[int]]] = {}
        self.computed: dict[str, int] = {}
        self.limits: dict[str, int] = {}  # tokens at which a request ends by length
        self.in_flight: deque[Flight] = deque()
        self.problems: list[str] = []
        self.said: Int32 | None = None  # instead of what the step to be collected has sampled
        self.num_actions = 0
        # What the rows of a live request hold; where plans look ahead, up to its end by length.
        self._truth: dict[str, list[int]] = {}
        self._references: dict[str, Int32] = {}  # what a request's tokens must be, for drafts
        self._turns: dict[str, int] = {}  # how often each request got a row
        self._stops: dict[str, int | None] = {}
        self._prompt_lengths: dict[str, int] = {}
        self.engine = _Engine(
            model,
            config,
            device=self.device,
            block_manager=block_manager,
            observers=observers,
            runner=self.runner,
            drafter=ReplayDrafter(self._references, acceptance, config.seed, VOCAB_SIZE),
        )
        self.engine.world = self
        self.rows = TokenRows(self.runner, self._truth)
        self.transfers = Transfers(self.engine, self.rows)

    @property
    def plan(self) -> StepPlan | None:
        """The newest step in flight; None without one."""
        return self.in_flight[-1].plan if self.in_flight else None

    @property
    def planned_ids(self) -> list[str]:
        """The requests of the newest step in flight."""
        return self.in_flight[-1].names

    @property
    def can_submit(self) -> bool:
        """Whether one more step may be in flight."""
        return len(self.in_flight) < self.engine.max_in_flight

    @property
    def blocks(self) -> BlockManager:
        """The pool."""
        return self.engine.blocks

    @property
    def slots(self) -> BlockManager | None:
        """The pool of state slots, if requests have state."""
        states = self.engine.states
        return None if states is None else states.slots

    @property
    def release(self) -> ReleaseQueue:
        """The release queue."""
        return self.engine.release

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler."""
        return self.engine.scheduler

    @property
    def wrong_rows(self) -> int:
        """Rows that a step or a transfer read and that did not hold what belongs there."""
        return self.runner.wrong_rows + self.transfers.wrong_rows

    # -- requests --------------------------------------------------------------------------------

    def add(
        self, request_id: str, prompt: Iterable[int], max_tokens: int = 4, stop: int | None = None
    ) -> Verdict:
        """Queue a request; the verdict is compared with what the pool can ever hold."""
        tokens = list(prompt)
        params = SamplingParams(max_tokens=max_tokens, stop_token_id=stop)
        verdict = self.engine.add_request(request_id, tokens, params)
        self._accepted(verdict, request_id, tokens, params)
        return verdict

    def fork(
        self,
        parent_id: str,
        request_id: str,
        *,
        own: Sequence[int] = (),
        num_shared: int | None = None,
        max_tokens: int = 4,
    ) -> Verdict:
        """Queue a child of a running request."""
        params = SamplingParams(max_tokens=max_tokens)
        verdict = self.engine.fork(
            parent_id,
            request_id,
            params,
            own_token_ids=np.array(own, np.int32),
            num_shared_tokens=num_shared,
        )
        self._accepted(verdict, request_id, [*self.tokens[parent_id][:num_shared], *own], params)
        return verdict

    def abort(self, request_id: str) -> None:
        """End a live request, also with a step in flight."""
        self.num_actions += 1
        output = self.engine.abort(request_id)
        self._compare_output(output)
        self._end(request_id, "abort")

    # -- steps -----------------------------------------------------------------------------------

    def submit(self) -> bool:
        """Plan and queue a step; False if there is nothing to run."""
        self.num_actions += 1
        queued = self.engine.submit()
        if not (queued or self.in_flight or self.transfers.held) and self.tokens:
            self._problem("requests are live, but nothing runs and nothing is withheld")
        return queued

    def planned(self, plan: StepPlan | None) -> None:
        """Called by the engine between planning a step and queuing it."""
        running = {seq.row: seq.request_id for seq in self.scheduler.running}
        alive = set(running.values())
        self.computed = {name: n for name, n in self.computed.items() if name in alive}
        if plan is None:
            return
        for seq in self.scheduler.started:  # a fork starts with the rows it shares
            name = seq.request_id
            self.computed[name] = int(self.scheduler.seqs.num_computed_tokens[seq.row])
            self._turns[name] = self._turns.get(name, 0) + 1
        names = [running[row] for row in plan.rows.tolist()]
        self.in_flight.append(Flight(plan, names, [self._turns[name] for name in names]))
        rows = zip(plan.rows.tolist(), names, strict=True)
        self.runner.expect(plan.step, {row: self._truth[name] for row, name in rows})

    def collect(self, sampled: Sequence[int] | None = None) -> StepOutput:
        """Wait for the oldest step in flight.

        Args:
            sampled: what the model shall have said instead, where plans do not look ahead.
        """
        self.num_actions += 1
        assert sampled is None or not self.scheduler.looks_ahead, "nobody tells the device"
        self.said = None if sampled is None else np.array(sampled, np.int32)
        output = self.engine.collect()
        self.said = None
        self._follow(self.in_flight.popleft(), output)
        return output

    def step(self, sampled: Sequence[int] | None = None) -> StepOutput | None:
        """Submit what may be in flight and collect one step; None if there was nothing to run."""
        while self.can_submit and self.submit():
            pass
        return self.collect(sampled) if self.in_flight else None

    def drain(self, max_steps: int = 2000) -> None:
        """Run everything to its end; the pool must then be as it was at the start."""
        while self.in_flight:
            self.collect()
        for name in list(self.transfers.held):
            self.use(name)
        for _ in range(max_steps):
            if self.step() is None:
                break
        self.engine.device.synchronize()
        self.release.flush()  # what transfers gave up
        self.transfers.tidy()
        if self.tokens:
            self._problem(f"still live after {max_steps} steps: {', '.join(self.tokens)}")
        elif self.blocks.num_free != self.blocks.num_usable:
            self._problem(
                f"drained, and {self.blocks.num_free} of {self.blocks.num_usable} blocks are free"
            )
        elif self.slots is not None and self.slots.num_free != self.slots.num_usable:
            self._problem(
                f"drained, and {self.slots.num_free} of {self.slots.num_usable} slots are free"
            )
        self._check_counters()

    # -- transfers -------------------------------------------------------------------------------

    def load(self, name: str, num_rows: int) -> bool:
        """Load rows that belong to no request; False without room."""
        self.num_actions += 1
        return self.transfers.load_in(name, num_rows)

    def use(self, name: str) -> None:
        """Read a load's rows behind its writing, and give them up."""
        self.num_actions += 1
        self.transfers.use(name)

    def drop(self, name: str) -> None:
        """Give a load up unread."""
        self.num_actions += 1
        self.transfers.drop(name)

    def save(self, name: str, request_id: str) -> Fence:
        """Save a running request's committed rows; passes the fence."""
        self.num_actions += 1
        return self.transfers.save_out(name, request_id)

    # -- looking ---------------------------------------------------------------------------------

    def table(self, request_id: str) -> list[int]:
        """The block table of a running request."""
        ids: list[int] = self.scheduler.seqs.table(self.scheduler.find(request_id).row).tolist()
        return ids

    def running_ids(self) -> list[str]:
        """The requests that have a row, by admission."""
        return [seq.request_id for seq in self.scheduler.running]

    def readable_ids(self) -> list[str]:
        """The running requests that have committed rows."""
        return [name for name in self.running_ids() if self.computed.get(name)]

    def written_rows(self) -> set[tuple[int, int]]:
        """(block, offset) of every row that was ever written."""
        size = self.config.block_size
        return {divmod(slot, size) for slot, row in enumerate(self.runner.rows) if row != EMPTY}

    def wrong_tokens(self) -> int:
        """Tokens of all requests, ended or live, that differ from those a right pool gives."""
        wrong = 0
        known = {**{name: tokens for name, (_, tokens) in self.ended.items()}, **self.tokens}
        for name, tokens in known.items():
            prompt = tokens[: self._prompt_lengths[name]]
            right = right_answer(prompt, len(tokens) - len(prompt), has_state=self._has_state)
            wrong += sum(map(int.__ne__, tokens[len(prompt) :], right))
        return wrong

    # -- inside ----------------------------------------------------------------------------------

    def _problem(self, text: str) -> None:
        self.problems.append(text)

    def _accepted(
        self, verdict: Verdict, request_id: str, prompt: list[int], params: SamplingParams
    ) -> None:
        self.num_actions += 1
        limit = len(prompt) + params.max_tokens
        fits = limit <= self.config.max_model_len
        fits = fits and -(-(limit - 1) // self.config.block_size) <= self.config.num_blocks - 1
        if (verdict is not Verdict.NEVER) != fits:
            self._problem(f"{request_id} was answered {verdict.value}, {fits=}")
        if verdict is not Verdict.NEVER:
            self.tokens[request_id] = prompt
            self.limits[request_id] = limit
            self._truth[request_id] = prefixes(prompt)
            if self.scheduler.looks_ahead:
                answer = right_answer(prompt, params.max_tokens, has_state=self._has_state)
                self._truth[request_id] = prefixes([*prompt, *answer])
                self._references[request_id] = np.array([*prompt, *answer], np.int32)
            self._stops[request_id] = params.stop_token_id
            self._prompt_lengths[request_id] = len(prompt)

    def _follow(self, flight: Flight, output: StepOutput) -> None:
        """Move the books on as the result says, and compare what the engine reported."""
        plan, ahead = flight.plan, flight.plan.ahead
        brought = zip(output.request_ids, output.token_ids.tolist(), strict=True)
        tokens = {
            name: [token for _, token in pairs] for name, pairs in groupby(brought, lambda p: p[0])
        }
        sampling, due = set(plan.sample_seq.tolist()), []
        for index, (name, turn) in enumerate(zip(flight.names, flight.turns, strict=True)):
            if name not in self.computed or self._turns[name] != turn:
                continue  # aborted or preempted since
            if index in sampling:
                due.append(name)
                most = 1 if ahead is None else int(ahead.num_pending[index])
                if len(tokens.get(name, ())) > most:
                    self._problem(f"step {plan.step} brought {name} {tokens[name]}, at most {most}")
            else:
                self.computed[name] += int(plan.num_scheduled[index])
        if list(tokens) != due:
            self._problem(f"step {plan.step} brought tokens for {list(tokens)}, not {due}")
        finished = {ended.request_id: ended for ended in output.finished}
        for name, new in tokens.items():
            self._append(name, new, finished.get(name))

    def _append(self, name: str, new: list[int], reported: RequestOutput | None) -> None:
        """A request got tokens; `reported`: what was said of its end."""
        reason = None
        for token in new:
            if reason is not None:
                self._problem(f"{name} got {token} behind its end by {reason}")
            self.tokens[name].append(token)
            if not self.scheduler.looks_ahead:
                self._truth[name].append(extend(self._truth[name][-1], token))
            if len(self.tokens[name]) >= self.limits[name]:
                reason = "length"
            if token == self._stops[name]:
                reason = "stop"
        self.computed[name] = len(self.tokens[name]) - 1
        if reason != (reported.finish_reason if reported else None):
            self._problem(f"{name} should have ended by {reason}; reported: {reported}")
        if reported:
            self._compare_output(reported)
            self._end(name, reported.finish_reason)

    def _compare_output(self, output: RequestOutput) -> None:
        tokens = output.prompt_token_ids.tolist() + output.token_ids.tolist()
        if tokens != self.tokens[output.request_id]:
            self._problem(f"{output.request_id} was told {tokens}")

    def _end(self, request_id: str, reason: str) -> None:
        self.ended[request_id] = (reason, self.tokens.pop(request_id))
        self.computed.pop(request_id, None)
        del self.limits[request_id], self._truth[request_id], self._stops[request_id]

    def _check_counters(self) -> None:
        try:
            self.blocks.check_integrity()
            if self.slots is not None:
                self.slots.check_integrity()
        except OwnershipError as error:
            self._problem(str(error))
