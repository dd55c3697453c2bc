"""One round of one cell: an empty engine, the workload's requests in real time, every token's time.

Knows nothing of files, tables or other cells. Invariant: the engine of a round is new, so nothing
is warm from a round before; what a round reports (records, emissions) holds for every request it
was given, also those that were refused or gave up.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.agenda import Agenda
from bench.arrivals import ChildSpec, RequestSpec, turn_behind
from bench.collect.memory import MemoryCollector
from bench.collect.sampler import NvmlSampler
from bench.references import References, child_prompt, sampling_of
from bench.samples import FINDING_COUNTERS, FORKED, RequestRecord, RoundRecord, StepRecord
from bench.schema import Verify
from bench.spec import Resolved
from bench.verify import DenseReference, Emission, RequestVerdict, Tolerances
from deepinfer.block_manager import BlockManager, Verdict
from deepinfer.checks.prefix_tags import MAX_POSITIONS
from deepinfer.checks.suite import parse_checks
from deepinfer.device import Device, open_device
from deepinfer.device.delayed import NO_DELAY, DelayedDevice, parse_delays
from deepinfer.drafters.acceptance import parse_acceptance
from deepinfer.drafters.base import Drafter
from deepinfer.drafters.replay import ReplayDrafter
from deepinfer.engine import LLMEngine
from deepinfer.errors import DeepInferError, OwnershipError
from deepinfer.outputs import DraftCounts, RequestOutput, StepOutput, StepStats
from deepinfer.runners import Weights, load_model

NUM_FINDINGS = 8  # of a round, in words
NO_DRAFTS = DraftCounts(0, 0, (), ())
ANSWERED = ("length", "stop")  # finish reasons of who has all it asked for


def with_tags(resolved: Resolved) -> Resolved:
    """The same with rows tagged; as it is if a request may have more positions than tags tell."""
    names = parse_checks(resolved.engine.checks)
    if "tags" in names or resolved.engine.max_model_len > MAX_POSITIONS:
        return resolved
    return resolved.with_engine(checks="+".join(("tags", *names)))


class Target:
    """A device with the model's weights on it, shared by all cells that run there."""

    def __init__(self, resolved: Resolved) -> None:
        self.device: Device = open_device(resolved.device)
        try:
            self.weights: Weights = self.device.run(
                lambda: load_model(resolved.model, self.device), label="weights"
            )
        except BaseException:  # nobody else has the device to close it
            self.device.close()
            raise
        self._delayed: dict[str, Device] = {}
        self._reference = DenseReference(self.weights, resolved.model)
        self._references = References(self.device, self.weights)

    def device_of(self, resolved: Resolved) -> Device:
        """The device as an engine of `resolved` is to have it: with the delays planted in it."""
        delay = resolved.workload.delay
        if delay == NO_DELAY:
            return self.device
        if delay not in self._delayed:
            self._delayed[delay] = DelayedDevice(self.device, parse_delays(delay))
        return self._delayed[delay]

    def verify(self, emissions: Sequence[Emission], settings: Verify) -> list[RequestVerdict]:
        """The dense reference's verdict on each emission."""
        tolerances = Tolerances(settings.score_tolerance, settings.logprob_tolerance)
        return self.device.run(
            lambda: self._reference.check_all(emissions, tolerances), label="verify"
        )

    def drafter(self, resolved: Resolved, requests: Sequence[RequestSpec]) -> Drafter | None:
        """Who proposes drafts for a round of `requests`; None where the engine makes its own.

        The first time a drafter replays these requests, they are run without drafts.
        """
        engine = resolved.engine
        if not engine.drafts or engine.drafter != "replay":
            return None
        return ReplayDrafter(
            self._references.of(resolved, requests),
            parse_acceptance(resolved.workload.acceptance),
            resolved.seed,
            resolved.model.vocab_size,
        )

    def engine(self, resolved: Resolved, requests: Sequence[RequestSpec], **keys: Any) -> LLMEngine:
        """A new engine for a round of `requests`; `keys` are more of `LLMEngine`'s."""
        drafter = self.drafter(resolved, requests)
        return LLMEngine(
            resolved.model,
            resolved.engine,
            device=self.device_of(resolved),
            weights=self.weights,
            drafter=drafter,
            **keys,
        )

    def close(self) -> None:
        """Close the device."""
        self.device.close()


