"""The recorder writes what the engine did, told from what its policy made of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from deepinfer import fork_sources
from deepinfer.engine import LLMEngine
from deepinfer.errors import UserError
from deepinfer.models.weights import Qwen3Weights
from deepinfer.names import RELEASE_POLICIES
from deepinfer.observer import KV, RECORD, Access
from deepinfer.sequence import SamplingParams
from deepinfer.testing.faults.scenario import MODEL_WITH_STATE
from deepinfer.testing.oplog import recorder as recorder_module
from deepinfer.testing.oplog.log import OperationLog
from deepinfer.testing.oplog.operations import (
    STATES,
    Allocate,
    Collected,
    Commit,
    Copy,
    Flush,
    Host,
    Operation,
    Pin,
    Query,
    Record,
    Recycle,
    Release,
    ReleasePoint,
    Submit,
    Synchronize,
    Wait,
)
from deepinfer.testing.oplog.recorder import OperationRecorder
from tests.deepinfer.step_plans import TINY
from tests.deepinfer.testing.oplog.recorded import (
    CONFIG,
    record,
    record_eventful,
    state_weights,
    tiny_weights,
)


@pytest.fixture(scope="module")
def weights() -> Qwen3Weights:
    return tiny_weights()


def operations(path: Path) -> list[Operation]:
    return [operation for _, operation in OperationLog(path)]


def of_kind(kind: type, log: list[Operation]) -> list:
    return [operation for operation in log if isinstance(operation, kind)]


def test_a_fork_reads_as_a_story(tmp_path: Path, weights: Qwen3Weights) -> None:
    """Pin, allocate, copy, give the source up: one line each, with the names of the requests."""
    log = operations(record(tmp_path / "ops.jsonl", weights).log.path)
    start = next(i for i, op in enumerate(log) if isinstance(op, Pin))
    pins = log[start : start + 3]
    assert pins[0] == Pin((1, 2, 3), "child-0", "parent")
    assert [pin.owner for pin in pins] == ["child-0", "child-1", "child-2"]
    taken = of_kind(Allocate, log[start:])[:3]
    assert [op.takers for op in taken] == [((f"child-{i}", "fork", 1),) for i in range(3)]
    (copy, *_) = of_kind(Copy, log[start:])
    assert (copy.sources, copy.blocks) == ((3, 3, 3), (4, 5, 6))
    given_up = [op for op in of_kind(Release, log) if op.path == "fork source"]
    assert [(op.owner, op.blocks, op.step, op.stream) for op in given_up] == [
        (f"child-{i}", (3,), 2, "copy") for i in range(3)
    ]


def test_a_fork_of_a_state_reads_as_a_story(tmp_path: Path) -> None:
    """A slot for the child, a pin of the parent's, one copy for all, the pins given up behind it;
    a step reads and writes its slots, each once."""
    run = record(tmp_path / "ops.jsonl", state_weights(), model=MODEL_WITH_STATE)
    log = operations(run.log.path)
    slots = [op for op in of_kind(Allocate, log) if op.pool == STATES]
    assert [op.takers for op in slots[:4]] == [
        (("parent", "admit", 1),),
        *(((f"child-{i}", "fork", 1),) for i in range(3)),
    ]
    names = [op.blocks[0] for op in slots]
    parent, *children = names[:4]
    first = log.index(slots[1])
    assert log[first + 1] == Pin((parent,), "child-0", "parent")
    (copy, *_) = [op for op in of_kind(Copy, log) if op.label.startswith("copy_states")]
    assert (copy.sources, copy.blocks) == ((parent,) * 3, tuple(children))
    given_up = [op for op in of_kind(Release, log) if op.path == "fork source"]
    assert [(op.owner, op.step) for op in given_up if op.blocks == (parent,)] == [
        (f"child-{i}", 2) for i in range(3)
    ]
    (third,) = [op for op in of_kind(Submit, log) if op.label == "forward step 3"]
    for touched in (third.reads, third.writes):
        assert [part[0] for part in touched if part[0] in names] == names[:4]
    released = [block for op in of_kind(Release, log) for block in op.blocks if block in names]
    assert set(released) == set(names)


def test_all_paths_of_a_release_are_told_apart(tmp_path: Path, weights: Qwen3Weights) -> None:
    """Finish and preempt have no fence, an abort in flight has the end of its step."""
    run = record(tmp_path / "ops.jsonl", weights)
    log = operations(run.log.path)
    releases = of_kind(Release, log)
    assert run.num_preemptions > 0
    assert {op.path for op in releases} == {"finish", "abort", "preempt", "fork source"}
    ends = {op.event: op.step for op in of_kind(Record, log) if op.step is not None}
    aborted = [op for op in releases if op.path == "abort"]
    assert [op.owner for op in aborted] == ["child-0", "late"]
    assert all(ends[op.event] == op.step and not op.stream for op in aborted)
    assert all(op.step is None for op in releases if op.path in ("finish", "preempt"))


def test_a_reuse_says_whose_block_it_was(tmp_path: Path, weights: Qwen3Weights) -> None:
    """The last ownership of the same place, by name and by the path on which it ended."""
    log = operations(record(tmp_path / "ops.jsonl", weights).log.path)
    place: dict[int, int] = {}
    last: dict[int, str] = {}
    num_reuses = 0
    for op in log:
        if isinstance(op, Allocate):
            for block, where in zip(op.blocks, op.ids, strict=True):
                assert op.reuses.get(f"a{block}", "").split(",")[0] == last.get(where, "")
                num_reuses += where in last
                place[block] = where
        elif isinstance(op, Release):
            last.update({place[block]: f"a{block} of {op.owner}" for block in op.blocks})
    assert num_reuses > 5


def test_one_allocation_may_have_several_takers(tmp_path: Path, weights: Qwen3Weights) -> None:
    """Running tables grow together: one line, with everybody's share."""
    log = operations(record(tmp_path / "ops.jsonl", weights).log.path)
    grown = [op for op in of_kind(Allocate, log) if len(op.takers) > 1]
    assert grown
    assert all(sum(count for *_, count in op.takers) == len(op.blocks) for op in grown)
    assert {path for op in grown for _, path, _ in op.takers} == {"append"}


