"""A replay is the recorded run again, or the same operations under another choice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepinfer.block_manager import BlockManager
from deepinfer.config import EngineConfig
from deepinfer.models.weights import Qwen3Weights
from deepinfer.names import DISCIPLINES, FENCES, FREE_ORDERS, RELEASE_POLICIES, UNSAFE_POLICIES
from deepinfer.runners import Weights
from deepinfer.testing.faults.scenario import MODEL_WITH_STATE
from deepinfer.testing.oplog.figures import Figures, Progress
from deepinfer.testing.oplog.operations import (
    STATES,
    Allocate,
    Commit,
    Copy,
    Operation,
    Pin,
    Query,
    Record,
    Release,
    ReleasePoint,
    Submit,
    Wait,
    with_notes,
)
from deepinfer.testing.oplog.replay import Replay, replay_all
from tests.deepinfer.testing.oplog.op_logs import LATE_COPY, SMALL, TWO_IN_FLIGHT, collect, step
from tests.deepinfer.testing.oplog.recorded import (
    Recording,
    record,
    record_eventful,
    state_weights,
    tiny_weights,
)

SAFE = [name for name in RELEASE_POLICIES if name not in UNSAFE_POLICIES]
BOTH = ("order", "conservation")


@pytest.fixture(scope="module")
def weights() -> Qwen3Weights:
    return tiny_weights()


@pytest.fixture(scope="module")
def recorded(weights: Qwen3Weights, tmp_path_factory: pytest.TempPathFactory) -> Recording:
    return record(tmp_path_factory.mktemp("log") / "ops.jsonl", weights)


def watched(handed_out: list[list[int]]) -> Callable[..., BlockManager]:
    """A block manager class that notes the ids of every allocation."""

    class Watched(BlockManager):
        def allocate(self, count: int) -> np.ndarray:
            ids = super().allocate(count)
            handed_out.append(ids.tolist())
            return ids

    return Watched


def run(operations: Sequence[Operation], config: EngineConfig = SMALL, **options: Any) -> Replay:
    """Replay operations written by hand."""
    replay = Replay(config, **options)
    replay_all(list(enumerate(operations, start=2)), [replay])
    return replay


def check_same(run: Recording, progress: Progress) -> None:
    """A replay hands out the recorded ids and counts what the engine counted."""
    handed_out: list[list[int]] = []
    replay = Replay(run.log.config, make_blocks=watched(handed_out), checks=BOTH, progress=progress)
    replay_all(run.log, [replay])
    assert replay.stopped == ""
    assert replay.findings.first == []
    assert handed_out == [list(op.ids) for _, op in run.log if isinstance(op, Allocate)]
    pools = [(replay.figures, run.counters, "")]
    if run.slot_counters is not None:
        pools.append((replay.slot_figures, run.slot_counters, STATES))
    for figures, counters, pool in pools:
        assert figures.withheld_peak == counters.withheld_peak
        assert figures.host_waits == counters.num_waits
        assert figures.stream_waits == counters.num_stream_waits
        taken = [op.ids for _, op in run.log if isinstance(op, Allocate) and op.pool == pool]
        assert figures.allocations == len(taken)
        assert figures.blocks_allocated == sum(map(len, taken))
        assert figures.blocks_touched == len({block for ids in taken for block in ids})
    assert replay.figures.withheld_block_steps == run.withheld_block_steps
    assert replay.blocks.num_free == replay.blocks.num_usable


@pytest.mark.parametrize("fence", FENCES)
@pytest.mark.parametrize("policy", RELEASE_POLICIES)
def test_the_recorded_configuration_gives_the_recorded_run(
    policy: str, fence: str, tmp_path: Path, weights: Qwen3Weights
) -> None:
    """On a device that runs as late as it may, ids and counters are those of the engine."""
    run = record(tmp_path / "ops.jsonl", weights, release=policy, fence=fence)
    check_same(run, Progress("late"))


@pytest.fixture(scope="module")
def slot_weights() -> Weights:
    return state_weights()


@pytest.mark.parametrize(("device", "progress"), [("cpu-stepped", "late"), ("cpu", "recorded")])
@pytest.mark.parametrize("fence", FENCES)
@pytest.mark.parametrize("policy", RELEASE_POLICIES)
def test_state_slots_are_replayed_beside_the_blocks(
    policy: str, fence: str, device: str, progress: str, tmp_path: Path, slot_weights: Weights
) -> None:
    """Both pools hand out the recorded ids and count what the engine counted in each."""
    run = record(
        *(tmp_path / "ops.jsonl", slot_weights),
        model=MODEL_WITH_STATE,
        release=policy,
        fence=fence,
        device=device,
        discipline="lifo",
        num_state_slots=7,
    )
    log = [op for _, op in run.log]
    assert [op for op in log if isinstance(op, Copy) and op.label.startswith("copy_states")]
    check_same(run, Progress(progress))


def test_safe_policies_stay_safe_with_slots(tmp_path: Path, slot_weights: Weights) -> None:
    """Also in a pool of few slots, which are handed out again at once."""
    run = record(tmp_path / "ops.jsonl", slot_weights, model=MODEL_WITH_STATE, num_state_slots=7)
    replays = [
        Replay(
            replace(run.log.config, release=policy, discipline="lifo"),
            checks=BOTH,
            progress=Progress("random", seed),
        )
        for policy in SAFE
        for seed in range(4)
    ]
    replay_all(run.log, replays)
    assert {replay.stopped for replay in replays} == {""}
    assert [finding for replay in replays for finding in replay.findings.first] == []
    assert {replay.slot_figures.blocks_allocated for replay in replays} == {11}


# A fork's slot is copied; its parent ends, and the slot goes to a request whose first step nothing
# puts behind the copy, for it runs on a stream of its own.
LATE_STATE_COPY: list[Operation] = [
    Allocate((1,), (1,), (("parent", "admit", 1),), pool=STATES),
    *step(1, reads=((1, 0, None),), writes=((1, 0, None),)),
    *collect(1),
    Allocate((2,), (2,), (("child", "fork", 1),), pool=STATES),
    Pin((1,), "child", "parent"),
    Release((1,), "parent", "abort"),
    Copy("copy", (1,), (2,), "copy_states step 2"),
    Record("copy", "copied"),
    Release((1,), "child", "fork source", 2, stream="copy"),
    Allocate((3,), (1,), (("other", "admit", 1),), pool=STATES),
    Submit("load", "state of other", reads=((3, 0, None),), writes=((3, 0, None),)),
    Record("load", "loaded"),
    Wait("compute", "loaded"),
    Wait("compute", "copied"),
    *step(2, reads=((2, 0, None), (3, 0, None)), writes=((2, 0, None), (3, 0, None))),
    ReleasePoint(),
    *collect(2),
]
FEW_SLOTS = replace(SMALL, num_state_slots=3)


def test_a_slot_handed_out_under_its_copy_is_a_wrong_read() -> None:
    """The fork goes on from the state of the request that has the slot next."""
    replay = run(LATE_STATE_COPY, replace(FEW_SLOTS, release="early"), checks=("order",))
    assert replay.findings.counts["order"] > 0
    assert [finding.message for finding in replay.findings.first if finding.check == "content"] == [
        "forward step 2 on compute reads a2 of child in state slot 2 and finds a3 of other"
    ]
    for policy in ("blocking", "polled", "deferred", "ordered"):
        replay = run(LATE_STATE_COPY, replace(FEW_SLOTS, release=policy), checks=BOTH)
        assert (replay.stopped, replay.findings.first) == ("", [])
        assert replay.figures == Figures(operations=len(LATE_STATE_COPY))  # and no blocks


def test_a_pool_of_too_few_slots_stops_the_replay() -> None:
    """With the numbers of that pool."""
    replay = run(LATE_STATE_COPY, replace(SMALL, num_state_slots=2))
    assert replay.stopped == (
        "line 7: does not fit: 1 state slots for child (fork), with 0 free, 1 held and 0 withheld "
        "of 1"
    )


@pytest.mark.parametrize("discipline", DISCIPLINES)
@pytest.mark.parametrize("free_order", FREE_ORDERS)
def test_every_order_gives_the_recorded_ids(
    free_order: str, discipline: str, tmp_path: Path, weights: Qwen3Weights
) -> None:
    """Also the shuffled one, whose random numbers are drawn by the same calls."""
    run = record(tmp_path / "ops.jsonl", weights, free_order=free_order, discipline=discipline)
    check_same(run, Progress("late"))


@pytest.mark.parametrize("policy", RELEASE_POLICIES)
def test_a_run_on_threads_is_replayed_as_its_host_saw_it(
    policy: str, tmp_path: Path, weights: Qwen3Weights
) -> None:
    """What a look found there is found again, so a polled policy frees at the same moments."""
    run = record(tmp_path / "ops.jsonl", weights, release=policy, device="cpu")
    check_same(run, Progress("recorded"))


@pytest.mark.parametrize("progress", [Progress("late"), Progress("random", 1)])
def test_safe_policies_stay_safe_in_every_order(recorded: Recording, progress: Progress) -> None:
    """No wrong read, no hazard and no contradiction, whatever is replayed."""
    replays = [
        Replay(
            replace(recorded.log.config, release=policy, free_order=order, fence=fence),
            checks=BOTH,
            progress=progress,
        )
        for policy in SAFE
        for order in FREE_ORDERS
        for fence in FENCES
    ]
    replay_all(recorded.log, replays)
    assert {replay.stopped for replay in replays} == {""}
    assert [finding for replay in replays for finding in replay.findings.first] == []


@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("policy", SAFE)
def test_drafts_overlap_loads_and_saves_are_replayed_without_a_false_alarm(
    policy: str, with_state: bool, tmp_path: Path
) -> None:
    """Recorded under any safe policy, replayed under all of them; only `early` goes wrong."""
    early = 0
    for seed in range(2):
        path = tmp_path / f"{seed}.jsonl"
        log = record_eventful(path, seed, release=policy, with_state=with_state)
        replays = [
            Replay(replace(log.config, release=other), checks=BOTH, progress=progress)
            for other in RELEASE_POLICIES
            for progress in (Progress("late"), Progress("random", 1))
        ]
        replays.append(Replay(log.config, checks=BOTH, progress=Progress("recorded")))
        replay_all(log, replays)
        safe = [replay for replay in replays if replay.is_safe]
        assert {replay.stopped for replay in safe} == {""}
        assert [finding for replay in safe for finding in replay.findings.first] == []
        early += sum(len(replay.findings) for replay in replays if not replay.is_safe)
    assert early > 0


@pytest.mark.parametrize(
    "fault",
    [
        *("double-release", "save-not-pinned", "save-before-its-rows", "forward-before-its-copies"),
        *("load-used-before-written", "copy-repeated", "staging-rewritten", "result-read-early"),
        "shrunk-under-a-step-in-flight",
    ],
)
def test_what_the_recorded_engine_did_wrong_is_found_in_its_log(fault: str, tmp_path: Path) -> None:
    """By the order of its operations or by what they read, without its network."""
    found = 0
    for seed in range(3):
        log = record_eventful(tmp_path / f"{seed}.jsonl", seed, fault=fault)
        replay = Replay(log.config, checks=BOTH)
        replay_all(log, [replay])
        found += replay.has_failed
    assert found > 0


def test_rows_that_are_committed_can_be_read_beside_the_next_step(tmp_path: Path) -> None:
    """Without its lines that say so, a log with drafts makes hazards of some saves."""
    logs = [record_eventful(tmp_path / f"{seed}.jsonl", seed) for seed in range(3)]
    found = []
    for keeps in (True, False):
        replays = []
        for log in logs:
            replays.append(Replay(log.config, checks=BOTH))
            lines = [line for line in log if keeps or not isinstance(line[1], Commit)]
            replay_all(lines, replays[-1:])
        found.append([finding.message for replay in replays for finding in replay.findings.first])
    assert not found[0]
    assert found[1]
    assert all(message.startswith("'save ") for message in found[1])


def test_a_copy_that_runs_late_shows_an_early_release() -> None:
    """The load overwrites what the copy has still to read: the fork's rows are the other's."""
    replay = run(LATE_COPY, replace(SMALL, release="early"), checks=("order",))
    assert not replay.is_safe
    assert not replay.has_failed
    assert replay.findings.counts["content"] == 1
    assert replay.findings.counts["order"] > 0
    messages = [finding.message for finding in replay.findings.first if finding.check == "content"]
    assert messages == [
        "forward step 2 on compute reads a2 of child in block 2 and finds a4 of other"
    ]


@pytest.mark.parametrize("policy", ["blocking", "polled", "deferred", "ordered"])
@pytest.mark.parametrize("operations", [LATE_COPY, TWO_IN_FLIGHT], ids=["copy", "two steps"])
def test_safe_policies_wait_where_early_goes_wrong(
    policy: str, operations: list[Operation]
) -> None:
    """On the host or on a stream; then every row is what it must be, and ordered."""
    replay = run(operations, replace(SMALL, release=policy), checks=BOTH)
    assert replay.stopped == ""
    assert replay.findings.first == []
    figures = replay.figures
    assert (figures.host_waits > 0) == (policy != "ordered")
    assert (figures.stream_waits > 0) == (policy == "ordered")
    assert (figures.refused_while_withheld > 0) == (policy in ("polled", "deferred"))


def test_a_hazard_is_found_where_the_device_was_lucky() -> None:
    """As late as it may run, the load comes behind the steps; in other orders it does not."""
    early = replace(SMALL, release="early")
    lucky = run(TWO_IN_FLIGHT, early, checks=("order",))
    assert lucky.findings.counts["content"] == 0
    assert lucky.findings.counts["order"] > 0
    others = [run(TWO_IN_FLIGHT, early, progress=Progress("random", seed)) for seed in range(60)]
    assert any(replay.findings.counts["content"] for replay in others)


def test_a_step_policy_waits_for_the_end_of_the_step() -> None:
    """Its fences have no event of their own: the end of the step they belong to stands for them."""
    replay = run(TWO_IN_FLIGHT, replace(SMALL, release="step"), checks=BOTH)
    assert (replay.stopped, replay.findings.first) == ("", [])
    assert replay.figures.host_waits == 1


def test_a_step_policy_waits_for_the_step_of_a_fork_source() -> None:
    """The next step's allocation comes before the result that would free the source."""
    submit_2 = LATE_COPY.index(Wait("compute", "copied"))
    load = LATE_COPY.index(Allocate((3, 4), (3, 1), (("other", "admit", 2),)))
    wait, end = [Wait("compute", "copied")], submit_2 + 3
    log = [*LATE_COPY[:load], *wait, *LATE_COPY[submit_2 + 1 : end], *LATE_COPY[load : load + 3]]
    log += LATE_COPY[end:]
    replay = run(log, replace(SMALL, release="step"), checks=BOTH)
    assert (replay.stopped, replay.findings.first) == ("", [])
    assert replay.figures.host_waits == 1