@dataclass(slots=True)
class _Tracked:
    """A request on its way through the round; times in seconds since the round began."""

    spec: RequestSpec | ChildSpec
    arrival_s: float
    prompt_token_ids: list[int]  # as the workload says, not the engine
    first_scheduled_s: float | None = None
    token_ids: list[int] = field(default_factory=list)  # as its steps reported them
    token_times_s: list[float] = field(default_factory=list)
    finish_reason: str = ""
    num_preemptions: int = 0


@dataclass(slots=True)
class RoundResult:
    """What one round leaves behind.

    `emissions` are what the steps reported, behind the prompts that were asked for; `problems`
    say, by request, where the engine's own account of it differs.
    """

    round: RoundRecord
    requests: list[RequestRecord]
    steps: list[StepRecord]
    emissions: dict[str, Emission]
    problems: dict[str, str]


class Round:
    """Drives one engine through one list of requests.

    Args:
        requests: by phase and arrival.
        cell, index: numbers for the records; `warmup` rounds are marked.
        engine: a new one to drive; by default what `resolved` says.
    """

    def __init__(
        self,
        resolved: Resolved,
        target: Target,
        requests: Sequence[RequestSpec],
        *,
        cell: int,
        index: int,
        warmup: bool,
        engine: LLMEngine | None = None,
    ) -> None:
        self._engine = engine or target.engine(resolved, requests)
        self._agenda = Agenda(requests)
        self._cell, self._index, self._warmup = cell, index, warmup
        self._tracked: dict[str, _Tracked] = {}
        self._emissions: dict[str, Emission] = {}
        self._problems: dict[str, str] = {}
        self._steps: list[StepRecord] = []
        self._leaving: list[str] = []  # whose client gives up during the next step
        self._start_ns = 0

    def run(self) -> RoundResult:
        """Run to the end; whoever interrupts it loses this round only."""
        gc.collect()
        with MemoryCollector() as memory:
            with NvmlSampler() as gpu:  # its last sample is taken when it is left
                self._drive()
            record = self._round_record(memory, gpu)
        for request_id, tracked in self._tracked.items():
            if not tracked.finish_reason:
                self._problems[request_id] = "it never ended"
        return RoundResult(
            record, self._request_records(), self._steps, self._emissions, self._problems
        )

    def _drive(self) -> None:
        self._start_ns = time.perf_counter_ns()
        while self._agenda or self._engine.has_unfinished():
            self._admit_arrivals()
            if self._engine.submit_all():
                self._abort_leaving()
                self._take(self._engine.collect())
            elif (wait_s := self._agenda.wait_s(self._now())) is not None:
                time.sleep(max(wait_s, 0.0))
            elif self._engine.has_unfinished():  # not so if the last to arrive was refused
                raise DeepInferError("requests are left, but nothing can run: a scheduler bug")
        for things, pool in _pools_of_requests(self._engine).items():
            pool.check_integrity()
            if kept := pool.num_usable - pool.num_free:
                raise OwnershipError(
                    f"all requests have ended, but {kept} {things} were not given back"
                )

    # -- requests --------------------------------------------------------------------------------

    def _now(self, at_ns: int | None = None) -> float:
        return ((time.perf_counter_ns() if at_ns is None else at_ns) - self._start_ns) / 1e9

    def _admit_arrivals(self) -> None:
        for spec in self._agenda.due(self._now(), idle=not self._engine.has_unfinished()):
            self._track(spec, spec.arrival_s, spec.prompt_token_ids.tolist())
            verdict = self._engine.add_request(
                spec.request_id, spec.prompt_token_ids, sampling_of(spec)
            )
            self._note(spec.request_id, verdict)

    def _fork(self, parent: RequestSpec) -> None:
        """Make a parent's children; unless it is to go on, they replace it.

        A step with drafts may bring more tokens than the children are to know, and may be the
        parent's last: what is no longer there to be shared they compute themselves.
        """
        assert parent.fork is not None
        now, tracked = self._now(), self._tracked[parent.request_id]
        for child in parent.fork.children:
            own = child.own_prompt_token_ids
            prompt = child_prompt(parent, child, tracked.token_ids)
            if tracked.finish_reason:
                verdict = self._engine.add_request(child.request_id, prompt, sampling_of(child))
            else:
                verdict = self._engine.fork(
                    parent.request_id,
                    child.request_id,
                    sampling_of(child),
                    own_token_ids=own,
                    num_shared_tokens=len(prompt) - len(own),
                )
            self._track(child, now, prompt)
            self._note(child.request_id, verdict)
        if parent.fork.keep_parent:
            return
        if tracked.finish_reason:
            tracked.finish_reason = FORKED
        else:
            self._end(self._engine.abort(parent.request_id, FORKED))

    def _abort_leaving(self) -> None:
        """Clients leave while the step is in flight, as they do."""
        for request_id in self._leaving:
            self._end(self._engine.abort(request_id))
        self._leaving.clear()

    def _track(self, spec: RequestSpec | ChildSpec, arrival_s: float, prompt: list[int]) -> None:
        self._tracked[spec.request_id] = _Tracked(spec, arrival_s, prompt)

    def _note(self, request_id: str, verdict: Verdict) -> None:
        if verdict is Verdict.NEVER:
            self._tracked[request_id].finish_reason = "never"

    # -- steps -----------------------------------------------------------------------------------

    def _take(self, output: StepOutput) -> None:
        """Note what a step brought, and do what its tokens trigger."""
        end_s = self._now(output.stats.end_ns)
        for request_id in output.started_ids:
            tracked = self._tracked[request_id]
            if tracked.first_scheduled_s is None:
                tracked.first_scheduled_s = self._now(output.stats.start_ns)
        for request_id, token_id in zip(output.request_ids, output.token_ids.tolist(), strict=True):
            self._tracked[request_id].token_ids.append(token_id)
            self._tracked[request_id].token_times_s.append(end_s)
        for ended in output.finished:
            self._end(ended)
        for request_id, num_new in Counter(output.request_ids).items():
            tracked = self._tracked[request_id]
            if isinstance(tracked.spec, RequestSpec):
                self._react(tracked.spec, tracked, num_new)
        self._steps.append(self._step_record(output.stats, end_s))

    def _react(self, spec: RequestSpec, tracked: _Tracked, num_new: int) -> None:
        """Fork a request, or let its client leave, if the last of its tokens have come to that."""
        count = len(tracked.token_times_s)
        reached = range(count - num_new + 1, count + 1)
        if spec.abort_after_tokens in reached and not tracked.finish_reason:
            self._leaving.append(spec.request_id)
        if spec.fork is not None and spec.fork.after_tokens in reached:
            self._fork(spec)

    def _end(self, ended: RequestOutput) -> None:
        tracked = self._tracked[ended.request_id]
        tracked.finish_reason = ended.finish_reason
        tracked.num_preemptions = ended.num_preemptions
        self._come_back(tracked)
        problem = _disagreement(tracked, ended)
        if problem:
            self._problems[ended.request_id] = problem
        if tracked.token_ids and len(ended.logprobs) == len(tracked.token_ids):
            self._emissions[ended.request_id] = Emission(
                token_ids=tracked.prompt_token_ids + tracked.token_ids,
                num_prompt=len(tracked.prompt_token_ids),
                temperature=tracked.spec.temperature,
                seed=tracked.spec.seed,
                logprobs=ended.logprobs.tolist(),
            )

    def _come_back(self, tracked: _Tracked) -> None:
        """Have the next turn come, if the request is one of a conversation and has its answer."""
        spec = tracked.spec
        if isinstance(spec, RequestSpec) and tracked.finish_reason in ANSWERED:
            turn = turn_behind(spec, tracked.token_ids)
            if turn is not None:
                self._agenda.come_back(turn, tracked.token_times_s[-1])

    # -- records ---------------------------------------------------------------------------------

    def _step_record(self, stats: StepStats, end_s: float) -> StepRecord:
        drafts = stats.drafts or NO_DRAFTS
        return StepRecord(
            cell=self._cell,
            round=self._index,
            step=stats.step,
            end_s=end_s,
            num_tokens=stats.num_tokens,
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            blocks_free=stats.blocks_free,
            blocks_held=stats.blocks_held,
            blocks_withheld=stats.blocks_withheld,
            num_copies=stats.num_copies,
            host_us={
                "schedule": stats.schedule_ns / 1e3,
                "submit": stats.submit_ns / 1e3,
                "release": stats.release_ns / 1e3,
                "collect": stats.collect_ns / 1e3,
                "commit": stats.commit_ns / 1e3,
            },
            wait_us=stats.wait_ns / 1e3,
            result_wait_us=stats.result_wait_ns / 1e3,
            device_ms=stats.device_ms,
            slots_held=stats.slots_held,
            slots_withheld=stats.slots_withheld,
            gap_us=None if stats.gap_ms is None else stats.gap_ms * 1e3,
            blocks_ahead=stats.blocks_ahead,
            blocks_for_drafts=stats.blocks_for_drafts,
            num_draft_rows=drafts.num_rows,
            num_drafting=drafts.num_seqs,
            drafts_proposed=drafts.proposed,
            drafts_accepted=drafts.accepted,
        )

    def _request_records(self) -> list[RequestRecord]:
        return [
            RequestRecord(
                cell=self._cell,
                round=self._index,
                request_id=request_id,
                arrival_s=tracked.arrival_s,
                first_scheduled_s=tracked.first_scheduled_s,
                token_times_s=tuple(tracked.token_times_s),
                num_prompt_tokens=len(tracked.prompt_token_ids),
                num_output_tokens=len(tracked.token_times_s),
                finish_reason=tracked.finish_reason,
                num_preemptions=tracked.num_preemptions,
            )
            for request_id, tracked in self._tracked.items()
        ]

    def _round_record(self, memory: MemoryCollector, gpu: NvmlSampler) -> RoundRecord:
        """Wall time runs from the first arrival to the last token."""
        tracked = self._tracked.values()
        first = min((request.arrival_s for request in tracked), default=0.0)
        last = max((t for request in tracked for t in request.token_times_s), default=first)
        counters, release = self._engine.scheduler.counters, self._engine.release
        findings = self._engine.findings
        return RoundRecord(
            cell=self._cell,
            round=self._index,
            warmup=self._warmup,
            wall_s=last - first,
            num_output_tokens=sum(len(request.token_times_s) for request in tracked),
            num_prompt_tokens=sum(len(request.prompt_token_ids) for request in tracked),
            counters={
                "num_steps": len(self._steps),
                "num_block_copies": counters.num_block_copies,
                "num_later": counters.num_later,
                "num_never": counters.num_never,
                "num_aborted": sum(request.finish_reason == "abort" for request in tracked),
                "num_preemptions": counters.num_preemptions,
                "num_recomputed_tokens": counters.num_recomputed_tokens,
                "num_unforked": counters.num_unforked,
                "num_held_back": counters.num_held_back,
                "num_refused_while_withheld": release.counters.num_refused_while_withheld,
                "withheld_peak": release.counters.withheld_peak,
                "withheld_block_ms": release.withheld_block_ns() / 1e6,
                "release_waits": release.counters.num_waits,
                "release_wait_us": release.counters.wait_ns / 1e3,
                "stream_waits": release.counters.num_stream_waits,
                "num_blocks_shrunk": counters.num_blocks_shrunk,
                "num_draft_rows": sum(step.num_draft_rows for step in self._steps),
                "num_drafts_proposed": sum(sum(step.drafts_proposed) for step in self._steps),
                "num_drafts_accepted": sum(sum(step.drafts_accepted) for step in self._steps),
                **_slot_counters(self._engine),
                **_reuse_counters(self._engine),
                **_store_counters(self._engine),
                **{
                    FINDING_COUNTERS[name]: findings.counts[name]
                    for name in parse_checks(self._engine.config.checks)
                },
            },
            memory={**memory.read(), **({"gpu": gpu.summary()} if gpu.samples else {})},
            findings=tuple(map(str, findings.first[:NUM_FINDINGS])),
        )


