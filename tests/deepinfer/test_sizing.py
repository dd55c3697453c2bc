"""From memory readings to a number of blocks, every byte accounted for."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.errors import UserError
from deepinfer.sizing import Needs, Reading, num_state_slots, own_growth, size_pool

GIB = 2**30
# An 80 GiB card, nobody else on it. After loading 20 GiB and a step of 3 GiB at its peak, which
# torch has kept, and 1 GiB that a communication library took.
START = Reading(free=79 * GIB, own=1 * GIB, torch=0, torch_unused=0)
NOW = Reading(free=55 * GIB, own=25 * GIB, torch=23 * GIB, torch_unused=3 * GIB)
NEEDS = Needs(
    weights=20 * GIB,
    peak_activation=3 * GIB,
    num_slots=11,
    bytes_per_slot=GIB // 4,
    bytes_per_block=GIB // 8,
)


def test_the_waterfall():
    """Every line, in the order in which it is taken off."""
    sizing = size_pool(START, NOW, NEEDS)
    assert [(name, num_bytes / GIB) for name, num_bytes in sizing.lines] == [
        ("free at the start", 79),
        ("weights", -20),
        ("peak activation", -3),
        ("own growth beside torch", -1),
        ("taken by others since", 0),
        ("11 state slots", -2.75),
        ("state slots, once more", -2.75),
    ]
    assert sizing.bytes_for_blocks == 49.5 * GIB
    assert sizing.num_blocks == 396


def test_memory_beside_torch_is_counted():
    """vllm#2031: buffers of a communication library are not free, though torch knows of none."""
    counted = size_pool(START, NOW, NEEDS)
    missed = size_pool(START, replace(NOW, own=24 * GIB, free=56 * GIB), NEEDS)
    assert own_growth(START, NOW) == GIB
    assert missed.num_blocks - counted.num_blocks == 8


def test_the_pool_of_the_report_about_memory_beside_torch():
    """vllm#2031 in its own numbers: 31615 blocks of 1.25 MiB were granted, 20865 were there."""
    block = 80 * 2 * 16 * 2 * 128 * 2  # layers, K and V, positions, heads of a GPU, width, bytes
    beside = (31615 - 20865) * block
    free, weights, activation = 80 * GIB, 33 * GIB, 80 * GIB - 33 * GIB - 31615 * block
    start = Reading(free=free, own=0, torch=0, torch_unused=0)
    torch = weights + activation
    now = Reading(
        free=free - torch - beside, own=torch + beside, torch=torch, torch_unused=activation
    )
    needs = Needs(weights, activation, num_slots=0, bytes_per_slot=0, bytes_per_block=block)
    sizing = size_pool(start, now, needs)
    assert sizing.num_blocks == 20865
    assert dict(sizing.lines)["own growth beside torch"] == -beside
    blind = replace(now, own=torch, free=free - torch)  # had nobody told of it
    assert size_pool(start, blind, needs).num_blocks == 31615


def test_memory_this_process_gives_back_is_no_growth():
    """What it held beside torch before, and does not hold now, was never promised to blocks."""
    smaller = replace(NOW, own=NOW.own - 3 * GIB, free=NOW.free + 3 * GIB)
    assert own_growth(START, smaller) == 0
    assert (
        size_pool(START, smaller, NEEDS).bytes_for_blocks == 50.5 * GIB
    )  # only the growth is gone


def test_memory_of_others_at_the_start_is_not_ours():
    """vllm#19312: what others held before is not in what was free, and is not taken off again."""
    alone = size_pool(START, NOW, NEEDS)
    others = 10 * GIB
    crowded = size_pool(
        replace(START, free=START.free - others), replace(NOW, free=NOW.free - others), NEEDS
    )
    lines = dict(crowded.lines)
    assert lines["own growth beside torch"] == -GIB
    assert lines["taken by others since"] == 0
    assert alone.num_blocks - crowded.num_blocks == others // NEEDS.bytes_per_block


def test_others_that_come_later_reduce_what_is_granted():
    """I17: never above what is free now, and it is not called our own growth."""
    later = size_pool(START, replace(NOW, free=NOW.free - 10 * GIB), NEEDS)
    lines = dict(later.lines)
    assert lines["own growth beside torch"] == -GIB
    assert lines["taken by others since"] == -10 * GIB
    assert later.num_blocks == 396 - 80


def test_others_that_leave_give_nothing():
    """I17: never above what was free at the start."""
    assert size_pool(START, replace(NOW, free=NOW.free + 10 * GIB), NEEDS).num_blocks == 396


def test_memory_of_others_that_come_and_go_is_counted_once():
    """vllm#19312 both ways: 10 GiB that leave do not pay for 4 GiB of ours, nor ours for theirs."""
    left = size_pool(START, replace(NOW, own=29 * GIB, free=NOW.free - 4 * GIB + 10 * GIB), NEEDS)
    assert dict(left.lines)["own growth beside torch"] == -5 * GIB
    assert dict(left.lines)["taken by others since"] == 0
    assert left.num_blocks == 396 - 32
    came = size_pool(START, replace(NOW, own=29 * GIB, free=NOW.free - 4 * GIB - 10 * GIB), NEEDS)
    assert dict(came.lines)["own growth beside torch"] == -5 * GIB
    assert dict(came.lines)["taken by others since"] == -10 * GIB
    assert came.num_blocks == 396 - 32 - 80