@pytest.mark.parametrize(("seen", "withheld"), [(True, 0), (False, 1)])
def test_the_device_is_where_the_recorded_policy_saw_it(seen: bool, withheld: int) -> None:
    """A look that found the copy done finds it done in the replay, at the same moment."""
    given_up = LATE_COPY.index(Release((1,), "child", "fork source", 2, stream="copy"))
    release = replace(LATE_COPY[given_up], event="e9")
    log = [*LATE_COPY[:given_up], release, ReleasePoint(), Query("e9", seen, "policy")]
    replay = Replay(replace(SMALL, release="polled"), progress=Progress("recorded"))
    for _, operation, notes in with_notes(list(enumerate(log))):
        replay.apply(operation, notes)
    assert replay.blocks.num_withheld == withheld


def test_a_step_policy_cannot_wait_for_a_step_that_is_not_queued() -> None:
    """A fork source of the step being planned: nothing can free it, so the log does not fit."""
    replay = run(LATE_COPY, replace(SMALL, release="step"))
    assert replay.stopped == (
        "line 11: does not fit: 2 blocks for other (admit), with 1 free, 1 held and 1 withheld of 3"
    )
    assert not replay.has_failed


def test_a_pool_too_small_stops_its_own_cell_only(recorded: Recording) -> None:
    """The others reach the end, and a stop for want of blocks is no contradiction."""
    sizes = (8, 15, 40)
    replays = [Replay(replace(recorded.log.config, num_blocks=size)) for size in sizes]
    replay_all(recorded.log, replays)
    assert [bool(replay.stopped) for replay in replays] == [True, False, False]
    assert "of 7" in replays[0].stopped
    assert not any(replay.has_failed for replay in replays)
    # A larger pool reuses later, or not at all.
    assert replays[2].figures.blocks_touched > replays[1].figures.blocks_touched


