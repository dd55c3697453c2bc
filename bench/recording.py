"""Rounds of which the first measured one writes its operation log (`run --record`).

Knows how an engine of a round is made; neither the log's format nor what is measured. Invariant:
one file has one round; the engine of every other round has no recorder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.arrivals import RequestSpec
from bench.runner import Round, Target
from bench.spec import Resolved
from deepinfer.errors import UserError
from deepinfer.testing.oplog.recorder import OperationRecorder


@contextmanager
def recorded_rounds(path: Path | None) -> Iterator[Callable[..., Round]]:
    """What a `Matrix` makes its rounds with; plain ones without a path.

    A round 0 that is made again, as after an engine was tried or a GPU was throttled, begins the
    file again. Raises UserError if the file exists already or cannot be written.
    """
    if path is None:
        yield Round
        return
    if path.exists():
        raise UserError(f"{path}: exists already", hint="name a new file, or remove this one")
    recorders: list[OperationRecorder] = []

    def make(
        resolved: Resolved,
        target: Target,
        requests: Sequence[RequestSpec],
        *,
        index: int,
        **labels: Any,
    ) -> Round:
        engine = None
        if index == 0:
            while recorders:
                recorders.pop().close()
            recorders.append(OperationRecorder(path, resolved.engine))
            engine = target.engine(resolved, requests, observers=recorders)
        return Round(resolved, target, requests, index=index, engine=engine, **labels)

    try:
        yield make
    finally:
        for recorder in recorders:
            recorder.close()
