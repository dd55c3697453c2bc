"""Prompt lookup against a search one window at a time, and against transformers."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.device.cpu import SteppedCpuDevice
from deepinfer.drafters.base import Asked
from deepinfer.drafters.ngram import NgramDrafter
from deepinfer.errors import UserError
from tests.deepinfer.drafters.batches import ask

HISTORIES = st.integers(0, 4).flatmap(
    lambda size: st.lists(st.integers(0, size), min_size=1, max_size=40)
)
BATCHES = st.lists(st.tuples(HISTORIES, st.integers(0, 6)), min_size=1, max_size=5)
NS = st.tuples(st.integers(1, 6), st.integers(0, 3)).map(lambda ns: (ns[0], sum(ns)))


def propose(history: list[int], num_drafts: int = 5, min_n: int = 1, max_n: int = 3) -> list[int]:
    """The proposal for one request."""
    (drafts,) = ask(NgramDrafter(min_n, max_n), [history], [num_drafts])
    return drafts


def slow(history: list[int], num_drafts: int, min_n: int, max_n: int) -> list[int]:
    """The definition: the longest suffix first, windows from the left, a token behind each."""
    for n in range(max_n, min_n - 1, -1):
        for start in range(len(history) - n):
            if history[start : start + n] == history[-n:]:
                return history[start + n :][:num_drafts]
    return []


@given(BATCHES, NS, st.integers(0, 4), st.integers(0, 9))
def test_equals_the_definition(batch, ns, more_drafts, more_columns):
    """Each request of a batch gets what a search one window at a time gives for it alone."""
    histories, room = zip(*batch, strict=True)
    drafts = ask(
        NgramDrafter(*ns),
        histories,
        room,
        num_drafts=max(1, *room) + more_drafts,
        longest=max(map(len, histories)) + more_columns,
    )
    assert drafts == [slow(history, most, *ns) for history, most in batch]


@given(BATCHES, st.randoms(use_true_random=False))
def test_a_batch_is_its_requests_alone(batch, random):
    """Nothing depends on who else is asked for, in which order, or in which slot."""
    histories, room = zip(*batch, strict=True)
    slots = random.sample(range(2 * len(batch)), len(batch))
    together = ask(NgramDrafter(), histories, room, slots=slots)
    assert together == [propose(history, most) for history, most in batch]


@pytest.mark.parametrize(
    ("history", "settings", "expected"),
    [
        ([1, 2, 3, 4, 1, 2, 3], {}, [4, 1, 2, 3]),
        ([9, 3, 5, 1, 3, 7, 1, 3], {}, [7, 1, 3]),  # two tokens beat the earlier one
        ([9, 3, 5, 1, 3, 7, 1, 3], {"max_n": 1}, [5, 1, 3, 7, 1]),
        ([1, 3, 5, 1, 3, 7, 1, 3], {}, [5, 1, 3, 7, 1]),  # of equals the earliest
        ([9, 3, 5, 2, 3], {"min_n": 2}, []),
        ([7, 7, 7, 7], {"max_n": 2}, [7, 7]),  # overlaps what is looked up
        ([7, 7], {"max_n": 2}, [7]),
        ([1, 2, 3, 4], {}, []),
        ([1], {}, []),
    ],
)
def test_examples(history, settings, expected):
    """The longest suffix wins, then the earliest place; nothing known gives nothing."""
    assert propose(history, **settings) == expected


@pytest.mark.parametrize("size", [255, 256, 257, 300])
def test_a_suffix_may_be_very_long(size):
    """Hundreds of equal tokens count as more than one, and an earlier one does not win."""
    phrase = list(range(size))
    history = [size - 1, 5, *phrase, 6, *phrase]
    assert propose(history, 2, 1, size) == [6, 0]
    assert propose(history, 2, size, 400) == [6, 0]
    assert propose(history, 2, size + 1, 400) == []
    assert propose(history, 2, 1, 1) == [5, 0]


@pytest.mark.oracle
def test_equals_transformers():
    """Proposals are those of transformers' PromptLookupCandidateGenerator."""
    generation = pytest.importorskip("transformers.generation.candidate_generator")
    rng = np.random.default_rng(0)
    for _ in range(60):
        max_n = int(rng.integers(1, 5))
        lookup = generation.PromptLookupCandidateGenerator(
            num_output_tokens=5, max_matching_ngram_size=max_n, max_length=1000
        )
        histories = [
            rng.integers(0, rng.integers(2, 9), rng.integers(2, 60)).tolist() for _ in range(5)
        ]
        expected = [
            lookup.get_candidates(torch.tensor([history]))[0][0, len(history) :].tolist()
            for history in histories
        ]
        assert ask(NgramDrafter(1, max_n), histories, [5] * 5) == expected


