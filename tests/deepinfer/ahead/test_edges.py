"""Ends, limits, forks and preemptions where drafts and steps in flight meet them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from deepinfer.device.base import Device
from deepinfer.drafters.base import Asked, Drafter, Drafts
from deepinfer.drafters.ngram import NgramDrafter
from deepinfer.names import OVERLAPS
from deepinfer.sequence import SamplingParams
from tests.deepinfer.ahead.scenes import CONFIG, Stage, prompt_of, sampled


def config(overlap: str = "off", drafts: int = 5, **settings):
    return replace(CONFIG, overlap=overlap, drafts=drafts, **settings)


# -- the last tokens -------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("max_tokens", [1, 2, 5, 6, 7, 8, 13])
def test_the_last_tokens_come_with_no_draft_too_many(overlap, max_tokens):
    """At `max_model_len`, all drafts right: the first step brings 1, each other up to 6.

    That no plan writes the last position or one behind it, the stage checks at each submit.
    """
    length = CONFIG.max_model_len - max_tokens
    with Stage("qwen3", config(overlap, max_num_batched_tokens=64)) as stage:
        stage.add("a", prompt_of(1, 64)[:length], SamplingParams(max_tokens))
        stage.finish()
        output = stage.ended["a"]
        assert (len(output.token_ids), output.finish_reason) == (max_tokens, "length")
        assert overlap != "off" or len(stage.steps) == 1 + -(-(max_tokens - 1) // 6)


def first_seen(stage: Stage, prompt, sampling: SamplingParams, index: int) -> int:
    """The token a request emits at `index`, or at the next place where it is a new one."""
    true = stage.truth.output(prompt, sampling).token_ids.tolist()
    return next(t for i, t in enumerate(true) if i >= index and t not in true[:i])


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("index", range(7))
def test_a_stop_token_among_accepted_drafts_ends_the_request_there(overlap, index):
    """Drafts behind it are right and dropped all the same; the request beside it runs on."""
    with Stage("qwen3", config(overlap)) as stage:
        prompt, sampling = prompt_of(2, 6), SamplingParams(16, temperature=0.9, seed=3)
        stop = first_seen(stage, prompt, sampling, index)
        stage.add("stops", prompt, replace(sampling, stop_token_id=stop))
        stage.add("runs on", prompt_of(3, 7), SamplingParams(16))
        stage.finish()
        output = stage.ended["stops"]
        assert output.finish_reason == "stop"
        assert output.token_ids.tolist().index(stop) == len(output.token_ids) - 1 >= index
        assert len(stage.ended["runs on"].token_ids) == 16


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_drafts_behind_a_stop_token_are_not_counted_as_accepted(overlap):
    """The sixth token ends the request: four of five right drafts; steps behind it have none."""
    with Stage("qwen3", config(overlap)) as stage:
        prompt, sampling = prompt_of(2, 6), SamplingParams(24)
        stop = first_seen(stage, prompt, sampling, 5)
        stage.add("stops", prompt, replace(sampling, stop_token_id=stop))
        stage.finish()
        num_tokens = len(stage.ended["stops"].token_ids)
        counts = [step.drafts for step in stage.steps if step.drafts is not None]
        accepted = [sum(drafts.accepted) for drafts in counts]
        assert sum(accepted) == num_tokens - 1 - sum(1 for step in accepted if step)
        assert [drafts.num_rows for drafts in counts] == [5] * len(counts)
        assert [drafts.num_seqs for drafts in counts[len(counts) - OVERLAPS.index(overlap) :]] == (
            [0] * OVERLAPS.index(overlap)
        )


@pytest.mark.parametrize("overlap", ["on", "2"])
@pytest.mark.parametrize("drafts", [0, 3])
def test_a_request_that_stops_with_its_next_steps_in_flight_runs_on_for_nothing(drafts, overlap):
    """Its blocks stay withheld until they are done; the other request gets what is its own."""
    with Stage("qwen3", config(overlap, drafts, release="step")) as stage:
        prompt, sampling = prompt_of(2, 6), SamplingParams(16)
        stop = first_seen(stage, prompt, sampling, 3)
        stage.add("stops", prompt, replace(sampling, stop_token_id=stop))
        stage.add("runs on", prompt_of(3, 7), SamplingParams(16))
        row = None
        while "stops" not in stage.ended:
            stage.submit_all()
            row = stage.engine.scheduler.find("stops").row
            stage.collect()
        steps = list(stage.engine._in_flight)
        assert len(steps) == stage.engine.max_in_flight - 1
        for step in steps:
            assert row in step.plan.rows
            assert stage.engine.blocks.num_withheld > 0
            assert set(stage.collect().request_ids) == {"runs on"}
            assert row in step.flight.plan.rows  # as it really ran
        assert stage.engine.blocks.num_withheld == 0
        stage.finish()


def test_a_step_whose_requests_have_all_ended_brings_nothing():
    """The step in flight behind the stop token runs, and changes nothing."""
    with Stage("qwen3", config("on", 0)) as stage:
        prompt, sampling = prompt_of(2, 6), SamplingParams(16)
        stop = first_seen(stage, prompt, sampling, 3)
        stage.add("stops", prompt, replace(sampling, stop_token_id=stop))
        while "stops" not in stage.ended:
            stage.step()
        assert len(stage.plans) == 1
        assert stage.engine.has_unfinished()
        assert stage.collect().request_ids == []
        stage.check_drained()


# -- budgets ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("acceptance", [0.0, 1.0])
def test_a_budget_too_small_for_all_drafts_leaves_nobody_out(acceptance):
    """Four requests, six tokens a step: each gets its one token in every step, drafts the rest."""
    with Stage("qwen3", config(max_num_batched_tokens=6), acceptance) as stage:
        for number in range(4):
            stage.add(f"r{number}", prompt_of(number, 1), sampled(number, 9))
        granted = 0
        while stage.engine.has_unfinished():
            stage.submit()
            (plan,) = stage.plans
            assert plan.num_seqs == len(stage.running)
            assert plan.ahead is not None
            granted += int(plan.ahead.num_drafts.sum())
            stage.collect()
        stage.check_drained()
        assert granted > 0


# -- preemption ------------------------------------------------------------------------------------


@pytest.mark.parametrize("release", ["ordered", "early"])
@pytest.mark.parametrize("drafts", [0, 3])
def test_a_stale_frame_changes_nothing_of_a_request_that_resumed_in_its_row(drafts, release):
    """Preempted with a step in flight and back in the same row before that step is collected."""
    with Stage("qwen3", config("on", drafts, release=release)) as stage:
        stage.add("a", prompt_of(1, 6), SamplingParams(14))
        for _ in range(3):
            stage.step()
        assert len(stage.plans) == 1
        seqs, row = stage.seqs, stage.engine.scheduler.find("a").row
        stage.engine.scheduler._held.preempt(row)
        assert not any(int(getattr(seqs, name)[row]) for name in COUNTERS[1:])
        assert stage.submit()
        assert stage.engine.scheduler.find("a").row == row
        assert stage.engine.scheduler.find("a").num_preemptions == 1
        before = [int(getattr(seqs, name)[row]) for name in COUNTERS]
        assert stage.collect().request_ids == []  # of the time before the preemption
        assert [int(getattr(seqs, name)[row]) for name in COUNTERS] == before
        stage.finish()
        assert len(stage.ended["a"].token_ids) == 14


COUNTERS = (
    *("num_computed_tokens", "num_in_flight_tokens", "num_pending_tokens"),
    *("num_in_flight_drafts", "num_proposed_drafts"),
)


# -- forks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("own", [(), (7, 5)], ids=["decode", "prompt"])
@pytest.mark.parametrize("acceptance", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_fork_of_a_parent_with_drafts_in_flight(size, overlap, acceptance, own):
    """The parent's next verify step may begin in a block that the fork has pinned: it is copied.

    That each block a step may write is the request's own, the stage checks at each submit. Four
    forks, one at each length of the parent's last block.
    """
    settings = config(overlap, 3, block_size=size, num_blocks=161, max_num_seqs=6)
    with Stage("qwen3", settings, acceptance) as stage:
        stage.add("parent", prompt_of(1, 5), SamplingParams(20))
        stage.step()
        for number in range(4):
            stage.submit_all()
            if "parent" in stage.running:
                stage.fork("parent", f"f{number}", sampled(number, 7), own)
            stage.collect()
        stage.finish()
        assert len(stage.ended) == len(stage.requests) >= 2


@pytest.mark.parametrize("family", ["qwen3", "v4", "v41"])
@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("drafts", [0, 5])
def test_a_fork_of_a_parent_whose_next_result_ends_it(drafts, overlap, family):
    """The child keeps what it has pinned, and goes on from it."""
    with Stage(family, config(overlap, drafts)) as stage:
        stage.add("parent", prompt_of(1, 6), SamplingParams(8))
        while stage.submit_all() and len(stage.known("parent")) < 6 + 2:
            stage.collect()
        stage.fork("parent", "child", SamplingParams(9, temperature=0.7, seed=2))
        while "parent" not in stage.ended:
            stage.step()
        assert "child" not in stage.ended
        stage.finish()
        assert len(stage.ended["child"].token_ids) == 9


class Written:
    """How far the state of each request was ever written, by the results seen."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.ends: dict[str, int] = {}

    def step(self) -> None:
        """One step, submitted and collected."""
        self.stage.submit()
        (step,) = self.stage.engine._in_flight
        names = [self.stage.seqs.at(row).request_id for row in step.plan.rows.tolist()]
        self.stage.collect()
        ran = step.flight.plan
        for name, end in zip(names, ran.context_lens.tolist(), strict=True):
            self.ends[name] = max(self.ends.get(name, 0), end)