def test_what_torch_keeps_unused_is_available():
    """Given back to torch is not lost, before loading and after the step; in use is."""
    kept = size_pool(START, replace(NOW, free=NOW.free + 3 * GIB, torch=20 * GIB, torch_unused=0,
                                    own=22 * GIB), NEEDS)  # fmt: skip
    assert kept == size_pool(START, NOW, NEEDS), "the cache given to the driver: the same"
    warm = replace(START, free=74 * GIB, own=6 * GIB, torch=5 * GIB, torch_unused=5 * GIB)
    assert size_pool(warm, NOW, NEEDS) == size_pool(START, NOW, NEEDS)
    leaked = size_pool(START, replace(NOW, torch_unused=1 * GIB), NEEDS)  # 2 GiB nobody explains
    assert dict(leaked.lines)["taken by others since"] == -2 * GIB


@pytest.mark.parametrize(("spare", "num_blocks"), [(-1, 9), (0, 10), (1, 10), (6, 10), (7, 11)])
def test_whole_blocks_only(spare, num_blocks):
    """What is exactly ten blocks makes ten, one byte less makes nine; block 0 is one of them."""
    start = Reading(free=100 + 70 + spare, own=0, torch=0, torch_unused=0)
    now = Reading(free=70 + spare, own=100, torch=100, torch_unused=0)
    needs = Needs(100, 0, num_slots=0, bytes_per_slot=0, bytes_per_block=7)
    sizing = size_pool(start, now, needs)
    assert (sizing.num_blocks, sizing.bytes_for_blocks) == (num_blocks, 70 + spare)


def test_slots_are_taken_off_twice_before_blocks():
    """One byte more of a slot costs two for each slot: the state, and its copies on their way."""
    plain = size_pool(START, NOW, NEEDS)
    larger = size_pool(START, NOW, replace(NEEDS, bytes_per_slot=NEEDS.bytes_per_slot + 1))
    assert plain.bytes_for_blocks - larger.bytes_for_blocks == 2 * NEEDS.num_slots


def test_a_model_without_state_reserves_none():
    """No slots, nothing twice."""
    sizing = size_pool(START, NOW, replace(NEEDS, num_slots=0, bytes_per_slot=0))
    assert sizing.bytes_for_blocks == 55 * GIB
    assert sizing.lines[-1][0] == "taken by others since"


def test_a_budget_instead_of_a_device():
    """On the CPU: a budget that was free, of which the weights are gone."""
    budget = Reading(free=100, own=0, torch=0, torch_unused=0)
    after = Reading(free=60, own=40, torch=40, torch_unused=0)
    needs = Needs(40, 10, num_slots=2, bytes_per_slot=5, bytes_per_block=7)
    assert size_pool(budget, after, needs).num_blocks == (100 - 40 - 10 - 20) // 7


@pytest.mark.parametrize(("left", "fits"), [(0, False), (13, False), (14, True), (-50, False)])
def test_too_little_memory_is_said_with_both_numbers(left, fits):
    """One block and block 0 must fit; the hint names what takes the most."""
    start = Reading(free=100 + left, own=0, torch=0, torch_unused=0)
    now = Reading(free=40 + left, own=60, torch=60, torch_unused=0)
    needs = Needs(60, 40, num_slots=0, bytes_per_slot=0, bytes_per_block=7)
    if fits:
        assert size_pool(start, now, needs).num_blocks == 2
        return
    with pytest.raises(UserError) as caught:
        size_pool(start, now, needs)
    assert f"{left} bytes are left for blocks, 14 are needed" in str(caught.value)
    assert "weights take 60" in str(caught.value.hint)


@given(
    st.integers(0, 2000), st.integers(0, 50), st.integers(0, 500), st.integers(0, 90),
    st.integers(0, 200), st.integers(-300, 300), st.integers(0, 9), st.integers(0, 30),
    st.integers(1, 40),
)  # fmt: skip
def test_what_is_granted_is_there(
    free, own, weights, activation, beside, others, slots, slot, block
):
    """Lines add up; blocks, both states and a step fit into what was free and what is free."""
    start = Reading(free=free, own=own, torch=own // 2, torch_unused=0)
    now = Reading(
        free=free - weights - activation - beside - others,
        own=own + weights + activation + beside,
        torch=own // 2 + weights + activation,
        torch_unused=activation,
    )
    needs = Needs(weights, activation, slots, slot, block)
    try:
        sizing = size_pool(start, now, needs)
    except UserError:
        return
    taken = sizing.num_blocks * block + 2 * slots * slot + activation
    assert taken + weights + beside <= start.available
    assert taken <= now.available
    assert sum(num_bytes for _, num_bytes in sizing.lines) == sizing.bytes_for_blocks
    assert 0 <= sizing.bytes_for_blocks - sizing.num_blocks * block < block


def test_the_number_of_state_slots_has_no_rounding_error():
    """floor(1.2 n) + 1, exactly, for every n to ten thousand."""
    for n in range(1, 10_001):
        assert num_state_slots(n) == Fraction(12, 10) * n // 1 + 1
    assert [num_state_slots(n) for n in (1, 4, 5, 6, 64, 256)] == [2, 5, 7, 8, 77, 308]
    with pytest.raises(UserError, match="max_num_seqs: 0"):
        num_state_slots(0)
