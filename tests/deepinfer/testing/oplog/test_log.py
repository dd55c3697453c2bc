"""The log's format: what was written is read again, and what is wrong is named with its line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deepinfer.errors import UserError
from deepinfer.testing.oplog.log import (
    END,
    OperationLog,
    decode,
    encode,
    header,
    read_blocks,
    read_header,
    read_touched,
    show_blocks,
    show_touched,
)
from deepinfer.testing.oplog.operations import (
    OPERATIONS,
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
from tests.deepinfer.testing.oplog.op_logs import LATE_COPY, SMALL, write_log

EXAMPLES: list[Operation] = [
    Allocate((1, 2, 3), (5, 7, 2), (("a", "admit", 2), ("ü b", "append", 1)), {"a2": "a1 of x"}),
    Allocate((4,), (2,), (("a", "admit", 1),), pool="states"),
    Pin((1, 2), "child", "parent"),
    Release((3, 1), "a", "finish"),
    Release((3,), "a", "abort", 4, "e2"),
    Release((3,), "load", "load", event="e2"),
    Release((3,), "a", "fork source", 4, "e3", "copy"),
    Submit("compute", "forward", ((1, 0, None), (2, 0, 3), ("staging", 1)), (("record", 1),)),
    Copy("copy", (1, 2), (3, 9), "copies", (("staging", 2),)),
    Record("compute", "e1", 3),
    Record("copy", "e2", by="policy"),
    Wait("compute", "e1"),
    Query("e1", True, "policy"),
    Synchronize(),
    Synchronize("e1"),
    Recycle("e1"),
    Host("collect", (("record", 3),)),
    ReleasePoint(),
    Collected(3),
    Commit(((1, 0, 3), (2, 0, None))),
    Flush("policy"),
]


@pytest.mark.parametrize("operation", EXAMPLES, ids=lambda operation: operation.op)
def test_every_operation_survives_a_round_trip(operation: Operation) -> None:
    """A line gives back the operation it was written from."""
    assert decode(encode(operation)) == operation


def test_the_examples_are_of_every_kind() -> None:
    """No operation goes untested."""
    assert {operation.op for operation in EXAMPLES} == set(OPERATIONS)


@pytest.mark.parametrize(
    ("touched", "text"),
    [
        ((), ""),
        (((1, 0, None), (2, 0, None), (3, 0, None), (5, 0, None)), "a1-a3 a5"),
        (((3, 0, None), (2, 0, None)), "a3 a2"),
        (((1, 0, None), (2, 0, 4), (3, 0, None)), "a1 a2[0:4] a3"),
        ((("record", 7), (1, 2, 3)), "record:7 a1[2:3]"),
        ((("buffer", 1 << 40),), f"buffer:{1 << 40}"),
    ],
)
def test_runs_of_blocks_are_written_short(touched: tuple, text: str) -> None:
    """Whole blocks that follow one another are a range, parts of blocks name their rows."""
    assert show_touched(touched) == text
    assert read_touched(text) == touched


def test_blocks_are_whole() -> None:
    """A table is a list of whole blocks, in any order."""
    assert show_blocks((4, 5, 1)) == "a4-a5 a1"
    assert read_blocks("a4-a5 a1") == (4, 5, 1)
    with pytest.raises(ValueError, match="no whole block"):
        read_blocks("a1[0:2]")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nonsense", "Expecting value"),
        ("[]", "expected an object"),
        ('{"blocks": "a1"}', "unknown operation None"),
        ('{"op": "alocate"}', "did you mean 'allocate'?"),
        ('{"op": "record", "stream": "copy"}', "record: no event"),
        ('{"op": "record", "stream": "copy", "evnt": "e1"}', "unknown key 'evnt'"),
        ('{"op": "collected", "step": "3"}', "'3' is not of type int"),
        ('{"op": "collected", "step": true}', "True is not of type int"),
        ('{"op": "release", "blocks": "a1 b2"}', "'b2' is neither a block"),
        ('{"op": "release", "blocks": [1]}', "is no text"),
        ('{"op": "release", "blocks": "a3-a1"}', "'a3-a1': no blocks"),
        ('{"op": "release", "blocks": "a1-a9999999999"}', "more than 1048576 blocks"),
        ('{"op": "host", "reads": "a1[3:3]"}', "no rows"),
        ('{"op": "release", "blocks": "a9"}', "block a9 was not allocated before"),
        ('{"op": "host", "reads": "a9[0:1]"}', "block a9 was not allocated before"),
        ('{"op": "commit", "rows": "a9[0:1]"}', "block a9 was not allocated before"),
        ('{"op": "commit", "rows": "record:1"}', "commit: rows are of blocks"),
        ('{"op": "copy", "stream": "copy", "sources": "a9", "blocks": "a1"}', "a9 was not alloc"),
        ('{"op": "copy", "stream": "copy", "sources": "a1-a2", "blocks": "a1"}', "2 sources of 1"),
        ('{"op": "allocate", "blocks": "a1", "ids": [1]}', "must go on with a5"),
        ('{"op": "allocate", "blocks": "a5", "ids": [1, 2]}', "2 ids of 1 blocks"),
        ('{"op": "allocate", "blocks": "a5", "ids": "1"}', "no list of ids"),
        ('{"op": "allocate", "blocks": "a5", "ids": [1], "pool": "x"}', "expected 'states'"),
        ('{"op": "allocate", "blocks": "a5", "ids": [1], "takers": [1]}', "no list of [owner"),
    ],
)
def test_a_broken_line_is_named(line: str, message: str, tmp_path: Path) -> None:
    """The error says which line of which file, and what is wrong with it."""
    path = write_log(tmp_path / "ops.jsonl", LATE_COPY)
    number = len(LATE_COPY) + 3  # behind the header and the end mark
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(UserError) as error:
        list(OperationLog(path))
    assert str(error.value).startswith(f"{path}:{number}: ")
    assert message in str(error.value)


def test_blocks_and_state_slots_are_not_in_one_table(tmp_path: Path) -> None:
    """A table, and a copy, is of one pool."""
    both = [Allocate((1,), (1,)), Allocate((2,), (1,), pool="states")]
    for wrong in (Release((1, 2), "a", "finish"), Copy("copy", (1,), (2,))):
        path = write_log(tmp_path / "ops.jsonl", [*both, wrong])
        with pytest.raises(UserError, match=f":4: {wrong.op}: blocks and state slots together"):
            list(OperationLog(path))


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    """A log whose writer was killed is read up to its last whole line."""
    path = write_log(tmp_path / "ops.jsonl", LATE_COPY)
    whole, end, _ = path.read_bytes().rpartition(END.encode())
    assert end
    path.write_bytes(whole[:-10])
    log = OperationLog(path)
    assert [operation for _, operation in log] == LATE_COPY[:-1]
    assert log.truncated


def test_a_log_cut_between_lines_has_no_end(tmp_path: Path) -> None:
    """Whole lines and no end mark: a part of the run is missing, and the reader knows."""
    path = write_log(tmp_path / "ops.jsonl", LATE_COPY)
    path.write_bytes(path.read_bytes().replace(END.encode() + b"\n", b""))
    log = OperationLog(path)
    assert [operation for _, operation in log] == LATE_COPY
    assert log.truncated


def test_a_log_can_be_read_twice(tmp_path: Path) -> None:
    """Iterating starts at the first operation each time, with the lines' numbers."""
    log = OperationLog(write_log(tmp_path / "ops.jsonl", LATE_COPY))
    assert list(log) == list(log) == list(enumerate(LATE_COPY, start=2))
    assert not log.truncated
    assert log.config == SMALL


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not an operation log"),
        (b"\xff\xfe\n", "not an operation log"),
        (b'{"kind": "run"}\n', "not an operation log"),
        (b'{"format": "something"}\n', "format 'something'; expected 'deepinfer-operations'"),
        (b'{"format": "deepinfer-operations", "version": 9}\n', "version 9 of the format"),
        (b'{"format": "deepinfer-operations", "version": 1}\n', "engine: expected its set"),
    ],
)
def test_another_file_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    """By its first line: no header, another format, another version, no engine."""
    path = tmp_path / "ops.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        OperationLog(path)


@pytest.mark.parametrize(("key", "value"), [("num_blocks", 1), ("unheard_of", 3)])
def test_an_engine_that_cannot_be_is_refused(key: str, value: int, tmp_path: Path) -> None:
    """The header's configuration must be one of this version."""
    entry = json.loads(header(SMALL))
    entry["engine"][key] = value
    path = tmp_path / "ops.jsonl"
    path.write_text(json.dumps(entry) + "\n")
    with pytest.raises(UserError, match=f":1: engine: .*{key}"):
        OperationLog(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    """One line with the name and the reason."""
    with pytest.raises(UserError, match=r"missing.jsonl: cannot read: No such file"):
        read_header(tmp_path / "missing.jsonl")