@pytest.mark.parametrize("acceptance", [0.0, 1.0])
@pytest.mark.parametrize("behind", range(8))
@pytest.mark.parametrize("family", ["v4", "v41"])
def test_a_fork_shares_the_state_of_a_parent_unless_rejected_drafts_wrote_too_far(
    family, behind, acceptance
):
    """Rejected drafts are bytes in the rings: they count for how far the state has gone on.

    Rings look 1 + 5 positions back. With all drafts rejected the state is up to five positions
    further than what is committed, and there is so much less to go back.
    """
    with Stage(family, config(), acceptance) as stage:
        written = Written(stage)
        stage.add("parent", prompt_of(1, 12), SamplingParams(20))
        for _ in range(3 if acceptance == 0 else 2):
            written.step()
        known = len(stage.known("parent"))
        stage.fork("parent", "child", SamplingParams(9), (7,), known - 1 - behind)
        is_shared = written.ends["parent"] - (known - 1 - behind) <= 6
        assert is_shared == (behind <= (1 if acceptance == 0 else 6))
        child = stage.engine.scheduler.find("child")
        assert child.num_computed_tokens == (known - 1 - behind if is_shared else 0)
        assert stage.engine.scheduler.counters.num_stateless_forks == 1 - is_shared
        stage.finish()


