"""A whole engine without a network, and beside it what everything should be.

    user calls -> LLMEngine (scheduler, block manager, release queue, worker) -> stepped device
                                                 TokenRunner, Transfers moves rows of numbers

Only what a step computes is replaced: requests, blocks, fences, streams and events are the real
ones. The world knows the tokens of every live request and how many of its rows are committed, so it
can say for each row that is read what it must hold; it knows no release policy.

Invariant: the world's own books follow from what it asked for and what it was answered, never from
the engine's; what does not fit is noted in `problems`, one line each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from deepinfer.block_manager import BlockManager, Verdict
from deepinfer.config import EngineConfig, ModelConfig
from deepinfer.device.base import COMPUTE, Device
from deepinfer.device.cpu import SteppedCpuDevice
from deepinfer.device.wrapper import DeviceWrapper
from deepinfer.engine import LLMEngine
from deepinfer.errors import OwnershipError
from deepinfer.models.hybrid.layer_plan import V41, HybridConfig
from deepinfer.observer import Observer
from deepinfer.outputs import RequestOutput, StepOutput
from deepinfer.plan import Int32, StepPlan
from deepinfer.release import Fence, ReleaseQueue
from deepinfer.runners import state_pool
from deepinfer.scheduler import Scheduler
from deepinfer.sequence import SamplingParams
from deepinfer.testing.tokens import EMPTY, TokenRunner, extend, next_token, prefixes
from deepinfer.testing.transfers import Transfers

VOCAB_SIZE = 9  # of what is sampled; a prompt may have any tokens
# Geometries for the engine's checks of token ids; nothing else looks at them.
MODEL = ModelConfig(
    num_hidden_layers=1,
    hidden_size=1,
    num_attention_heads=1,
    num_key_value_heads=1,
    head_dim=2,
    intermediate_size=1,
    vocab_size=1 << 30,
)


MODEL_WITH_STATE = HybridConfig(
    family=V41,
    layers=(),
    vocab_size=1 << 30,
    hidden_size=1,
    num_attention_heads=1,
    head_dim=2,
    qk_rope_head_dim=2,
    q_lora_rank=1,
    o_groups=1,
    o_lora_rank=1,
    sliding_window=1,
    index_n_heads=1,
    index_head_dim=2,
    index_topk=1,
    moe_intermediate_size=1,
    n_routed_experts=1,
    num_experts_per_tok=1,
    max_draft_tokens=0,
)


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


class World:
    """One engine on a stepped device, what it should do, and transfers beside it.

    With `num_state_slots` in its configuration the requests have state.

    Args:
        config: of the engine.
        device: a stepped device, or one in front of it; by default a new one.
        block_manager: the class of the block pool.
        observers: told of all that happens.

    Attributes:
        tokens: of every live request.
        ended: of every other one: why it ended, and its tokens.
        computed: committed rows of every running request.
        plan: the step in flight; None without one.
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
    ) -> None:
        config.check()
        self.config = config
        self.device = self.choices = device or SteppedCpuDevice()
        if isinstance(device, OneStream):
            self.choices = device.inner
        self._has_state = config.num_state_slots > 0
        model = MODEL_WITH_STATE if self._has_state else MODEL
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
        self.plan: StepPlan | None = None
        self.planned_ids: list[str] = []
        self.problems: list[str] = []
        self.num_actions = 0
        self._truth: dict[str, list[int]] = {}  # what the rows of a live request hold
        self._stops: dict[str, int | None] = {}
        self._prompt_lengths: dict[str, int] = {}
        self.engine = _Engine(
            model,
            config,
            device=self.device,
            block_manager=block_manager,
            observers=observers,
            runner=self.runner,
        )
        self.engine.world = self
        self.transfers = Transfers(self.engine, self)

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
        if not queued and self.tokens and not self.transfers.held:
            self._problem("requests are live, but nothing runs and nothing is withheld")
        return queued

    def planned(self, plan: StepPlan | None) -> None:
        """Called by the engine between planning a step and queuing it."""
        running = {seq.row: seq.request_id for seq in self.scheduler.running}
        names = set(running.values())
        self.computed = {name: n for name, n in self.computed.items() if name in names}
        if plan is None:
            return
        for seq in self.scheduler.started:  # a fork starts with the rows it shares
            self.computed[seq.request_id] = int(self.scheduler.seqs.num_computed_tokens[seq.row])
        self.plan = plan
        self.planned_ids = [running[row] for row in plan.rows.tolist()]
        lengths = plan.context_lens.tolist()
        truth = zip(self.planned_ids, lengths, strict=True)
        self.runner.expect(plan.step, [self._truth[name][:length] for name, length in truth])

    def collect(self, sampled: Sequence[int] | None = None) -> StepOutput:
        """Wait for the step in flight; `sampled`: what the model shall have said instead."""
        self.num_actions += 1
        plan = self.plan
        assert plan is not None, "no step is in flight"
        self.runner.to_say = None if sampled is None else np.array(sampled, np.int32)
        output = self.engine.collect()
        self.runner.to_say = None
        self.plan = None
        self._follow(plan, output)
        return output

    def step(self, sampled: Sequence[int] | None = None) -> StepOutput | None:
        """One step; None if there was nothing to run."""
        return self.collect(sampled) if self.submit() else None

    def drain(self, max_steps: int = 2000) -> None:
        """Run everything to its end; the pool must then be as it was at the start."""
        if self.plan is not None:
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

    # What the rows of transfers hold; see `transfers.Rows`.

    def committed(self, request_id: str, num_rows: int) -> list[int]:
        """What a request's committed rows hold."""
        return self._truth[request_id][:num_rows]

    def write(self, block_ids: Int32, num_rows: int, content: Any) -> None:
        """Rows of a load hold numbers of its own."""
        slots = self.runner.slots(block_ids.tolist(), num_rows)
        for slot, row in zip(slots, _load_rows(content, num_rows), strict=True):
            self.runner.rows[slot] = row

    def read(self, block_ids: Int32, num_rows: int, content: Any) -> int:
        """Wrong ones among the first rows."""
        truth = _load_rows(content, num_rows) if isinstance(content, str) else content
        return self.runner.count_wrong(block_ids.tolist(), truth)

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
            self._stops[request_id] = params.stop_token_id
            self._prompt_lengths[request_id] = len(prompt)

    def _follow(self, plan: StepPlan, output: StepOutput) -> None:
        """Move the books on as the result says, and compare what the engine reported."""
        for index, name in enumerate(self.planned_ids):
            if name in self.computed:  # not aborted since
                self.computed[name] += int(plan.num_scheduled[index])
        due = [self.planned_ids[index] for index in plan.sample_seq.tolist()]
        due = [name for name in due if name in self.computed]
        if output.request_ids != due:
            self._problem(f"step {plan.step} brought tokens for {output.request_ids}, not {due}")
        for name, token in zip(output.request_ids, output.token_ids.tolist(), strict=True):
            self.tokens[name].append(token)
            self._truth[name].append(extend(self._truth[name][-1], token))
        finished = {ended.request_id: ended for ended in output.finished}
        for name in output.request_ids:
            reason = None
            if len(self.tokens[name]) >= self.limits[name]:
                reason = "length"
            if self.tokens[name][-1] == self._stops[name]:
                reason = "stop"
            reported = finished.get(name)
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


def right_answer(prompt: Sequence[int], count: int, *, has_state: bool = False) -> list[int]:
    """The tokens that follow a prompt when every row is right, and the state if there is one."""
    tokens, rows = list(prompt), prefixes(prompt)
    for _ in range(count):
        tokens.append(next_token(rows + rows[-1:] * has_state, VOCAB_SIZE))
        rows.append(extend(rows[-1], tokens[-1]))
    return tokens[len(prompt) :]


def _load_rows(name: str, num_rows: int) -> list[int]:
    return prefixes([-1, *name.encode(), *range(num_rows)])[-num_rows:]
