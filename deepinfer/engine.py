"""The engine: requests in, tokens out, one `step()` at a time.

    plan -> submit copies -> give up fork sources -> submit forward -> release point
         -> collect the result -> commit

`step()` is `submit()` then `collect()`. Between the two the device works and the host is free: a
request may be aborted there, and its blocks are withheld like any others. Everything that decides
(which request, which block, when it may be handed out again) is in the scheduler, the block manager
and the release queue; the engine only calls them at the right moments and times them.

Invariant: at most one step is in flight; when no request is left nothing is withheld.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from deepinfer.block_manager import BlockManager, Verdict
from deepinfer.config import EngineConfig, ModelConfig
from deepinfer.device import Device, Event, open_device
from deepinfer.errors import DeepInferError, UserError, check_name
from deepinfer.models.weights import Qwen3Weights, load_weights
from deepinfer.names import FENCES
from deepinfer.outputs import RequestOutput, StepMoments, StepOutput, StepStats
from deepinfer.plan import Int32, StepPlan
from deepinfer.release import Fence, ReleaseQueue
from deepinfer.scheduler import Scheduler
from deepinfer.sequence import SamplingParams
from deepinfer.worker import InFlightStep, Worker


class _Counts(NamedTuple):
    """Requests and blocks once a step was queued, before its release point."""

    num_running: int
    num_waiting: int
    blocks_free: int
    blocks_held: int
    blocks_withheld: int


class _Reading(NamedTuple):
    """The host's clock, and how long the release policy had made it wait until then."""

    at_ns: int
    waited_ns: int

    @property
    def host_ns(self) -> int:
        """The clock without these waits."""
        return self.at_ns - self.waited_ns


@dataclass(slots=True)
class _Submitted:
    """A step in flight and what is known of it so far."""

    plan: StepPlan
    flight: InFlightStep
    fence: Fence
    copy_events: list[Event]
    readings: tuple[_Reading, _Reading, _Reading, _Reading]  # started, planned, submitted, released
    counts: _Counts
    started_ids: list[str]


