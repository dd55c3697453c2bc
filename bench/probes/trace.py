"""One watched round as Chrome trace events, for Perfetto or chrome://tracing.

    pid 1, host and device      host | stream compute | stream copy | ...   slices
    pid 2, blocks               changes of the pool                         slices, flows
    counters                    blocks free, held, withheld; requests running, waiting

Each step is a slice of the host's track with its phases inside. A flow leads from the release of
blocks, by way of the lift of their fence if they were withheld, to their next allocation. Times are
microseconds since the first step. Format: "Trace Event Format" (Chrome), JSON object form.

Knows the watched engine's notes; draws nothing. Invariant: slices of a track nest, every flow has
one start and one finish in that order, and events are sorted by time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from bench.probes.watch import WAIT, Annotate, Span, no_annotation
from bench.probes.watched_engine import (
    ALLOCATE,
    LIFT,
    RELEASE,
    PoolChange,
    Watched,
    WatchedStep,
    draw_requests,
    nothing_ran,
    num_wrong,
    run_plain,
    run_watched,
)
from bench.report.files import write_file
from bench.runner import Target
from bench.spec import Resolved
from deepinfer.errors import UserError

Event = dict[str, Any]

PHASES = ("schedule", "submit", "release", "caller", "result wait", "collect", "commit")
ENGINE, POOL = 1, 2  # processes of the picture
HOST = 1  # the host's track; streams follow
POOL_TRACK = 1


@dataclass(frozen=True, slots=True)
class Trace:
    """A round's events, and what a reader must know of them.

    Attributes:
        events: trace events, ready for JSON.
        num_steps, num_flows: in it.
        clock_error_us, drift_us: of device times against the host's clock.
        num_wrong: requests with wrong tokens.
    """

    events: list[Event]
    num_steps: int
    num_flows: int
    clock_error_us: float
    drift_us: float
    num_wrong: int
    resolved: Resolved

    def write(self, path: Path) -> None:
        """Write the JSON file. Raises UserError if that cannot be done."""
        document = {
            "traceEvents": self.events,
            "displayTimeUnit": "ms",
            "otherData": {
                "workload": self.resolved.workload.name,
                "profile": self.resolved.profile_name,
                "device": self.resolved.device,
                "release": self.resolved.engine.release,
                "config_hash": self.resolved.config_hash,
                "clock_error_us": self.clock_error_us,
                "clock_drift_us": self.drift_us,
                "wrong_requests": self.num_wrong,
            },
        }
        write_file(path, f"{json.dumps(document, allow_nan=False)}\n".encode())


def trace_workload(
    resolved: Resolved,
    *,
    nvtx: bool = False,
    on_probe: Callable[[str], None] = lambda name: None,
) -> Trace:
    """Run the workload once to warm up and once watched.

    With `nvtx` each submit to a stream is a range for NVIDIA's tools (Nsight Systems), too. Raises
    UserError if the package for it is missing.
    """
    annotate = nvtx_ranges() if nvtx else no_annotation
    target = Target(resolved)
    try:
        on_probe("warm-up")
        run_plain(resolved, target, draw_requests(resolved, -1))
        on_probe("trace")
        watched = run_watched(resolved, target, draw_requests(resolved), annotate)
        if not watched.steps:
            raise nothing_ran(resolved)
        wrong = num_wrong(resolved, target, watched.result)
    finally:
        target.close()
    events = trace_events(watched)
    return Trace(
        events=events,
        num_steps=len(watched.steps),
        num_flows=sum(event["ph"] == "s" for event in events),
        clock_error_us=watched.device.clock_error_ns / 1e3,
        drift_us=watched.device.drift_ns / 1e3,
        num_wrong=wrong,
        resolved=resolved,
    )


def nvtx_ranges() -> Annotate:
    """Ranges of the package `nvtx`, in a domain of our own."""
    try:
        nvtx = import_module("nvtx")
    except ImportError as error:
        raise UserError(
            "--nvtx: the package nvtx is not installed", hint="pip install 'deepinfer-bench[nvtx]'"
        ) from error

    def range_of(name: str) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = nvtx.annotate(message=name, domain="deepinfer")
        return context

    return range_of


def trace_events(watched: Watched) -> list[Event]:
    """The events of a round, sorted by time. Places its operations: call it once."""
    origin_ns = watched.steps[0].stats.start_ns
    events = [
        *(event for step in watched.steps for event in _host_slices(step, ahead=watched.ahead)),
        *_stream_slices(watched),
        *_pool_slices(watched.changes),
        *reuse_flows(watched.changes),
        *_counters(watched),
    ]
    for event in events:
        event["ts"] = (event["ts"] - origin_ns) / 1e3
        if "dur" in event:
            event["dur"] /= 1e3
    # Of slices that begin together the longest encloses the others.
    events.sort(key=lambda event: (event["ts"], -event.get("dur", 0.0)))
    return [*_names(watched), *events]


# -- tracks --------------------------------------------------------------------------------------


def _streams(watched: Watched) -> dict[str, int]:
    """Track of each stream, in the order of the alphabet: compute, copy, ..."""
    names = {operation.stream for step in watched.steps for operation in step.operations}
    return {name: HOST + 1 + i for i, name in enumerate(sorted(names))}


def _names(watched: Watched) -> Iterator[Event]:
    def name(kind: str, pid: int, tid: int, text: str) -> Event:
        return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": {"name": text}}

    yield name("process_name", ENGINE, HOST, "host and device")
    yield name("process_name", POOL, POOL_TRACK, "blocks")
    yield name("thread_name", ENGINE, HOST, "host")
    yield name("thread_name", POOL, POOL_TRACK, "changes")
    for stream, track in _streams(watched).items():
        yield name("thread_name", ENGINE, track, f"stream {stream}")


def _slice(span: Span, tid: int, *, pid: int = ENGINE, cat: str, **args: Any) -> Event:
    return {
        "ph": "X",
        "name": span.name,
        "cat": cat,
        "pid": pid,
        "tid": tid,
        "ts": span.start_ns,
        "dur": span.end_ns - span.start_ns,
        "args": args,
    }


def _host_slices(step: WatchedStep, *, ahead: bool) -> Iterator[Event]:
    """The step, its phases, and inside these the uploads and waits.

    Where others are planned meanwhile a step has two slices: until it is queued, and its result.
    """
    stats, moments = step.stats, step.stats.moments
    name, phases = f"step {stats.step}", list(zip(PHASES, moments[:-1], moments[1:], strict=True))
    wholes = [Span(name, moments.started, moments.committed)]
    if ahead:
        wholes = [
            Span(f"{name}: submit", moments.started, moments.released),
            Span(f"{name}: result", moments.collecting, moments.committed),
        ]
        phases = [phase for phase in phases if phase[0] != "caller"]
    for whole in wholes:
        yield _slice(
            whole,
            HOST,
            cat="step",
            num_tokens=stats.num_tokens,
            num_seqs=stats.num_seqs,
            num_copies=stats.num_copies,
        )
    for name, start_ns, end_ns in phases:
        yield _slice(Span(name, start_ns, end_ns), HOST, cat="phase", step=stats.step)
    for wait in step.host_waits:
        if not moments.collecting <= wait.start_ns < moments.arrived:  # that one is a phase
            yield _slice(Span("policy wait", *wait[1:]), HOST, cat=WAIT, step=stats.step)
    for operation in step.operations:
        for upload in operation.uploads:
            inside_wait = any(
                w.start_ns <= upload.span.start_ns < w.end_ns for w in step.host_waits
            )
            if not upload.by_device and not inside_wait:
                yield _slice(upload.span, HOST, cat="upload", num_bytes=upload.num_bytes)


def _stream_slices(watched: Watched) -> Iterator[Event]:
    """Operations and waits of the streams; parts of an operation stand inside it.

    A stream runs one thing after the other: where the clocks' error makes two overlap, the later
    one is cut, so that the track nests.
    """
    streams = _streams(watched)
    reached = dict.fromkeys(streams, 0)
    for step in watched.steps:
        for operation in step.operations:
            placed, name = watched.device.place(operation), operation.stream
            first_ns = reached[name]
            spans = [_not_before(span, first_ns) for span in placed]
            reached[name] = spans[-1].end_ns
            whole = Span(operation.label, spans[0].start_ns, spans[-1].end_ns)
            cat = WAIT if operation.label == WAIT else "operation"
            yield _slice(whole, streams[name], cat=cat, step=step.stats.step)
            if len(spans) > 1:
                for span in (spans[0]._replace(name="forward"), *spans[1:]):
                    yield _slice(span, streams[name], cat="part", step=step.stats.step)


def _not_before(span: Span, first_ns: int) -> Span:
    start_ns = max(span.start_ns, first_ns)
    return Span(span.name, start_ns, max(span.end_ns, start_ns))


# -- blocks --------------------------------------------------------------------------------------


def _pool_slices(changes: Sequence[PoolChange]) -> Iterator[Event]:
    for change in changes:
        verb = f"{change.verb}, withheld" if change.withheld and change.verb == RELEASE else ""
        name = f"{verb or change.verb} {len(change.block_ids)}"
        span = Span(name, change.start_ns, change.end_ns)
        yield _slice(span, POOL_TRACK, pid=POOL, cat="blocks", blocks=list(change.block_ids))


def reuse_flows(changes: Sequence[PoolChange]) -> Iterator[Event]:
    """From each release to each allocation that got some of its blocks, one flow per way taken."""
    on_the_way: dict[int, list[PoolChange]] = {}  # block -> its release, and its lift
    number = 0
    for change in changes:
        if change.verb == RELEASE:
            on_the_way |= {block_id: [change] for block_id in change.block_ids}
        elif change.verb == LIFT:
            for block_id in change.block_ids:
                on_the_way.setdefault(block_id, []).append(change)
        elif change.verb == ALLOCATE:
            ways: dict[tuple[int, ...], tuple[list[PoolChange], list[int]]] = {}
            for block_id in change.block_ids:
                way = on_the_way.pop(block_id, [])
                if way:
                    ways.setdefault(tuple(map(id, way)), (way, []))[1].append(block_id)
            for way, block_ids in ways.values():
                number += 1
                yield from _flow(number, [*way, change], block_ids)


def _flow(number: int, stations: Sequence[PoolChange], block_ids: list[int]) -> Iterator[Event]:
    for index, station in enumerate(stations):
        last = index == len(stations) - 1
        event: Event = {
            "ph": "f" if last else "t" if index else "s",
            "name": "reuse",
            "cat": "reuse",
            "id": number,
            "pid": POOL,
            "tid": POOL_TRACK,
            "ts": station.start_ns,
            "args": {"blocks": block_ids},
        }
        yield {**event, "bp": "e"} if last else event


def _counters(watched: Watched) -> Iterator[Event]:
    for change in watched.changes:
        blocks = {
            "free": change.num_free,
            "held": change.num_held,
            "withheld": change.num_withheld,
        }
        yield _counter("blocks", POOL, change.end_ns, blocks)
    for step in watched.steps:
        stats = step.stats
        requests = {"running": stats.num_running, "waiting": stats.num_waiting}
        yield _counter("requests", ENGINE, stats.moments.submitted, requests)


def _counter(name: str, pid: int, time_ns: int, values: dict[str, int]) -> Event:
    return {"ph": "C", "name": name, "pid": pid, "tid": 0, "ts": time_ns, "args": values}