@pytest.mark.parametrize("policy", RELEASE_POLICIES)
@pytest.mark.parametrize("device", ["cpu", "cpu-stepped"])
def test_what_the_engine_did_does_not_depend_on_the_policy(
    policy: str, device: str, tmp_path: Path, weights: Qwen3Weights
) -> None:
    """Without the policy's lines, names apart, a step's device work is the same under each."""
    base = record(tmp_path / "base.jsonl", weights)
    run = record(tmp_path / "ops.jsonl", weights, release=policy, device=device)
    assert run.tokens == base.tokens

    def device_work(log: OperationLog) -> list[tuple]:
        kinds = (Submit, Copy, Wait, Record, Synchronize, Host, ReleasePoint, Collected)
        return [
            (op.op, getattr(op, "stream", ""), getattr(op, "label", ""))
            for _, op in log
            if isinstance(op, kinds) and not getattr(op, "by", "")
        ]

    assert device_work(run.log) == device_work(base.log)


def test_waits_and_looks_of_the_policy_are_marked(tmp_path: Path, weights: Qwen3Weights) -> None:
    """A deferred policy waits at the release point, a polled one looks; the engine does neither."""
    deferred = operations(record(tmp_path / "d.jsonl", weights, release="deferred").log.path)
    at = next(i for i, op in enumerate(deferred) if isinstance(op, Flush) and op.by == "policy")
    assert isinstance(deferred[at - 1], Synchronize)
    assert deferred[at - 1].by == "policy"
    assert isinstance(deferred[at - 2], ReleasePoint)
    # With the only request aborted in flight, no release point is left: the engine flushes.
    assert [op.by for op in of_kind(Flush, deferred)].count("") == 1
    blocking = operations(record(tmp_path / "b.jsonl", weights, release="blocking").log.path)
    assert {op.by for op in of_kind(Flush, blocking)} == {"policy"}
    polled = operations(record(tmp_path / "p.jsonl", weights, release="polled").log.path)
    assert of_kind(Query, polled)
    assert all(op.by == "policy" for op in of_kind(Query, polled))
    assert not [op for op in of_kind(Synchronize, polled) if op.by]


def test_a_step_is_on_disk_once_it_is_collected(tmp_path: Path, weights: Qwen3Weights) -> None:
    """A process that dies leaves the log up to its last collected step."""
    path = tmp_path / "ops.jsonl"
    recorder = OperationRecorder(path, CONFIG)
    with LLMEngine(
        TINY, CONFIG, device="cpu-stepped", weights=weights, observers=[recorder]
    ) as engine:
        engine.add_request("a", np.arange(6), SamplingParams(max_tokens=4))
        engine.step()
        engine.submit()
        log = operations(path)
        assert log[-1] == Collected(1)
        engine.collect()
    recorder.close()
    recorder.close()
    assert Collected(2) in operations(path)


def test_waits_of_an_ordered_policy_are_the_policys(tmp_path: Path) -> None:
    """A wait is the engine's behind its event's record, or right before a submit on its stream."""
    path = tmp_path / "ops.jsonl"
    with OperationRecorder(path, CONFIG) as recorder:
        for stream in ("copy", "compute"):
            recorder.waited(stream, 1)
        recorder.waited("copy", 2)
        recorder.submitted("copy", "copies", (), ())
        recorder.recorded("copy", 3)
        recorder.waited("compute", 3)
        recorder.recorded("compute", 4)
    by = [(op.stream, op.event, op.by) for op in of_kind(Wait, operations(path))]
    assert by == [
        ("copy", "e1", "policy"),
        ("compute", "e1", "policy"),
        ("copy", "e2", ""),
        ("compute", "e3", ""),
    ]