@given(HISTORIES, st.lists(st.integers(0, 4), min_size=1, max_size=20))
def test_nothing_behind_a_length_is_looked_at(history, behind):
    """Tokens that are not the request's, of any value, change nothing."""
    tokens = torch.tensor([history + behind], dtype=torch.int32)
    asked = Asked(
        slots=torch.tensor([0]),
        tokens=tokens,
        lengths=torch.tensor([len(history)]),
        room=torch.tensor([5]),
        state_ids=torch.empty(0, dtype=torch.int64),
        num_drafts=5,
        longest=tokens.shape[1],
    )
    token_ids, counts = NgramDrafter().propose(asked)
    assert token_ids[0, : counts[0]].tolist() == slow(history, 5, 1, 3)
    assert set(token_ids[0].tolist()) <= set(history)


def test_a_proposal_is_the_callers():
    """A proposal stays what it is when the histories are written over."""
    tokens = torch.tensor([[1, 2, 3, 1]], dtype=torch.int32)
    one = torch.tensor([0])
    drafts = NgramDrafter().propose(Asked(one, tokens, one + 4, one + 2, one[:0], 2, 4))
    tokens.zero_()
    assert drafts.token_ids.tolist() == [[2, 3]]


def test_nothing_is_kept():
    """`prepare` and `start` change nothing: a slot's last owner is not remembered."""
    device, drafter = SteppedCpuDevice(), NgramDrafter()
    drafter.prepare(device, 1, 8)
    drafter.start(0, "a", 4)
    assert ask(drafter, [[1, 2, 3, 1]], [5]) == [[2, 3, 1]]
    drafter.start(0, "b", 2)
    assert ask(drafter, [[4, 1]], [5]) == [[]]
    device.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_n": 0}, "min_n: 0; at least 1"),
        ({"max_n": 0}, "max_n: 0; at least 1"),
        ({"min_n": 4, "max_n": 3}, "min_n: 4 is more than max_n 3"),
        ({"max_n": 2.5}, "max_n: 2.5; expected an integer"),
    ],
)
def test_settings_are_checked(settings, message):
    """Bounds that allow no length are refused, by name."""
    with pytest.raises(UserError) as error:
        NgramDrafter(**settings)
    assert str(error.value) == message


@pytest.mark.parametrize("vocab_size", [1, 2, 50, 100_000])
def test_long_histories_are_cheap(vocab_size):
    """Sixteen times 1000 tokens take well under a millisecond, whatever repeats in them."""
    tokens = torch.from_numpy(
        np.random.default_rng(0).integers(0, vocab_size, (16, 1000), np.int32)
    )
    asked = Asked(
        slots=torch.arange(16),
        tokens=tokens,
        lengths=torch.full((16,), 1000),
        room=torch.full((16,), 5),
        state_ids=torch.empty(0, dtype=torch.int64),
        num_drafts=5,
        longest=1000,
    )
    drafter, times = NgramDrafter(max_n=5), []
    for _ in range(50):
        start = time.perf_counter()
        drafter.propose(asked)
        times.append(time.perf_counter() - start)
    assert min(times) < 700e-6


def test_no_value_is_asked_of_the_device():
    """All is computed from shapes: tensors without values do, so on CUDA the host never waits."""
    with torch.device("meta"):
        tokens, of_each = torch.empty(9, 200, dtype=torch.int32), torch.empty(8, dtype=torch.int64)
        asked = Asked(of_each, tokens, of_each, of_each, of_each[:0], 5, 176)
    assert NgramDrafter().propose(asked).token_ids.shape == (8, 5)


@pytest.mark.cuda
def test_the_host_does_not_wait_on_cuda():
    """A proposal on a GPU asks nothing of it, and is that of the CPU."""
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, 4, (9, 200), np.int32))
    parts = (torch.arange(8), tokens, torch.arange(8) * 25 + 1, torch.arange(8) % 6)
    here = NgramDrafter().propose(Asked(*parts, torch.arange(0), 5, 176))
    asked = Asked(*(part.cuda() for part in parts), torch.arange(0).cuda(), 5, 176)
    torch.cuda.set_sync_debug_mode("error")
    try:
        there = NgramDrafter().propose(asked)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert there.counts.tolist() == here.counts.tolist()
    assert there.token_ids.tolist() == here.token_ids.tolist()
