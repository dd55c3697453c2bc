"""Prompt lookup against a search one window at a time, and against transformers."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.drafters.ngram import NgramDrafter
from deepinfer.errors import UserError

HISTORIES = st.integers(1, 4).flatmap(lambda size: st.lists(st.integers(0, size), max_size=40))


def propose(history: list[int], num_drafts: int = 5, min_n: int = 1, max_n: int = 3) -> list[int]:
    """One proposal as a list."""
    token_ids = np.array(history, np.int32)
    token_ids.setflags(write=False)
    drafts = NgramDrafter(min_n, max_n).propose(0, token_ids, num_drafts)
    assert drafts.dtype == np.int32
    return drafts.tolist()


def slow(history: list[int], num_drafts: int, min_n: int, max_n: int) -> list[int]:
    """The definition: the longest suffix first, windows from the left, a token behind each."""
    for n in range(max_n, min_n - 1, -1):
        for start in range(len(history) - n):
            if history[start : start + n] == history[-n:]:
                return history[start + n :][:num_drafts]
    return []


@given(HISTORIES, st.integers(0, 6), st.integers(1, 6), st.integers(0, 3))
def test_equals_the_definition(history, num_drafts, min_n, more):
    """Every proposal is that of a search one window at a time."""
    expected = slow(history, num_drafts, min_n, min_n + more)
    assert propose(history, num_drafts, min_n, min_n + more) == expected


@pytest.mark.parametrize(
    ("history", "settings", "expected"),
    [
        ([1, 2, 3, 4, 1, 2, 3], {}, [4, 1, 2, 3]),
        ([9, 3, 5, 1, 3, 7, 1, 3], {}, [7, 1, 3]),  # two tokens beat the earlier one
        ([9, 3, 5, 1, 3, 7, 1, 3], {"max_n": 1}, [5, 1, 3, 7, 1]),
        ([1, 3, 5, 1, 3, 7, 1, 3], {}, [5, 1, 3, 7, 1]),  # of equals the earliest
        ([9, 3, 5, 2, 3], {"min_n": 2}, []),
        ([7, 7, 7, 7], {"max_n": 2}, [7, 7]),  # overlaps what is looked up
        ([1, 2, 3, 4], {}, []),
        ([1], {}, []),
        ([], {}, []),
    ],
)
def test_examples(history, settings, expected):
    """The longest suffix wins, then the earliest place; nothing known gives nothing."""
    assert propose(history, **settings) == expected


@pytest.mark.oracle
def test_equals_transformers():
    """Proposals are those of transformers' PromptLookupCandidateGenerator."""
    torch = pytest.importorskip("torch")
    generation = pytest.importorskip("transformers.generation.candidate_generator")
    rng = np.random.default_rng(0)
    for _ in range(300):
        history = rng.integers(0, rng.integers(2, 9), rng.integers(2, 60)).astype(np.int32)
        max_n = int(rng.integers(1, 5))
        lookup = generation.PromptLookupCandidateGenerator(
            num_output_tokens=5, max_matching_ngram_size=max_n, max_length=1000
        )
        candidates, _ = lookup.get_candidates(torch.from_numpy(history)[None])
        expected = candidates[0, len(history) :].tolist()
        assert propose(history.tolist(), 5, 1, max_n) == expected


def test_a_proposal_is_the_callers():
    """A proposal stays what it is when the history's array is written over."""
    history = np.array([1, 2, 3, 1], np.int32)
    drafts = NgramDrafter().propose(0, history, 2)
    history[:] = 0
    assert drafts.tolist() == [2, 3]


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
def test_a_long_history_is_cheap(vocab_size):
    """8192 tokens take well under a millisecond, whatever repeats in them."""
    history = np.random.default_rng(0).integers(0, vocab_size, 8192).astype(np.int32)
    drafter, times = NgramDrafter(max_n=5), []
    for _ in range(50):
        start = time.perf_counter()
        drafter.propose(0, history, 5)
        times.append(time.perf_counter() - start)
    assert min(times) < 500e-6