class LLMEngine:
    """A paged inference engine for one model on one device.

    Args:
        model: geometry, and where the weights come from.
        config: host-side settings.
        device: a name for `open_device`, or an open device (which stays the caller's to close).
        weights: loaded weights to share between engines; loaded from `model` otherwise.
        block_manager: the class of the block pool.

    Use as a context manager, or call `close()`.
    """

    def __init__(
        self,
        model: ModelConfig,
        config: EngineConfig,
        *,
        device: Device | str = "cpu",
        weights: Qwen3Weights | None = None,
        block_manager: type[BlockManager] = BlockManager,
    ) -> None:
        check_name("fence", config.fence, FENCES)
        self.model, self.config = model, config
        self.blocks = block_manager(
            config.num_blocks,
            free_order=config.free_order,
            discipline=config.discipline,
            seed=config.seed,
        )
        self.release = ReleaseQueue(self.blocks, config.release)
        self.scheduler = Scheduler(config, self.blocks, self.release)
        self._owns_device = isinstance(device, str)
        self._submitted: _Submitted | None = None
        self.device = open_device(device) if isinstance(device, str) else device
        try:
            if weights is None:
                weights = self.device.run(lambda: load_weights(model, self.device))
            self.worker = Worker(model, config, weights, self.device)
            self.device.synchronize()  # the pool was made on no stream of ours
        except BaseException:
            self.close()  # nobody else can: there is no engine to close
            raise

    # -- requests --------------------------------------------------------------------------------

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
        return self.scheduler.add(request_id, self._tokens(prompt_token_ids), sampling)

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
            own_tokens=self._tokens(own_token_ids),
            num_shared_tokens=num_shared_tokens,
        )

    def abort(self, request_id: str, reason: str = "abort") -> RequestOutput:
        """End a live request now, also while a step is in flight.

        Its blocks go back at once, or as the release policy says if the step in flight may touch
        them. Raises UnknownRequestError if the request is not live.
        """
        seq = self.scheduler.abort(request_id)
        if self._submitted is None:
            self._flush_if_idle()
        return RequestOutput.of(seq, reason)

    def has_unfinished(self) -> bool:
        """Whether any request is running or waiting, or a step is in flight."""
        return bool(self.scheduler.num_running or self.scheduler.num_waiting or self._submitted)

    # -- steps -----------------------------------------------------------------------------------

    def step(self) -> StepOutput | None:
        """Run one step; None if there was nothing to run."""
        return self.collect() if self.submit() else None

    def submit(self) -> bool:
        """Plan a step and queue it on the device; False if there is nothing to run."""
        if self._submitted is not None:
            raise DeepInferError("a step is already in flight; collect() it first")
        started = self._reading()
        plan = self._plan()
        planned = self._reading()
        if plan is None:
            return False
        for fence in self.scheduler.take_waits():
            self._hold_streams(fence)
        self.worker.submit_copies(plan)
        copy_events = self._give_up_sources(plan)
        flight = self.worker.submit_forward(plan)
        fence = Fence(plan.step, flight.end)
        self.scheduler.submitted(plan, fence)
        counts = self._counts()
        submitted = self._reading()
        self.release.release_point()
        self._submitted = _Submitted(
            plan,
            flight,
            fence,
            copy_events,
            (started, planned, submitted, self._reading()),
            counts,
            [seq.request_id for seq in self.scheduler.started],
        )
        return True

    def collect(self) -> StepOutput:
        """Wait for the step in flight, commit its result and say what it brought."""
        if self._submitted is None:
            raise DeepInferError("no step is in flight; submit() comes first")
        step, self._submitted = self._submitted, None
        start = time.perf_counter_ns()
        result = step.flight.collect()
        arrived = time.perf_counter_ns()
        step.fence.passed = True
        self.release.collected(step.plan.step)
        for event in step.copy_events:
            self.device.recycle(event)
        collected = self._reading()
        commit = self.scheduler.commit(step.plan, result)
        self._flush_if_idle()
        stats = self._stats(step, start, arrived, collected)
        step.flight.recycle()
        return StepOutput(
            started_ids=step.started_ids,
            request_ids=[seq.request_id for seq in commit.sequences],
            token_ids=commit.token_ids,
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
        tokens = [self._tokens(prompt) for prompt in prompts]
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
        """Let go of the device if the engine opened it."""
        if self._owns_device:
            self.device.close()

    def __enter__(self) -> LLMEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- inside ----------------------------------------------------------------------------------

    def _add_or_refuse(self, request_id: str, prompt: Int32, sampling: SamplingParams) -> None:
        if self.add_request(request_id, prompt, sampling) is Verdict.NEVER:
            raise UserError(
                f"request {request_id!r}: {len(prompt)} tokens + {sampling.max_tokens} can never "
                f"fit {self.blocks.num_usable} blocks of {self.config.block_size} "
                f"and max_model_len {self.config.max_model_len}"
            )

    def _flush_if_idle(self) -> None:
        """Without requests there is no step whose release point would lift the last fences."""
        if not self.scheduler.num_running and not self.scheduler.num_waiting:
            self.release.flush()

    def _reading(self) -> _Reading:
        return _Reading(time.perf_counter_ns(), self.release.counters.wait_ns)

    def _counts(self) -> _Counts:
        scheduler, blocks = self.scheduler, self.blocks
        return _Counts(
            scheduler.num_running,
            scheduler.num_waiting,
            blocks.num_free,
            blocks.num_held,
            blocks.num_withheld,
        )

    def _plan(self) -> StepPlan | None:
        plan = self.scheduler.schedule()
        if plan is None and self.release.num_entries:
            self.release.flush()  # everyone waits for withheld blocks: wait with them
            plan = self.scheduler.schedule()
        return plan

    def _give_up_sources(self, plan: StepPlan) -> list[Event]:
        """Release what the plan's forks let go, behind events recorded after the copies."""
        copy_stream, events = self.device.stream("copy"), []

        def fence() -> Fence:
            if not self.release.policy.needs_events:
                return Fence(plan.step)
            event = self.device.event()
            copy_stream.record(event)
            events.append(event)
            return Fence(plan.step, event)

        if plan.copy_sources and self.config.fence == "step":
            shared = fence()
            for sources in plan.copy_sources:
                self.release.give_up(sources, shared)
        elif plan.copy_sources:
            for sources in plan.copy_sources:
                for block_id in self.blocks.in_free_order(sources):
                    self.release.give_up([int(block_id)], fence())
        return events

    def _hold_streams(self, fence: Fence) -> None:
        """Make the device wait where the host does not (`ordered`)."""
        if not fence.passed and fence.event is not None:
            for name in ("copy", "compute"):
                self.device.stream(name).wait(fence.event)  # type: ignore[arg-type]

    def _stats(self, step: _Submitted, start: int, arrived: int, collected: _Reading) -> StepStats:
        started, planned, submitted, released = step.readings
        now = self._reading()
        return StepStats(
            step=step.plan.step,
            num_tokens=step.plan.num_tokens,
            num_seqs=step.plan.num_seqs,
            num_running=step.counts.num_running,
            num_waiting=step.counts.num_waiting,
            blocks_free=step.counts.blocks_free,
            blocks_held=step.counts.blocks_held,
            blocks_withheld=step.counts.blocks_withheld,
            num_copies=len(step.plan.block_copies),
            schedule_ns=planned.host_ns - started.host_ns,
            submit_ns=submitted.host_ns - planned.host_ns,
            release_ns=released.host_ns - submitted.host_ns,
            collect_ns=collected.at_ns - arrived,
            commit_ns=now.host_ns - collected.host_ns,
            wait_ns=now.waited_ns - started.waited_ns,  # an abort may have waited meanwhile
            result_wait_ns=arrived - start,
            device_ms=step.flight.device_ms(),
            moments=StepMoments(
                started.at_ns,
                planned.at_ns,
                submitted.at_ns,
                released.at_ns,
                start,
                arrived,
                collected.at_ns,
                now.at_ns,
            ),
        )

    def _tokens(self, token_ids: ArrayLike) -> Int32:
        try:
            tokens = np.asarray(token_ids)
        except (ValueError, OverflowError):  # rows of different lengths, numbers beyond int64
            tokens = np.empty((0, 0))
        if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
            raise UserError("token ids must be a one-dimensional sequence of integers")
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < self.model.vocab_size:
            raise UserError(
                f"token id {int(tokens.max() if tokens.min() >= 0 else tokens.min())} is outside "
                f"the vocabulary of {self.model.vocab_size}"
            )
        return tokens.astype(np.int32)