def test_rows_are_merged_and_shared_blocks_named_once(tmp_path: Path) -> None:
    """One token after another in one block is one span; a prefix of two requests is read once."""
    path = tmp_path / "ops.jsonl"
    with OperationRecorder(path, CONFIG) as recorder:
        recorder.allocated([7, 3])
        recorder.took("a", [7, 3], "admit")
        ids = np.array([7, 7, 7, 7, 3, 3], np.int64)
        start = np.array([0, 1, 2, 3, 0, 1], np.int64)
        tables = Access(KV, np.array([7, 3, 7], np.int32), np.zeros(3, np.int32), np.full(3, 4))
        number = Access(RECORD, np.array([1]))
        recorder.submitted("compute", "x", [tables], [Access(KV, ids, start, start + 1), number])
    (submit,) = of_kind(Submit, operations(path))
    assert submit.reads == ((1, 0, None), (2, 0, None))
    assert submit.writes == ((1, 0, None), (2, 0, 2), ("record", 1))


def test_rows_of_nobodys_block_are_left_out(tmp_path: Path) -> None:
    """Block 0, a block that was never handed out, and an id outside of the pool."""
    path = tmp_path / "ops.jsonl"
    with OperationRecorder(path, CONFIG) as recorder:
        recorder.allocated([7])
        ids = np.array([0, 3, 7, -1, CONFIG.num_blocks + 9])
        recorder.submitted("compute", "x", [Access(KV, ids, ids * 0, ids * 0 + 2)], [])
    (submit,) = of_kind(Submit, operations(path))
    assert submit.reads == ((1, 0, 2),)


def test_calls_without_a_name_are_written_without_one(tmp_path: Path) -> None:
    """Blocks that nobody says they took, and pins of nobody in particular."""
    path = tmp_path / "ops.jsonl"
    with OperationRecorder(path, CONFIG) as recorder:
        recorder.allocated([])
        recorder.allocated([4, 5])
        recorder.pinned([5])
        recorder.giving_up([5], None, "", "")
    assert operations(path) == [Allocate((1, 2), (4, 5)), Pin((2,)), Release((2,))]


def test_a_transfer_reads_as_a_story(tmp_path: Path) -> None:
    """A save pins by name, waits behind the copies, and gives up behind an event of its own; the
    host that has seen an event pass before it recycles it waits for it in a replay."""
    log = operations(record_eventful(tmp_path / "ops.jsonl", 0).path)
    start = next(i for i, op in enumerate(log) if isinstance(op, Pin) and op.owner[:4] == "save")
    name, blocks = log[start].owner, log[start].blocks
    kinds = [type(op) for op in log[start : start + 7]]
    assert kinds == [Pin, Record, Wait, Recycle, Submit, Record, Release]
    wait, submit, record, release = log[start + 2], *log[start + 4 : start + 7]
    assert (wait.stream, wait.by, submit.label) == ("load", "", f"save {name}")
    assert release == Release(blocks, name, "save", event=record.event)
    end = next(i for i, op in enumerate(log) if op == Recycle(record.event))
    assert log[end - 1] == Synchronize(record.event)


def test_a_loads_waits_for_who_had_its_blocks_are_the_policys(tmp_path: Path) -> None:
    """Under `ordered`: another policy frees blocks in another way."""
    log = operations(record_eventful(tmp_path / "ops.jsonl", 0, release="ordered").path)
    fences = {op.event for op in of_kind(Release, log) if op.event}
    waits = [op for op in of_kind(Wait, log) if op.stream == "load" and op.event in fences]
    assert waits
    assert {op.by for op in waits} == {"policy"}


def test_what_is_committed_is_written_where_drafts_are_verified(tmp_path: Path) -> None:
    """Behind each result that brings something; without drafts a step's rows are known before."""
    drafted = operations(record_eventful(tmp_path / "drafts.jsonl", 0).path)
    behind = [type(drafted[i - 1]) for i, op in enumerate(drafted) if isinstance(op, Commit)]
    assert Collected in behind
    assert set(behind) <= {Collected, Recycle}  # of events of the step's copies
    plain = operations(record_eventful(tmp_path / "plain.jsonl", 0, ahead=False).path)
    assert not of_kind(Commit, plain)


def test_the_engines_word_for_a_fork_source() -> None:
    """The recorder knows the path by the name that the engine gives it."""
    assert recorder_module.FORK_SOURCE == fork_sources.FORK_SOURCE


def test_a_full_disk_is_one_line() -> None:
    """The file and the reason, when it is opened and at any later write."""
    with pytest.raises(UserError, match=r"^/dev/full: cannot write: No space left on device$"):
        OperationRecorder("/dev/full", CONFIG)


def test_a_place_that_cannot_be_written_to(tmp_path: Path) -> None:
    """The file and the reason."""
    with pytest.raises(UserError, match=r"ops\.jsonl: cannot write: No such file or directory"):
        OperationRecorder(tmp_path / "none" / "ops.jsonl", replace(CONFIG))