@pytest.mark.parametrize("drafts", [0, 5])
@pytest.mark.parametrize("family", ["v4", "v41"])
def test_a_fork_of_a_fork_remembers_how_far_the_first_parent_wrote(family, drafts):
    """A state that was copied has gone on as far as the one it was copied from."""
    with Stage(family, config(drafts=drafts, max_num_seqs=6), 0.0) as stage:
        stage.add("parent", prompt_of(1, 20), SamplingParams(20))
        for _ in range(4):
            stage.step()
        committed = len(stage.known("parent")) - 1
        behind = 6 if not drafts else 1
        stage.fork("parent", "child", SamplingParams(12), (7,), committed - behind)
        assert stage.engine.scheduler.find("child").num_computed_tokens == committed - behind
        stage.step()
        known = len(stage.known("child"))
        stage.fork("child", "grandchild", SamplingParams(9), (5,), known - 1 - 5)
        assert stage.engine.scheduler.find("grandchild").num_computed_tokens == 0
        stage.finish()


@pytest.mark.parametrize("family", ["v4", "v41"])
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_a_fork_counts_the_steps_in_flight_as_if_all_of_them_were_written(family, overlap):
    """The state is copied behind them: with three verify steps in flight it has gone too far."""
    with Stage(family, config(overlap), 0.0) as stage:
        stage.add("parent", prompt_of(1, 8), SamplingParams(24))
        for _ in range(2):
            stage.step()
        stage.submit_all()
        depth = len(stage.plans)
        stage.fork("parent", "child", SamplingParams(9))
        shared = stage.engine.scheduler.find("child").num_computed_tokens > 0
        assert shared == (depth == 1)
        stage.finish()


# -- drafters that say less than they may ----------------------------------------------------------


class Hesitant:
    """Proposes some of what another drafter does: all of it, none, or anything between."""

    def __init__(self, inner: Drafter) -> None:
        self._inner = inner
        self._rng = np.random.default_rng(0)

    def prepare(self, device: Device, num_slots: int, max_model_len: int) -> None:
        self._inner.prepare(device, num_slots, max_model_len)

    def start(self, slot: int, request_id: str, num_prompt_tokens: int) -> None:
        self._inner.start(slot, request_id, num_prompt_tokens)

    def propose(self, asked: Asked) -> Drafts:
        drafts, counts = self._inner.propose(asked)
        said = self._rng.integers(asked.num_drafts + 1, size=len(counts))
        return Drafts(drafts, counts.minimum(torch.from_numpy(said)))


@pytest.mark.parametrize("acceptance", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("family", ["qwen3", "v4", "v41"])
def test_fewer_drafts_than_were_planned_for(family, overlap, acceptance):
    """What the host reserved for drafts that nobody proposed goes back like rejected ones."""
    with Stage(family, config(overlap), acceptance, wrap=Hesitant) as stage:
        for number in range(4):
            stage.add(f"r{number}", prompt_of(number, 3 + number), sampled(number, 16))
        stage.finish()
        proposed, accepted = stage.accepted()
        assert proposed > 0
        assert {0.0: accepted == 0, 0.7: 0 < accepted < proposed, 1.0: accepted == proposed}[
            acceptance
        ]


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_prompt_lookup_drafts_what_it_finds(overlap):
    """A prompt that repeats itself: drafts are proposed now and then, of any number."""
    with Stage("qwen3", config(overlap), wrap=lambda _: NgramDrafter()) as stage:
        for number in range(4):
            prompt = np.tile(prompt_of(number, 3 + number), 3)
            stage.add(f"r{number}", prompt, sampled(number, 20))
        stage.finish()
        proposed, accepted = stage.accepted()
        assert proposed > 0
        assert accepted < proposed