def test_the_discipline_shows_in_the_reuse_distance(recorded: Recording) -> None:
    """A stack hands out again what came back last; a queue goes round."""
    replays = [
        Replay(replace(recorded.log.config, discipline=name, num_blocks=30))
        for name in ("lifo", "fifo")
    ]
    replay_all(recorded.log, replays)
    lifo, fifo = (replay.figures.reuse_distance for replay in replays)
    assert lifo is not None
    assert fifo is not None
    assert lifo < fifo


def test_random_progress_is_drawn_from_its_seed(recorded: Recording) -> None:
    """The same seed gives the same run; under `polled` progress shows in the counters."""
    config = replace(recorded.log.config, release="polled")

    def figures(seed: int) -> Any:
        replay = Replay(config, progress=Progress("random", seed))
        replay_all(recorded.log, [replay])
        return replay.figures

    assert figures(3) == figures(3)


def test_a_double_release_of_the_log_is_a_contradiction() -> None:
    """What the block manager refuses stops the replay and counts, also under a safe policy."""
    log = [Allocate((1,), (1,)), Release((1,), "a", "finish"), Release((1,), "a", "abort")]
    replay = run(log)
    assert replay.has_failed
    assert replay.stopped.startswith("line 4: release: OwnershipError: cannot release block 1")


