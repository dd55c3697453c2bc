"""Whole engines that look ahead, and the truth they are held against.

The truth of a request is what an engine without drafts and overlap makes of its prompt alone. Any
other engine with the same weights must emit the same tokens, whatever ran beside them. Where it
does not, the dense reference decides: a token whose score is within its tolerance of the best is a
near tie, which is counted, and everything else is wrong.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np

from bench.verify import DenseReference, Emission, Tolerances
from deepinfer.config import EngineConfig, ModelConfig
from deepinfer.device.cpu import SteppedCpuDevice
from deepinfer.drafters.acceptance import Acceptance
from deepinfer.drafters.base import Drafter
from deepinfer.drafters.replay import ReplayDrafter
from deepinfer.engine import LLMEngine
from deepinfer.models.hybrid.layer_plan import (
    CSA,
    HCA,
    SLIDING,
    HybridConfig,
    v4_config,
    v41_config,
)
from deepinfer.models.hybrid.loading import draw_weights
from deepinfer.models.hybrid.weights import HybridWeights
from deepinfer.models.weights import Qwen3Weights, load_weights
from deepinfer.outputs import RequestOutput, StepOutput
from deepinfer.plan import Int32, StepPlan
from deepinfer.sequence import SamplingParams
from tests.deepinfer.step_plans import TINY
from tests.hybrid_configs import dspark, v4_raw, v41_raw

FAMILIES: dict[str, Callable[[], ModelConfig | HybridConfig]] = {
    "qwen3": lambda: TINY,
    "v4": lambda: v4_config(
        {
            **v4_raw(ratios=(4, 8), window=8, layers=(SLIDING, CSA, HCA)),
            "num_nextn_predict_layers": 1,
        }
    ),
    "v41": lambda: v41_config(
        {
            **v41_raw([0, 2, 1, 1], sources=[1, 2], selectors=[1, 2], publisher=2, engram=[1]),
            **dspark([1, 3], 2),
        }
    ),
}
TOLERANCES = {  # of the profiles cpu-tiny, cpu-v4 and cpu-v41-tiny
    "qwen3": Tolerances(2e-4, 2e-4),
    "v4": Tolerances(1e-3, 1e-3),
    "v41": Tolerances(1e-3, 1e-3),
}
VOCAB = 61  # every network has these tokens
CONFIG = EngineConfig(
    block_size=4,
    num_blocks=65,
    max_num_seqs=4,
    max_num_batched_tokens=40,
    max_model_len=48,
    checks="all",
)


@cache
def model(family: str) -> tuple[ModelConfig | HybridConfig, Qwen3Weights | HybridWeights]:
    """A tiny network and its weights."""
    config = FAMILIES[family]()
    if isinstance(config, HybridConfig):
        return config, draw_weights(config)
    return config, load_weights(config, SteppedCpuDevice())


class Truth:
    """What the requests of one family are to emit; `of(family)` makes one and keeps it.

    Attributes:
        near_ties: requests that went another way at a near tie, of `num_checked`.
    """

    def __init__(self, family: str) -> None:
        config, weights = model(family)
        settings = replace(CONFIG, num_blocks=257, max_model_len=256, checks="off")
        self._engine = LLMEngine(config, settings, device=SteppedCpuDevice(), weights=weights)
        self._reference = DenseReference(weights, config)
        self._tolerances = TOLERANCES[family]
        self._outputs: dict[tuple[bytes, SamplingParams], RequestOutput] = {}
        self.num_checked = self.near_ties = 0

    @staticmethod
    @cache
    def of(family: str) -> Truth:
        """The one truth of a family."""
        return Truth(family)

    def output(self, prompt: Int32, sampling: SamplingParams) -> RequestOutput:
        """What a request emits that runs alone."""
        key = prompt.astype(np.int32).tobytes(), sampling
        if key not in self._outputs:
            (self._outputs[key],) = self._engine.generate([prompt], sampling)
        return self._outputs[key]

    def history(self, prompt: Int32, sampling: SamplingParams) -> Int32:
        """Prompt and output of a request that runs alone, to its last token whatever stops it."""
        whole = self.output(prompt, replace(sampling, stop_token_id=None))
        return np.concatenate((whole.prompt_token_ids, whole.token_ids))

    def check(self, output: RequestOutput, sampling: SamplingParams, *, ended: bool = True) -> None:
        """Raise AssertionError unless the output is the truth; if not `ended`, its beginning."""
        true = self.output(output.prompt_token_ids, sampling)
        self.num_checked += 1
        count = len(output.token_ids)
        same = output.token_ids.tolist() == true.token_ids[: None if ended else count].tolist()
        if same and (not ended or output.finish_reason == true.finish_reason):
            diffs = np.abs(output.logprobs - true.logprobs[:count])
            if not count or diffs.max() <= self._tolerances.logprob:
                return
        emission = Emission(
            np.concatenate((output.prompt_token_ids, output.token_ids)).tolist(),
            len(output.prompt_token_ids),
            sampling.temperature,
            sampling.seed,
            output.logprobs.tolist(),
        )
        verdict = self._reference.check(emission, self._tolerances)
        assert not verdict.wrong, (
            f"{output.request_id}: {output.token_ids.tolist()} and not {true.token_ids.tolist()}: "
            f"{verdict}"
        )
        assert not same or output.finish_reason == true.finish_reason
        self.near_ties += 1


@dataclass
class Stage:
    """An engine that looks ahead, with drafts that are right as often as asked for.

    With an acceptance of None they come from a drafter of real use: the model's own draft layers,
    or prompt lookup where it has none.

    Attributes:
        requests: the sampling of all requests there were.
        delivered: the tokens each was told, step by step.
        ended: outputs of those that ended by themselves, by request id.
        steps: `StepOutput.stats` of the steps collected.
        wrap: put around the drafter.
    """

    family: str
    config: EngineConfig
    acceptance: float | Acceptance | None = 1.0
    device: str = "cpu-stepped"
    wrap: Callable[[Drafter], Drafter] = lambda drafter: drafter
    requests: dict[str, SamplingParams] = field(default_factory=dict)
    delivered: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    ended: dict[str, RequestOutput] = field(default_factory=dict)
    steps: list = field(default_factory=list)

    def __post_init__(self) -> None:
        config, weights = model(self.family)
        self.truth = Truth.of(self.family)
        self._references: dict[str, Int32] = {}
        drafter, schedule = None, self.acceptance
        if schedule is None:
            own = "mtp" if isinstance(config, HybridConfig) else "ngram"
            self.config = replace(self.config, drafter=own)
        else:
            if not isinstance(schedule, Acceptance):
                schedule = Acceptance(((schedule,),))
            drafter = self.wrap(ReplayDrafter(self._references, schedule, 0, VOCAB))
        self.engine = LLMEngine(
            config,
            self.config,
            device=self.device,
            weights=weights,
            drafter=drafter,
        )
        self.seqs = self.engine.scheduler.seqs

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *exc: object) -> None:
        self.engine.close()

    # -- requests --------------------------------------------------------------------------------

    def add(self, request_id: str, prompt: Int32, sampling: SamplingParams):
        """Queue a request; returns the verdict."""
        self.requests[request_id] = sampling
        self._references[request_id] = self.truth.history(prompt, sampling)
        return self.engine.add_request(request_id, prompt, sampling)

    def fork(
        self,
        parent: str,
        request_id: str,
        sampling: SamplingParams,
        own: tuple[int, ...] = (),
        shared: int | None = None,
    ):
        """Fork a running request; returns the verdict."""
        known = self.known(parent)
        prompt = np.concatenate((known[:shared], own)).astype(np.int32)
        self.requests[request_id] = sampling
        self._references[request_id] = self.truth.history(prompt, sampling)
        return self.engine.fork(
            parent, request_id, sampling, own_token_ids=own, num_shared_tokens=shared
        )

    def abort(self, request_id: str) -> RequestOutput:
        """Abort a request; what it emitted so far must be the truth."""
        output = self.engine.abort(request_id)
        self._check(output, ended=False)
        return output

    def known(self, request_id: str) -> Int32:
        """The tokens of a running request that the host knows, int32 [n]."""
        row = self.engine.scheduler.find(request_id).row
        return self.seqs.token_ids[row, : self.seqs.num_tokens[row]].copy()

    @property
    def running(self) -> list[str]:
        """The running requests, by admission."""
        return [seq.request_id for seq in self.engine.scheduler.running]

    def state_of(self, request_id: str) -> str:
        """Whether a live request is waiting, loading or running."""
        scheduler = self.engine.scheduler
        if scheduler.find(request_id).row < 0:
            return "waiting"
        loading = any(load.seq.request_id == request_id for load in scheduler._held.loading)
        return "loading" if loading else "running"

    @property
    def live(self) -> list[str]:
        """All requests that have not ended."""
        return self.running + [seq.request_id for seq in self.engine.scheduler.waiting]

    # -- steps -----------------------------------------------------------------------------------

    @property
    def plans(self) -> list[StepPlan]:
        """Of the steps in flight, oldest first."""
        return [step.plan for step in self.engine._in_flight]

    def submit(self) -> bool:
        """Submit a step, if one may be; whether one was. What it may write is the request's own."""
        if len(self.plans) == self.engine.max_in_flight or not self.engine.submit():
            return False
        self._check_plan(self.plans[-1])
        return True

    def submit_all(self) -> bool:
        """Submit as many steps as may be in flight; whether any is."""
        while self.submit():
            pass
        return bool(self.plans)

    def collect(self) -> StepOutput:
        """Collect the oldest step in flight; requests that ended are held against the truth."""
        output = self.engine.collect()
        for name, token in zip(output.request_ids, output.token_ids.tolist(), strict=True):
            self.delivered[name].append(token)
        for ended in output.finished:
            self.ended[ended.request_id] = ended
            self._check(ended, ended=True)
        self.steps.append(output.stats)
        return output

    def step(self) -> StepOutput | None:
        """Submit what may be in flight, collect one step."""
        return self.collect() if self.submit_all() else None

    def finish(self, max_steps: int = 1000) -> None:
        """Run all requests to their end; nothing is left of them then."""
        for _ in range(max_steps):
            if not self.engine.has_unfinished():
                break
            self.step()
        self.check_drained()

    def accepted(self) -> tuple[int, int]:
        """Drafts proposed and accepted so far."""
        counts = [stats.drafts for stats in self.steps if stats.drafts is not None]
        return sum(sum(c.proposed) for c in counts), sum(sum(c.accepted) for c in counts)

    # -- checks ----------------------------------------------------------------------------------

    def _check_plan(self, plan: StepPlan) -> None:
        """Within the budget, before the last position, and into blocks nobody else owns."""
        assert plan.num_tokens <= self.config.max_num_batched_tokens
        assert (plan.context_lens <= self.seqs.max_total_tokens[plan.rows] - 1).all()
        size = self.config.block_size
        for index, end in enumerate(plan.context_lens.tolist()):
            begin = min(end - int(plan.num_scheduled[index]), self._first_unsure(plan, index))
            written = plan.block_tables[index, begin // size : -(-end // size)]
            assert (self.engine.blocks.ref_counts(written) == 1).all(), "written and shared"

    def _first_unsure(self, plan: StepPlan, index: int) -> int:
        """Where a sequence of the newest plan begins if all drafts in flight are rejected."""
        row, ahead = plan.rows[index], plan.ahead
        if ahead is None or not ahead.is_open[index]:
            return self.config.max_model_len
        before = [older for older in self.plans[:-1] if older.ahead is not None]
        same = [(o.rows == row) & (o.epochs == plan.epochs[index]) for o in before]
        sure = sum(
            int((o.ahead.num_pending[s] > 0).sum()) for o, s in zip(before, same, strict=True)
        )
        return int(self.seqs.num_tokens[row]) - 1 + sure

    def _check(self, output: RequestOutput, *, ended: bool) -> None:
        name = output.request_id
        assert output.token_ids.tolist() == self.delivered[name], f"{name} was told other tokens"
        self.truth.check(output, self.requests[name], ended=ended)

    def check_drained(self) -> None:
        """All pools are as at the start, no counter of anything ahead is left, no finding."""
        engine, seqs = self.engine, self.seqs
        assert not engine.has_unfinished()
        assert engine.findings.first == []
        for name, pool, queue in pools(engine):
            assert pool.num_free == pool.num_usable, f"{name} are lost"
            assert (pool.num_withheld, queue.num_entries) == (0, 0), f"{name} are withheld"
            pool.check_integrity()
        if engine.store is not None:
            engine.store.check_integrity()
            assert not engine.store.host.handles
            assert not engine.transfers.any_open
        for counter in AHEAD_COUNTERS:
            assert not getattr(seqs, counter).any(), counter
        assert not seqs.block_tables.any()
        assert seqs.num_free_rows == self.config.max_num_seqs


AHEAD_COUNTERS = (
    *("num_in_flight_tokens", "num_lookahead_slots"),
    *("num_pending_tokens", "num_in_flight_drafts", "num_proposed_drafts"),
)


def pools(engine: LLMEngine):
    """Name, pool and queue of blocks, and of slots of all kinds that requests hold."""
    yield "blocks", engine.blocks, engine.release
    if engine.states is not None:
        yield "state slots", engine.states.slots, engine.states.release
    drafts = engine.scheduler.drafts
    if drafts is not None:
        yield "draft slots", drafts.slots, drafts.release


def sampled(seed: int, max_tokens: int) -> SamplingParams:
    """Greedy for even seeds, drawn at temperature 0.8 for odd ones."""
    return SamplingParams(max_tokens, temperature=0.8 * (seed % 2), seed=seed)


def prompt_of(seed: int, size: int) -> Int32:
    """The first `size` tokens of the text that a seed stands for."""
    return np.random.default_rng(seed).integers(0, VOCAB, 64).astype(np.int32)[:size]


def describe(values: Mapping[str, object]) -> str:
    """A test id."""
    return "-".join(str(value) for value in values.values())
