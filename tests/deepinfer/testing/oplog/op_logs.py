"""Operation logs written by hand: what an engine at one step in flight cannot be made to do."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from deepinfer.config import EngineConfig
from deepinfer.testing.oplog.log import END, encode, header
from deepinfer.testing.oplog.operations import (
    Allocate,
    Collected,
    Copy,
    Operation,
    Record,
    Release,
    ReleasePoint,
    Submit,
    Synchronize,
    Wait,
)

SMALL = EngineConfig(block_size=4, num_blocks=4, max_model_len=64, release="step")


def write_log(path: Path, operations: Iterable[Operation], config: EngineConfig = SMALL) -> Path:
    """A log file of these operations."""
    lines = [header(config), *map(encode, operations), END]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def step(number: int, reads: str | tuple = (), writes: str | tuple = ()) -> list[Operation]:
    """A forward of stream compute and the event `end<number>` behind it."""
    record = (("record", number),)
    submit = Submit("compute", f"forward step {number}", tuple(reads), (*writes, *record))
    return [submit, Record("compute", f"end{number}", number)]


def collect(number: int) -> list[Operation]:
    """The host waits for a step and collects it."""
    return [Synchronize(f"end{number}"), Collected(number)]


# A fork's source is given up behind its copy; a load writes into whatever is handed out next while
# nothing orders it behind the copy; then the fork reads what it copied.
LATE_COPY: list[Operation] = [
    Allocate((1,), (1,), (("parent", "admit", 1),)),
    *step(1, writes=((1, 0, None),)),
    *collect(1),
    Allocate((2,), (2,), (("child", "fork", 1),)),
    Copy("copy", (1,), (2,), "copy_blocks step 2"),
    Record("copy", "copied"),
    Release((1,), "child", "fork source", 2, stream="copy"),
    Allocate((3, 4), (3, 1), (("other", "admit", 2),)),
    Submit("load", "load other", writes=((3, 0, None), (4, 0, None))),
    Record("load", "loaded"),
    Wait("compute", "loaded"),
    Wait("compute", "copied"),
    *step(2, reads=((2, 0, None),)),
    ReleasePoint(),
    *collect(2),
    Release((2,), "child", "finish"),
    Release((3, 4), "other", "finish"),
]

# Two steps in flight: a request is preempted with both queued, and the next one wants its blocks.
TWO_IN_FLIGHT: list[Operation] = [
    Allocate((1, 2), (1, 2), (("first", "admit", 2),)),
    *step(1, writes=((1, 0, None), (2, 0, 2))),
    ReleasePoint(),
    *step(2, reads=((1, 0, None), (2, 0, 3)), writes=((2, 2, 3),)),
    ReleasePoint(),
    Release((1, 2), "first", "preempt", 2, event="end2"),
    Allocate((3, 4, 5), (3, 2, 1), (("second", "admit", 3),)),
    Submit("load", "load second", writes=((3, 0, None), (4, 0, None), (5, 0, None))),
    Record("load", "loaded"),
    Wait("compute", "loaded"),
    *step(3, reads=((3, 0, None), (4, 0, None), (5, 0, None))),
    ReleasePoint(),
    *collect(1),
    *collect(2),
    *collect(3),
    Release((3, 4, 5), "second", "finish"),
]