class Careless(BlockManager):
    """Hands the same block out every time."""

    def allocate(self, count: int) -> np.ndarray:
        self._refs[1] += 1
        return np.array([1], np.int32)


def test_a_manager_that_hands_out_an_owned_block_is_caught() -> None:
    """By the replay's own count of owners, whatever checks are on."""
    log = [Allocate((1,), (1,)), Allocate((2,), (2,))]
    replay = run(log, make_blocks=Careless)
    assert replay.findings.counts["conservation"] == 1
    assert replay.findings.first[0].message == "block 1 is handed out while it has 1 owners"


class Forgetful(BlockManager):
    """Loses every block that is pinned."""

    def pin(self, block_ids: Any) -> None:
        super().pin(block_ids)
        self._free.take_one()


def test_counts_that_do_not_add_up_are_contradictions() -> None:
    """With the check `conservation`, free, held and withheld blocks must be all there are."""
    log = [Allocate((1,), (1,)), Pin((1,)), ReleasePoint()]
    assert run(log, make_blocks=Forgetful).findings.first == []
    replay = run(log, make_blocks=Forgetful, checks=("conservation",))
    (finding,) = replay.findings.first
    assert finding.message == "1 free + 2 held + 0 withheld of 3 blocks; 1 have owners"


def test_a_log_cut_off_in_the_middle_is_replayed_to_there(recorded: Recording) -> None:
    """Work that is queued still runs, and what its fences keep is let go."""
    operations = list(recorded.log)
    for end in range(0, len(operations), 7):
        for policy in RELEASE_POLICIES:
            replay = Replay(replace(recorded.log.config, release=policy), checks=BOTH)
            replay_all(operations[:end], [replay])
            assert replay.stopped == ""
            assert replay.findings.first == []
            assert replay.blocks.num_withheld == 0


def test_a_log_is_read_once_for_all_replays(recorded: Recording) -> None:
    """A generator will do: the cells go through it side by side."""
    replays = [Replay(recorded.log.config) for _ in range(2)]
    replay_all(iter(recorded.log), replays)
    assert replays[0].figures == replays[1].figures
    assert replays[0].figures.operations > 100
