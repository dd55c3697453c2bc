"""Host-only replay: the cells of `replay-cells.json` exactly, and any small trace as by hand."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.prefix_replay import ReplaySetup, replay, unlimited_hit_rate
from bench.traces import TraceRequest, read_trace

TRACE = Path(__file__).resolve().parents[3] / "shared/traces/mooncake_fast25_conversation.jsonl"
DATA = Path(__file__).resolve().parents[1] / "data"
CELLS = json.loads((DATA / "replay-cells.json").read_text())["cells"]
ORDERS = ("forward", "reverse", "by_id", "reverse_unhashed_first", "reverse_unhashed_head")
# Half a minute for all of them; else one of each block size, pool size, hold and order.
ALL_CELLS = os.environ.get("DEEPINFER_ALL_REPLAY_CELLS") == "1"
SOME = (
    *((512, 128, "timed", "reverse"), (512, 2000, 1, "forward")),
    *((512, 2000, "timed", "reverse_unhashed_head"), (128, 2000, 1, "reverse_unhashed_head")),
)


def key_of(cell):
    return cell["block_size"], cell["pool_512"], cell["window"], cell["order"]


def setup_of(cell):
    return ReplaySetup(cell["order"], cell["block_size"], cell["pool_512"], cell["window"])


@pytest.fixture(scope="module")
def conversation():
    """The whole public trace."""
    return read_trace("mooncake", TRACE)


@pytest.mark.traces
@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(c, id="-".join(map(str, key_of(c))))
        for c in CELLS
        if ALL_CELLS or key_of(c) in SOME
    ],
)
def test_every_counter_and_digest_of_a_cell(conversation, cell):
    """Integers, rates and the digest over every table, at full length."""
    result = replay(conversation, setup_of(cell))
    about = {"trace", "block_size", "pool_512", "pool_blocks", "window", "order"}
    assert setup_of(cell).num_blocks == cell["pool_blocks"]
    assert {k: getattr(result, k) for k in cell.keys() - about} == {
        k: cell[k] for k in cell.keys() - about
    }
    parts = result.evicted_head, result.evicted_middle, result.evicted_tail
    assert sum(parts) == result.evictions


@pytest.mark.traces
def test_a_cache_without_limit_hits_what_the_trace_allows(conversation):
    """105,592 of the 276,491 full blocks of 512 tokens."""
    assert unlimited_hit_rate(conversation, 512) == 105_592 / 276_491


# -- small traces --------------------------------------------------------------------------------


class ByHand:
    """The rules once more, with lists and dictionaries; see docs/prefix-reuse.md."""

    def __init__(self, setup):
        self.setup = setup
        self.free = list(range(1, setup.num_blocks))
        self.owners, self.key, self.block = {}, {}, {}
        self.held = []  # (finish, index, table)
        self.clock = 0
        self.lines, self.later, self.evictions, self.hits = [], 0, 0, 0

    def serve(self, index, request):
        size, setup = self.setup.block_size, self.setup
        need = -(-(request.num_prompt + request.num_output) // size)
        if need > setup.num_blocks - 1:
            self.lines.append(f"{index} NEVER")
            return
        if setup.hold == "timed":
            self.clock = max(self.clock, round(1000 * request.arrival_s))
            self.release_finished()
        elif len(self.held) == setup.hold:
            self.release(self.held.pop(0)[2])
        full, per = request.num_prompt // size, 512 // size
        keys = [(request.hash_ids[k // per], k % per) for k in range(full)]
        table = []
        for key in keys[: (request.num_prompt - 1) // size]:
            if key not in self.block:
                break
            table.append(self.block[key])
        num_hits, verdicts, evictions = len(table), 0, 0
        while len(self.free) - sum(b in self.free for b in table) < need - num_hits:
            verdicts += 1
            if setup.hold == "timed":
                self.clock = min(self.held)[0]
                self.release_finished()
            else:
                self.release(self.held.pop(0)[2])
        for block in table:
            if block in self.free:
                self.free.remove(block)
            self.owners[block] = self.owners.get(block, 0) + 1
        for i in range(num_hits, need):
            block = self.free.pop(0)
            if block in self.key:
                evictions += 1
                del self.block[self.key.pop(block)]
            self.owners[block] = 1
            if i < full and keys[i] not in self.block:
                self.key[block], self.block[keys[i]] = keys[i], block
            table.append(block)
        duration = 50 + request.num_prompt // 8 + 25 * request.num_output
        self.held.append((self.clock + duration, index, table))
        self.later, self.hits = self.later + verdicts, self.hits + num_hits
        self.evictions += evictions
        ids = ",".join(map(str, table))
        self.lines.append(f"{index} OK {num_hits} {verdicts} {evictions} {ids}")

    def release_finished(self):
        for entry in sorted(entry for entry in self.held if entry[0] <= self.clock):
            self.held.remove(entry)
            self.release(entry[2])

    def release(self, table):
        order = self.setup.free_order
        visit = {"forward": table, "by_id": sorted(table)}.get(order, table[::-1])
        if order == "reverse_unhashed_first":
            visit = [b for b in visit if b not in self.key] + [b for b in visit if b in self.key]
        for block in visit:
            self.owners[block] -= 1
            if not self.owners[block]:
                to_head = order == "reverse_unhashed_head" and block not in self.key
                self.free.insert(0 if to_head else len(self.free), block)

    def digest(self):
        return hashlib.sha256("".join(line + "\n" for line in self.lines).encode()).hexdigest()


def small_request(draw, arrival_s):
    """A prompt along one of a few branches, with exact multiples of a block among the lengths."""
    num_prompt = draw(st.sampled_from([1, 127, 128, 300, 512, 513, 900, 1024, 1536, 2000]))
    branch = draw(st.integers(0, 2))
    ids = tuple(k if k == 0 else 10 * branch + k for k in range(-(-num_prompt // 512)))
    return TraceRequest(arrival_s, num_prompt, draw(st.integers(1, 700)), ids)


@settings(max_examples=250, deadline=None)
@given(data=st.data())
def test_any_small_trace_as_by_hand(data):
    """All orders, block sizes and holds; small pools, so that everything is evicted and waits."""
    arrivals = sorted(data.draw(st.lists(st.integers(0, 30_000), min_size=1, max_size=25)))
    requests = [small_request(data.draw, ms / 1000) for ms in arrivals]
    setup = ReplaySetup(
        free_order=data.draw(st.sampled_from(ORDERS)),
        block_size=data.draw(st.sampled_from([512, 256, 128])),
        num_chunks=data.draw(st.integers(2, 14)),
        hold=data.draw(st.sampled_from([1, 2, 5, "timed"])),
    )
    by_hand = ByHand(setup)
    for index, request in enumerate(requests):
        by_hand.serve(index, request)
    result = replay(requests, setup)
    assert result.digest == by_hand.digest()
    assert result.later_verdicts == by_hand.later
    assert (result.hit_blocks, result.evictions) == (by_hand.hits, by_hand.evictions)
    assert result.withheld_peak == 0


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_release_in_flight_withholds_and_loses_nothing(data):
    """Every request is admitted as without fences, the pool is whole in the end."""
    requests = [small_request(data.draw, float(i)) for i in range(data.draw(st.integers(1, 20)))]
    setups = [
        ReplaySetup(
            "never_hit_first", 128, 6, hold=data.draw(st.sampled_from([1, 3, "timed"])), in_flight=n
        )
        for n in (0, data.draw(st.integers(1, 4)))
    ]
    at_once, fenced = (replay(requests, setup) for setup in setups)
    assert (fenced.admitted, fenced.never) == (at_once.admitted, at_once.never)
    assert fenced.prompt_tokens == at_once.prompt_tokens


def request(*hash_ids, tokens=None, output=1, at=0.0):
    return TraceRequest(at, tokens or 512 * len(hash_ids), output, hash_ids)


def test_the_last_prompt_block_is_computed_even_if_it_is_cached():
    """vllm#11186: a prompt of 2 whole blocks hits one, with one more token two."""
    setup = ReplaySetup(num_chunks=20, hold=1)
    assert replay([request(1, 2), request(1, 2)], setup).hit_blocks == 1
    assert replay([request(1, 2), request(1, 2, 3, tokens=1025)], setup).hit_blocks == 2
    assert replay([request(1, tokens=1), request(1, tokens=1)], setup).hit_blocks == 0


def test_a_hit_may_be_withheld():
    """The table before is behind a fence, and its blocks are found nevertheless."""
    setup = ReplaySetup(num_chunks=20, hold=1, in_flight=1)
    result = replay([request(1, 2, 3), request(1, 2, 4), request(1, 2, 5)], setup)
    assert result.hit_blocks == 4
    assert result.withheld_peak == 4  # of the first request; the second's hits are not


def test_reuse_distance_and_runs():
    """Five usable blocks, two per request: a block is back after three or four others."""
    setup = ReplaySetup("forward", num_chunks=6, hold=1)
    result = replay([request(i) for i in range(1, 6)], setup)
    assert result.reuse_distance == 3  # tables 1 2 | 3 4 | 5 1 | 2 3 | 4 5: 3, 4, 3, 4, 3
    assert result.mean_run == 10 / 6
    assert result.new_blocks == 10


def test_nothing_admitted_leaves_rates_undefined():
    """A pool that none fits into has no hit rate, which is not 0."""
    result = replay([request(1, 2, 3)], ReplaySetup(num_chunks=2))
    assert (result.never, result.admitted) == (1, 0)
    assert result.hit_rate is result.token_hit_rate is result.mean_run is None
    assert result.reuse_distance is None
