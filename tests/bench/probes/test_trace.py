"""What is written is a trace: by the format's rules, and true to what happened."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from dataclasses import replace

import pytest

from bench.probes.trace import ENGINE, HOST, PHASES, nvtx_ranges, reuse_flows, trace_workload
from bench.probes.watched_engine import ALLOCATE, LIFT, RELEASE, WatchedBlocks
from deepinfer.errors import UserError
from deepinfer.release import Fence, ReleaseQueue
from tests.bench.tiny import tiny, workload

FORK = {"children": 3, "output_tokens": 6, "after_tokens": 1}
LATER = {"every_s": 0.01, "start_s": 0.02}
WORK = workload(
    {"count": 1, "prompt_tokens": 40, "output_tokens": 2, "fork": FORK},
    {"count": 12, "prompt_tokens": 30, "output_tokens": 8, "arrival": LATER},
)
SMALL = {"num_blocks": 49, "max_num_seqs": 8, "max_model_len": 128, "discipline": "lifo"}
REQUIRED = {
    "X": {"name", "cat", "pid", "tid", "ts", "dur", "args"},
    "C": {"name", "pid", "tid", "ts", "args"},
    "M": {"name", "pid", "tid", "ts", "args"},
    "s": {"name", "cat", "id", "pid", "tid", "ts", "args"},
    "t": {"name", "cat", "id", "pid", "tid", "ts", "args"},
    "f": {"name", "cat", "id", "pid", "tid", "ts", "args", "bp"},
}
ROUNDING_US = 1e-3


@pytest.fixture(scope="module", params=["step", "ordered"])
def trace(request):
    """A round in which blocks are withheld, or not, and used again."""
    return trace_workload(tiny(WORK, release=request.param, **SMALL))


def slices_of(events):
    """Slices by track, in the order of the file."""
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append(event)
    return tracks


def problems(events):
    """What the format forbids or Perfetto would drop."""
    found = []
    for event in events:
        if event.keys() - {"ph"} != REQUIRED.get(event["ph"]):
            found.append(f"keys of {event}")
        if event["ts"] < 0 or event.get("dur", 0) < 0:
            found.append(f"negative time in {event}")
    times = [event["ts"] for event in events if event["ph"] != "M"]
    if times != sorted(times):
        found.append("not sorted by time")
    for track in slices_of(events).values():
        open_ends = []
        for event in track:
            end = event["ts"] + event["dur"]
            while open_ends and open_ends[-1] <= event["ts"] + ROUNDING_US:
                open_ends.pop()
            if open_ends and end > open_ends[-1] + ROUNDING_US:
                found.append(f"{event['name']} does not nest")
            open_ends.append(end)
    return [*found, *flow_problems(events)]


def flow_problems(events):
    """Each flow: one start, then steps, one finish, every one inside a slice of its track."""
    found, flows, tracks = [], defaultdict(list), slices_of(events)
    for event in events:
        if event["ph"] in "stf":
            flows[event["id"]].append(event)
    for number, flow in flows.items():
        phases = "".join(event["ph"] for event in flow)
        if phases != "s" + "t" * (len(flow) - 2) + "f":
            found.append(f"flow {number} is {phases}")
        for event in flow:
            track = tracks[event["pid"], event["tid"]]
            if not any(s["ts"] <= event["ts"] <= s["ts"] + s["dur"] for s in track):
                found.append(f"flow {number} leads nowhere")
    return found


def test_the_file_is_a_trace(trace, tmp_path):
    """Required keys by phase, sorted, nested, flows matched, strict JSON."""
    path = tmp_path / "trace.json"
    trace.write(path)
    document = json.loads(path.read_text())
    assert problems(document["traceEvents"]) == []
    assert document["otherData"]["clock_error_us"] == 0
    assert document["otherData"]["wrong_requests"] == 0


@pytest.mark.parametrize("overlap", ["on", "2"])
def test_steps_planned_ahead_nest_too(overlap):
    """Two slices each, in the order of the host; every forward is its own step's."""
    ahead = trace_workload(tiny(WORK, overlap=overlap, release="step", **SMALL))
    assert problems(ahead.events) == []
    slices = [event for track in slices_of(ahead.events).values() for event in track]
    host = [event["name"] for event in slices if event["cat"] == "step"]
    numbers = range(1, ahead.num_steps + 1)
    for part in ("submit", "result"):
        named = [name for name in host if name.endswith(part)]
        assert named == [f"step {number}: {part}" for number in numbers]
    forwards = [e for e in slices if e["name"].startswith("forward step")]
    assert [e["name"] for e in forwards] == [f"forward step {e['args']['step']}" for e in forwards]
    assert "caller" not in {event["name"] for event in slices}


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        ({"ph": "X", "dur": 1e9}, "does not nest"),
        ({"ph": "f", "id": 10**9}, "flow"),
        ({"ph": "C", "ts": -1.0}, "negative time"),
    ],
)
def test_the_validation_can_fail(trace, damage, complaint):
    """A slice that ends too late, a flow without a start, a time before the first."""
    events = [dict(event) for event in trace.events]
    phase = [event for event in events if event["ph"] == damage["ph"]]
    phase[min(1, len(phase) - 1)].update(damage)
    assert any(complaint in problem for problem in problems(events))


