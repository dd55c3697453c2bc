"""The engine: requests in, tokens out, one `step()` at a time.

    plan -> submit copies -> give up fork sources -> submit forward -> release point
         -> collect the oldest result -> commit

With a store, loads are queued behind the plan, states are copied out with the copies, and committed
blocks behind the commit.

`step()` is `submit()` then `collect()`. Between the two the device works and the host is free: a
request may be aborted there, and its blocks are withheld like any others. With `overlap` the next
step, or two, are submitted before the first is collected, so the device finds its work queued.
Everything that decides (which request, which block, when it may be handed out again) is in the
scheduler, the block manager and the release queue; the engine only calls them at the right moments
and times them.

Invariant: at most `max_in_flight` steps are in flight, and results are committed in their order;
when no request and no step is left nothing is withheld.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import ArrayLike

from deepinfer.block_manager import BlockIds, BlockManager, Verdict
from deepinfer.cache_engine import KVCache
from deepinfer.carry import make_carry
from deepinfer.checks.findings import Findings
from deepinfer.checks.suite import Checks
from deepinfer.config import EngineConfig
from deepinfer.device import Device, Event, open_device
from deepinfer.device.base import Failure
from deepinfer.drafters.base import Drafter
from deepinfer.errors import (
    DeepInferError,
    DeviceTimeoutError,
    UserError,
    check_name,
    listed,
)
from deepinfer.fork_sources import give_up_sources
from deepinfer.hybrid_runner import HybridRunner
from deepinfer.live import as_token_ids
from deepinfer.model_runner import ModelRunner
from deepinfer.models.hybrid.cache import HybridCache
from deepinfer.names import FENCES, LOAD_STREAMS, OVERLAPS
from deepinfer.observer import Observer
from deepinfer.outputs import RequestOutput, StepOutput
from deepinfer.plan import Int32, StepPlan, StepResult
from deepinfer.planner import Planner
from deepinfer.pools import Pools
from deepinfer.release import Fence
from deepinfer.runners import Model, Weights, check_fits, load_model, make_runner, state_pool
from deepinfer.scheduler import Scheduler
from deepinfer.sequence import SamplingParams
from deepinfer.step_account import Counts, Reading, SubmittedStep, draft_counts
from deepinfer.stopping import stops_with_device
from deepinfer.store.tiers import TieredStore
from deepinfer.transfers import Transfers, open_store
from deepinfer.worker import InFlightStep, Runner, Worker


class LLMEngine:
    """A paged inference engine for one model on one device.

    Args:
        model: geometry, and where the weights come from.
        config: host-side settings.
        device: a name for `open_device`, or an open device (which stays the caller's to close).
        weights: loaded weights to share between engines; loaded from `model` otherwise.
        block_manager: the class of the block pool.
        observers: told of all that happens to blocks and on the device; see `deepinfer.observer`.
        runner: what a step computes; by default the network of `model`.
        drafter: who proposes drafts where `config.drafts` asks for them; by default the one that
            `config.drafter` names.

    Attributes:
        pools: every pool of ids, and their release queues.
        blocks, release, states: the pool of blocks, its queue, and the state slots among them.
        store, transfers: what is kept beyond the pools, and its copies; None without `store_bytes`.
        failure: why the engine takes no more calls; None while all is well. A device that fails, or
            does not answer within `config.timeout_s`, stops it for good.
        max_in_flight: steps that may be submitted and not collected.

    Use as a context manager, or call `close()`.
    """

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        *,
        device: Device | str = "cpu",
        weights: Weights | None = None,
        block_manager: type[BlockManager] = BlockManager,
        observers: Sequence[Observer] = (),
        runner: Runner | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        config.check()
        check_name("fence", config.fence, FENCES)
        check_name("overlap", config.overlap, OVERLAPS)
        check_name("load_stream", config.load_stream, LOAD_STREAMS)
        self.max_in_flight = 1 + OVERLAPS.index(config.overlap)
        self.model, self.config = model, config
        self.failure: Failure | None = None
        self._in_flight: deque[SubmittedStep] = deque()  # oldest first
        self._last_flight: InFlightStep | None = None  # collected; its end tells the device's gap
        self._timeout_s = config.timeout_s or None
        self._owns_device = isinstance(device, str)
        self.device = open_device(device) if isinstance(device, str) else device
        self.store: TieredStore | None = None
        self.transfers: Transfers | None = None
        try:
            if runner is None:  # before the host's own lists, which grow with the pool
                check_fits(model, config, self.device)
            self._set_up_host(block_manager, observers)
            self.device = self._checks.watch_device(self.device)
            self.worker = self._make_worker(runner, weights, drafter)
            if self.store is not None:
                self.transfers = self._transfers(self.store, self.worker.runner)
            self._planner = Planner(self.scheduler, self.pools, self.transfers, self._timeout_s)
            self.device.synchronize()  # the pool was made on no stream of ours
        except BaseException:
            self.close()  # nobody else can: there is no engine to close
            raise

    def _set_up_host(self, block_manager: type[BlockManager], watchers: Sequence[Observer]) -> None:
        config = self.config
        self._checks = checks = Checks(config.checks, config.block_size, watchers)
        observers = checks.observer, checks.state_observer
        states = state_pool(self.model, config)
        self.pools = pools = Pools(config, block_manager, states, self.max_in_flight, *observers)
        self.blocks, self.release, self.states = pools.blocks, pools.release, pools.states
        if config.store_bytes:
            self.store = open_store(self.model, config, self.device, tags=checks.tags)
        self.scheduler = Scheduler(
            config,
            pools.blocks,
            pools.release,
            pools.states,
            pools.drafts,
            self.store,
            tags=checks.tags,
        )
        checks.bind(self.scheduler)

    @property
    def cache(self) -> KVCache | HybridCache:
        """What the network keeps of its tokens; there is none behind another runner."""
        runner = self.worker.runner
        assert isinstance(runner, ModelRunner | HybridRunner), "made with a runner of its own"
        return runner.cache

    @property
    def findings(self) -> Findings:
        """What the checkers of `config.checks` have found so far."""
        return self._checks.findings

    def add_holder(self, holder: Callable[[], Iterable[BlockIds]]) -> None:
        """Tell the checkers of a client that holds blocks beside the engine's requests.

        `holder` gives the blocks it holds at the moment, one list for each of its tables.
        """
        self._checks.add_holder(holder)

    # -- requests --------------------------------------------------------------------------------

    @stops_with_device
    def add_request(
        self, request_id: str, prompt_token_ids: ArrayLike, sampling: SamplingParams
    ) -> Verdict:
        """Queue a request.

        Returns:
            OK: its blocks are free now. LATER: it waits its turn. NEVER: it could not finish even
            alone in this pool (or exceeds `max_model_len`), and is not queued.

        Raises:
            UserError: an id in use, an empty prompt, or a token id outside the vocabulary.
        """
        return self.scheduler.add(request_id, self._token_ids(prompt_token_ids), sampling)

    @stops_with_device
    def fork(
        self,
        parent_id: str,
        request_id: str,
        sampling: SamplingParams,
        *,
        own_token_ids: ArrayLike = (),
        num_shared_tokens: int | None = None,
    ) -> Verdict:
        """Queue a child that continues from a running parent's tokens, sharing their blocks.

        Args:
            own_token_ids: tokens of its own that follow the shared ones.
            num_shared_tokens: how many of the parent's tokens it takes over; default all.

        Returns and raises as `add_request`.
        """
        return self.scheduler.fork(
            parent_id,
            request_id,
            sampling,
            own_tokens=self._token_ids(own_token_ids),
            num_shared_tokens=num_shared_tokens,
        )

    @stops_with_device
    def abort(self, request_id: str, reason: str = "abort") -> RequestOutput:
        """End a live request now, also while a step is in flight.

        Its blocks go back at once, or as the release policy says if the step in flight may touch
        them. Raises UnknownRequestError if the request is not live.
        """
        seq = self.scheduler.abort(request_id)
        self._flush_if_idle()
        self._checks.settled(self.scheduler.num_steps)
        return RequestOutput.of(seq, reason)

    def has_unfinished(self) -> bool:
        """Whether any request is running or waiting, or a step is in flight."""
        return bool(self.scheduler.num_running or self.scheduler.num_waiting or self._in_flight)

    # -- steps -----------------------------------------------------------------------------------

    def step(self) -> StepOutput | None:
        """Submit what may be in flight, and collect one step; None if there was nothing to run."""
        return self.collect() if self.submit_all() else None

    def submit_all(self) -> bool:
        """Submit as many steps as may be in flight; whether any is."""
        while len(self._in_flight) < self.max_in_flight and self.submit():
            pass
        return bool(self._in_flight)

    @stops_with_device
    def submit(self) -> bool:
        """Plan a step and queue it on the device; False if there is nothing to run now."""
        if len(self._in_flight) >= self.max_in_flight:
            raise DeepInferError("a step is already in flight; collect() it first")
        started = self._reading()
        plan = self._plan()
        planned = self._reading()
        for fence in self.scheduler.take_waits():  # without a plan, too: some who start only load
            self._hold_streams(fence)
        if plan is None:
            return False
        self._checks.planned(plan)
        self.worker.submit_copies(plan)
        copy_events = self._give_up_sources(plan)
        self._keep_states()
        flight = self.worker.submit_forward(plan)
        fence = Fence(plan.step, flight.end)
        self.scheduler.submitted(plan, fence)
        counts = Counts.of(self.scheduler)
        submitted = self._reading()
        self.pools.release_point()
        step = SubmittedStep(
            plan,
            flight,
            fence,
            copy_events,
            (started, planned, submitted, self._reading()),
            counts,
            [seq.request_id for seq in self.scheduler.started],
        )
        self._in_flight.append(step)
        self._checks.settled(plan.step)
        return True

    @stops_with_device
    def collect(self) -> StepOutput:
        """Wait for the oldest step in flight, commit its result and say what it brought."""
        if not self._in_flight:
            raise DeepInferError("no step is in flight; submit() comes first")
        step = self._in_flight.popleft()
        start = time.perf_counter_ns()
        result = self._result(step)
        arrived = time.perf_counter_ns()
        step.fence.passed = True
        self.pools.collected(step.plan.step)
        for event in step.copy_events:
            self.device.recycle(event)
        collected = self._reading()
        self._checks.tagged(step.flight.plan, result)
        commit = self.scheduler.commit(step.plan, result)
        self._keep_blocks(step)
        self._flush_if_idle()
        self._checks.settled(step.plan.step)
        drafts = draft_counts(step.plan.ahead, result.ahead, commit.num_new)
        stats = step.stats(start, arrived, collected, self._reading(), drafts, self._gap_ms(step))
        names = [seq.request_id for seq in commit.sequences]
        record = self.pools.records.tell(step.fence, names, commit.token_ids)
        self._checks.told(step.plan.step, record)
        return StepOutput(
            started_ids=step.started_ids,
            tokens=record,
            finished=[RequestOutput.of(seq, reason) for seq, reason in commit.finished],
            stats=stats,
        )

    def generate(
        self, prompts: Iterable[ArrayLike], sampling: SamplingParams | Sequence[SamplingParams]
    ) -> list[RequestOutput]:
        """Run prompts to their end together; outputs in the order of the prompts.

        Raises UserError, with nothing queued, if one of them is refused or can never fit, or if
        other requests are still unfinished.
        """
        if self.has_unfinished():
            raise UserError("generate: other requests are unfinished", hint="step() them to an end")
        tokens = [self._token_ids(prompt) for prompt in prompts]
        each = [sampling] * len(tokens) if isinstance(sampling, SamplingParams) else list(sampling)
        if len(each) != len(tokens):
            raise UserError(f"generate: {len(tokens)} prompts, but {len(each)} sampling parameters")
        ids: list[str] = []
        try:
            for prompt, params in zip(tokens, each, strict=True):
                self._add_or_refuse(f"generate-{len(ids)}", prompt, params)
                ids.append(f"generate-{len(ids)}")
        except UserError:
            for queued in ids:
                self.abort(queued)
            raise
        outputs: dict[str, RequestOutput] = {}
        while self.has_unfinished():
            output = self.step()
            if output is not None:
                outputs.update((ended.request_id, ended) for ended in output.finished)
        return [outputs[request_id] for request_id in ids]

    def close(self) -> None:
        """Let go of the device if the engine opened it, and of the store."""
        try:
            if self._owns_device:
                self.device.close()
        finally:
            if self.store is not None:
                self.store.close()

    def __enter__(self) -> LLMEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- inside ----------------------------------------------------------------------------------

    def _make_worker(
        self, runner: Runner | None, weights: Weights | None, drafter: Drafter | None
    ) -> Worker:
        """Of a runner, by default the network of the model, with what its steps hand on."""
        config, checks = self.config, self._checks
        is_own = runner is None
        if runner is None:
            if weights is None:
                weights = self.device.run(lambda: load_model(self.model, self.device))
            runner = make_runner(self.model, config, weights, self.device, tags=checks.tags)
        if drafter is None and isinstance(runner, HybridRunner):
            drafter = runner.draft_head
        carry = make_carry(
            config,
            self.pools.num_draft_slots,
            self.device,
            drafter,
            exact=checks.tags or not is_own,
            told=checks.reads_plans,
        )
        return Worker(runner, self.device, config.block_size, carry)

    def _add_or_refuse(self, request_id: str, prompt: Int32, sampling: SamplingParams) -> None:
        if self.add_request(request_id, prompt, sampling) is Verdict.NEVER:
            raise UserError(
                f"request {request_id!r}: {len(prompt)} tokens + {sampling.max_tokens} can never "
                f"fit {self.blocks.num_usable} blocks of {self.config.block_size} "
                f"and max_model_len {self.config.max_model_len}"
            )

    def _gap_ms(self, step: SubmittedStep) -> float | None:
        """How long the device had nothing to do before a step; None behind an idle engine."""
        before, self._last_flight = self._last_flight, step.flight
        gap = None if before is None else step.flight.gap_ms(before)
        if before is not None:
            before.recycle()
        if not self.has_unfinished():
            step.flight.recycle()
            self._last_flight = None
        return gap

    def _flush_if_idle(self) -> None:
        """Without requests there is no step whose release point would lift the last fences."""
        if not self.has_unfinished():
            if self.transfers is not None:
                self.transfers.settle(self._timeout_s)
            self.pools.flush()

    def _result(self, step: SubmittedStep) -> StepResult:
        try:
            return step.flight.collect(self._timeout_s)
        except DeviceTimeoutError as error:
            tables = step.plan.block_tables
            ids = listed(np.unique(tables[tables > 0]).tolist())
            names = listed(repr(seq.request_id) for seq in self.scheduler.running)
            raise DeviceTimeoutError(
                f"step {step.plan.step} has no result: it may still touch blocks {ids}, those held "
                f"by {names or 'no request any more'}; {error}"
            ) from error

    def _reading(self) -> Reading:
        return Reading(time.perf_counter_ns(), self.pools.wait_ns)

    def _transfers(self, store: TieredStore, runner: Runner) -> Transfers:
        if not isinstance(runner, ModelRunner | HybridRunner):
            raise UserError(
                f"store_bytes: {type(runner).__name__} has no rows that could be kept",
                hint="leave it 0 for a runner of your own",
            )
        blocks, states = runner.entry_bytes()
        queue, load_stream = self.release, self.config.load_stream
        return Transfers(store, blocks, states, self.device, queue, load_stream)

    def _keep_states(self) -> None:
        """Queue the copies of what the step is about to change."""
        saves = self.scheduler.states_to_keep
        if self.transfers is not None and saves:
            with self.worker.between_steps():
                self.transfers.save_states(saves)

    def _keep_blocks(self, step: SubmittedStep) -> None:
        """Queue the copies of what a commit made final."""
        if self.transfers is not None and self.scheduler.store_reuse is not None:
            self.transfers.ran(step.flight)
            self.transfers.save_blocks(self.scheduler.store_reuse.take_saves())

    def _plan(self) -> StepPlan | None:
        return self._planner.next(in_flight=bool(self._in_flight))

    def _give_up_sources(self, plan: StepPlan) -> list[Event]:
        return give_up_sources(plan, self.pools, self.device, self.config.fence)

    def _hold_streams(self, fence: Fence) -> None:
        """Make the device wait where the host does not (`ordered`)."""
        for name in ("copy", "compute"):
            fence.hold(self.device.stream(name))

    def _token_ids(self, token_ids: ArrayLike) -> Int32:
        return as_token_ids(token_ids, self.model.vocab_size)
