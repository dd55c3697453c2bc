"""Operations as values: what belongs to whom."""

from __future__ import annotations

from deepinfer.testing.oplog.operations import (
    Collected,
    Flush,
    Query,
    Record,
    ReleasePoint,
    Synchronize,
    seen,
    with_notes,
)


def test_notes_stay_with_the_operation_before_them() -> None:
    """Each operation of the engine comes with what its policy did up to the next one."""
    query, flush = Query("e1", False, "policy"), Flush("policy")
    log = list(enumerate([query, ReleasePoint(), query, flush, Flush(), Collected(1)]))
    assert list(with_notes(log)) == [
        (1, ReleasePoint(), [query, flush]),
        (4, Flush(), []),
        (5, Collected(1), []),
    ]


def test_what_the_host_saw() -> None:
    """A look has its answer, a wait means that the event has passed, the rest says nothing."""
    notes = [Query("e1", False), Synchronize("e2"), Record("copy", "e3"), Query("e1", True)]
    assert list(seen(notes)) == [("e1", False), ("e2", True), ("e1", True)]