def _pools_of_requests(engine: LLMEngine) -> dict[str, BlockManager]:
    """The pools of which nothing is held where there is no request."""
    pools = {"blocks": engine.blocks}
    if engine.states is not None:
        pools["state slots"] = engine.states.slots
    if engine.pools.drafts is not None:
        pools["draft slots"] = engine.pools.drafts.slots
    return pools


def _reuse_counters(engine: LLMEngine) -> dict[str, int]:
    """What became of keys; nothing where blocks are not found by what they hold."""
    if engine.scheduler.reuse is None:
        return {}
    return {
        "num_hit_blocks": engine.scheduler.counters.num_hit_blocks,
        "num_evicted_blocks": engine.scheduler.reuse.num_evictions,
    }


def _store_counters(engine: LLMEngine) -> dict[str, float]:
    """What was kept beyond the pools, and came back; nothing without a store."""
    transfers, reuse = engine.transfers, engine.scheduler.store_reuse
    if transfers is None or reuse is None:
        return {}
    return {
        "num_loads": reuse.counters.num_loads,
        "num_failed_loads": reuse.counters.num_failed_loads,
        "num_loaded_tokens": reuse.counters.num_loaded_tokens,
        "num_saves": transfers.counters.num_saves,
        "num_refused_saves": transfers.counters.num_refused_saves,
        "bytes_saved": transfers.counters.bytes_saved,
        "bytes_loaded": transfers.counters.bytes_loaded,
        "transfer_ms": transfers.times.busy_ms,
        "transfer_beside_steps_ms": transfers.times.beside_steps_ms,
    }