def test_each_step_has_its_phases_and_its_forward(trace):
    """On the host's track, and on that of stream compute with sampling inside."""
    tracks = slices_of(trace.events)
    host = tracks[ENGINE, HOST]
    steps = [event for event in host if event["cat"] == "step"]
    assert [event["name"] for event in steps] == [f"step {i + 1}" for i in range(trace.num_steps)]
    phases = [event["name"] for event in host if event["cat"] == "phase"]
    assert phases == list(PHASES) * trace.num_steps
    names = {
        event["tid"]: event["args"]["name"]
        for event in trace.events
        if event["name"] == "thread_name" and event["pid"] == ENGINE
    }
    assert sorted(names.values()) == ["host", "stream compute", "stream copy"]
    compute = next(tid for tid, name in names.items() if name == "stream compute")
    operations = [e["name"] for e in tracks[ENGINE, compute] if e["cat"] == "operation"]
    assert operations == [f"forward step {i + 1}" for i in range(trace.num_steps)]
    parts = [e["name"] for e in tracks[ENGINE, compute] if e["cat"] == "part"]
    assert set(parts) == {"forward", "sampling"}
    assert any("copy_blocks" in event["name"] for track in tracks.values() for event in track)


def test_flows_lead_from_a_release_to_the_reuse_of_its_blocks(trace):
    """By way of a lift only where the policy withholds; the pool is too small without reuse."""
    pool = {
        event["ts"]: event
        for event in trace.events
        if event["ph"] == "X" and event["cat"] == "blocks"
    }
    flows = defaultdict(list)
    for event in trace.events:
        if event["ph"] in "stf":
            flows[event["id"]].append(event)
    assert len(flows) == trace.num_flows > 0
    ways = set()
    for flow in flows.values():
        stations = [pool[event["ts"]] for event in flow]
        for event, station in zip(flow, stations, strict=True):
            assert set(event["args"]["blocks"]) <= set(station["args"]["blocks"])
        ways.add(tuple(station["name"].split()[0].rstrip(",") for station in stations))
    withholds = trace.resolved.engine.release == "step"
    assert ways <= {("release", "allocate"), ("release", "lift", "allocate")}
    assert withholds or ways == {("release", "allocate")}


def test_a_withheld_block_goes_by_way_of_its_lift():
    """Blocks of one release that parted have a flow each; a block still owned has none."""
    blocks = WatchedBlocks(9, discipline="lifo")
    queue = ReleaseQueue(blocks, "step")
    first = blocks.allocate(4)
    blocks.pin(first[:1])
    queue.give_up(first, Fence(step=1))
    queue.collected(1)
    blocks.allocate(1)
    blocks.allocate(2)
    changes = blocks.changes
    assert [change.verb for change in changes] == [ALLOCATE, RELEASE, LIFT, ALLOCATE, ALLOCATE]
    assert (changes[1].withheld, changes[1].num_withheld, changes[2].num_withheld) == (True, 3, 0)
    flows = list(reuse_flows(changes))
    assert [(flow["id"], flow["ph"]) for flow in flows] == [(i, ph) for i in (1, 2) for ph in "stf"]
    assert [flow["ts"] for flow in flows[:3]] == [changes[i].start_ns for i in (1, 2, 3)]
    assert [flow["ts"] for flow in flows[3:]] == [changes[i].start_ns for i in (1, 2, 4)]
    assert [len(flow["args"]["blocks"]) for flow in flows] == [1, 1, 1, 2, 2, 2]
    assert int(first[0]) not in [block for flow in flows for block in flow["args"]["blocks"]]


def test_counters_account_for_the_pool(trace):
    """Free, held and withheld blocks are all but block 0 at any time."""
    counters = [e["args"] for e in trace.events if e["ph"] == "C" and e["name"] == "blocks"]
    assert {sum(values.values()) for values in counters} == {SMALL["num_blocks"] - 1}
    assert counters[-1] == {"free": SMALL["num_blocks"] - 1, "held": 0, "withheld": 0}
    requests = [e["args"] for e in trace.events if e["ph"] == "C" and e["name"] == "requests"]
    assert len(requests) == trace.num_steps
    assert max(values["running"] for values in requests) > 1


def test_a_file_that_cannot_be_written_is_one_line(trace, tmp_path):
    """Naming the path."""
    with pytest.raises(UserError, match=f"{tmp_path}: is a folder"):
        trace.write(tmp_path)


def test_nvtx_is_an_extra(monkeypatch):
    """Without the package the flag names the extra; other runs never load it."""
    monkeypatch.setitem(sys.modules, "nvtx", None)
    with pytest.raises(UserError, match="--nvtx") as refused:
        nvtx_ranges()
    assert "deepinfer-bench[nvtx]" in refused.value.hint


@pytest.mark.cuda
def test_on_cuda_the_clocks_are_aligned():
    """The error is known and small, and the file is still a trace."""
    trace = trace_workload(replace(tiny(WORK, release="step", **SMALL), device="cuda"))
    assert 0 < trace.clock_error_us < 1000
    assert problems(trace.events) == []