def _slot_counters(engine: LLMEngine) -> dict[str, float]:
    """What was counted of state slots, and beside them of blocks; nothing without state."""
    if engine.states is None:
        return {}
    counters = engine.scheduler.counters
    return {
        "num_state_slots": engine.states.slots.num_usable,
        "num_later_blocks": counters.num_later_blocks,
        "num_later_slots": counters.num_later_slots,
        "num_state_copies": counters.num_state_copies,
        "num_stateless_forks": counters.num_stateless_forks,
        "slots_withheld_peak": engine.states.release.counters.withheld_peak,
    }


def _disagreement(tracked: _Tracked, ended: RequestOutput) -> str:
    """Where an ended request is not the one that was asked for; empty if it is."""
    if ended.prompt_token_ids.tolist() != tracked.prompt_token_ids:
        return "its prompt is not the one asked for"
    if ended.token_ids.tolist() != tracked.token_ids:
        return "its tokens are not those its steps reported"
    if len(ended.logprobs) != len(tracked.token_ids):
        return f"{len(ended.logprobs)} log-probabilities of {len(tracked.token_ids)} tokens"
    if ended.finish_reason == "length" and len(tracked.token_ids) != tracked.spec.max_tokens:
        return f"it ended with {len(tracked.token_ids)} of {tracked.spec.max_tokens} tokens"
    return ""
