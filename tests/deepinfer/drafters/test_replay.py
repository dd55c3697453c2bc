"""Replayed drafts: right as often as asked, wrong by another token, the same in every run."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.drafters.acceptance import Acceptance, parse_acceptance
from deepinfer.drafters.replay import ReplayDrafter
from deepinfer.errors import UnknownRequestError, UserError
from deepinfer.plan import Int32

VOCAB = 100
LENGTH = 400
NUM_DRAFTS = 5


def reference(seed: int = 0, length: int = LENGTH) -> Int32:
    return np.random.default_rng(seed).integers(0, VOCAB, length).astype(np.int32)


def replay(acceptance: object, *, seed: int = 0, num_requests: int = 1) -> ReplayDrafter:
    """A drafter for requests r0, r1, ..., each started in the row of its number."""
    references = {f"r{i}": reference(i) for i in range(num_requests)}
    drafter = ReplayDrafter(references, parse_acceptance(acceptance), seed, VOCAB)
    for i in range(num_requests):
        drafter.start(i, f"r{i}", 10)
    return drafter


def rights(drafter: ReplayDrafter, row: int, num_proposals: int) -> np.ndarray:
    """Whether each draft is the true token: bool [num_proposals, NUM_DRAFTS], at advancing ends."""
    true = reference(row)
    found = np.zeros((num_proposals, NUM_DRAFTS), bool)
    for number in range(num_proposals):
        length = 10 + number % (LENGTH - NUM_DRAFTS - 10)
        drafts = drafter.propose(row, true[:length], NUM_DRAFTS)
        found[number] = drafts == true[length : length + NUM_DRAFTS]
    return found


def within(successes: int, trials: int, probability: float) -> bool:
    """Whether a binomial count is within 4.5 standard deviations: 7 in a million are not."""
    deviation = math.sqrt(trials * probability * (1 - probability))
    return abs(successes - trials * probability) <= 4.5 * deviation


@pytest.mark.parametrize("acceptance", [0.3, 0.7, [0.9, 0.9, 0.1], [0.0, 1.0, 0.5]])
def test_each_position_is_right_as_often_as_asked(acceptance: object) -> None:
    """Over 8,000 proposals the true tokens at each position are within binomial bounds."""
    drafter = replay(acceptance, num_requests=4)
    found = np.concatenate([rights(drafter, row, 2000) for row in range(4)])
    schedule = parse_acceptance(acceptance)
    for k in range(NUM_DRAFTS):
        assert within(int(found[:, k].sum()), len(found), schedule.probability(0, k))


def test_positions_and_proposals_are_independent() -> None:
    """Whether a draft is right says nothing of the next position, proposal or request."""
    drafter = replay(0.5, num_requests=2)
    first, second = (rights(drafter, row, 4000) for row in range(2))
    pairs = [
        (first[:, 0], first[:, 1]),
        (first[1:, 0], first[:-1, 1]),  # the same position of the sequence, proposed again
        (first[1:, 0], first[:-1, 0]),
        (first[:, 0], second[:, 0]),
    ]
    for left, right in pairs:
        assert within(int((left == right).sum()), len(left), 0.5)


@given(st.integers(0, 5))
def test_certainties_are_certain(num_drafts: int) -> None:
    """At 1 every draft is true, at 0 none is."""
    true = reference()
    for length in range(10, 40):
        expected = true[length : length + num_drafts]
        right = replay("all-accept").propose(0, true[:length], num_drafts)
        wrong = replay("all-reject").propose(0, true[:length], num_drafts)
        assert right.tolist() == expected.tolist()
        assert not (wrong == expected).any()


@pytest.mark.parametrize(
    ("acceptance", "expected"),
    [
        ("alternate", [True, False] * 8),
        ({"pattern": "bursts", "length": 3}, ([True] * 3 + [False] * 3) * 3),
        ({"over_time": [1, 0, 0]}, [True, False, False] * 4),
    ],
)
def test_schedules_over_time_are_exact(acceptance: object, expected: list[bool]) -> None:
    """Bursts and alternation of certain drafts follow the count of proposals to the letter."""
    found = rights(replay(acceptance), 0, len(expected))
    assert found.tolist() == [[right] * NUM_DRAFTS for right in expected]


def test_proposals_are_counted_per_request() -> None:
    """Another request's proposals do not move a request along its schedule."""
    drafter = replay("alternate", num_requests=2)
    assert rights(drafter, 0, 3)[:, 0].tolist() == [True, False, True]
    assert rights(drafter, 1, 2)[:, 0].tolist() == [True, False]
    assert rights(drafter, 0, 1)[:, 0].tolist() == [False]


@pytest.mark.parametrize("vocab_size", [2, 3, 50])
def test_a_wrong_token_is_another_of_the_vocabulary(vocab_size: int) -> None:
    """Replaced tokens are spread over the vocabulary, and the true one is never among them."""
    true = np.full(3000, vocab_size - 1, np.int32)
    drafter = ReplayDrafter({"r": true}, Acceptance(((0.0,),)), 0, vocab_size)
    drafter.start(0, "r", 1)
    drafts = drafter.propose(0, true[:10], 2990)
    counts = np.bincount(drafts, minlength=vocab_size)
    assert counts[vocab_size - 1] == 0
    assert len(counts) == vocab_size
    assert all(within(int(count), 2990, 1 / (vocab_size - 1)) for count in counts[:-1])


def test_a_run_repeats() -> None:
    """The same seed gives the same drafts whatever rows, other requests and starts there were."""
    plain = replay(0.5)
    busy = replay(0.5, num_requests=3)
    busy.propose(0, reference()[:10], 5)
    busy.start(0, "r2", 10)
    busy.start(2, "r0", 10)
    for length in range(10, 60):
        history = reference()[:length]
        busy.propose(0, history, 5)
        assert plain.propose(0, history, 5).tolist() == busy.propose(2, history, 5).tolist()


def test_drafts_follow_their_definition() -> None:
    """The drafts equal the definition in Python's integers, so stored results can be repeated."""
    true, expected = reference(), []
    for position in range(20, 84):
        key = b"3\0r0" + position.to_bytes(8, "little") + (0).to_bytes(8, "little")
        digest = hashlib.blake2b(key, digest_size=16).digest()
        bits, offset = (int.from_bytes(digest[i : i + 8], "little") for i in (0, 8))
        token_id = int(true[position])
        right = (bits >> 11) / 2**53 < 0.5
        expected.append(token_id if right else (token_id + 1 + offset % (VOCAB - 1)) % VOCAB)
    assert replay(0.5, seed=3).propose(0, true[:20], 64).tolist() == expected


@pytest.mark.parametrize("changed", ["seed", "request", "position", "proposal"])
def test_every_part_of_the_key_counts(changed: str) -> None:
    """Another seed, request, position or proposal number replaces others of the tokens."""
    true = np.zeros(300, np.int32)

    def right(seed: int = 0, request: str = "a", start: int = 10, number: int = 0) -> list[bool]:
        drafter = ReplayDrafter({"a": true, "b": true}, parse_acceptance(0.5), seed, VOCAB)
        drafter.start(0, request, 1)
        for _ in range(number):
            drafter.propose(0, true[:start], 0)
        return (drafter.propose(0, true[:start], 64) == 0).tolist()

    other = {
        "seed": {"seed": 1},
        "request": {"request": "b"},
        "position": {"start": 74},
        "proposal": {"number": 1},
    }
    assert right() == right()
    assert right(**other[changed]) != right()  # type: ignore[arg-type]


def test_a_run_that_left_its_reference_gets_the_references_tokens() -> None:
    """Whatever the history says, the tokens that the reference has next are proposed."""
    elsewhere = np.zeros(50, np.int32)
    drafts = replay("all-accept").propose(0, elsewhere, 3)
    assert drafts.tolist() == reference()[50:53].tolist()


@pytest.mark.parametrize(("length", "num"), [(LENGTH - 2, 2), (LENGTH, 0), (LENGTH + 7, 0)])
def test_nothing_is_proposed_beyond_the_reference(length: int, num: int) -> None:
    """At the reference's end proposals get shorter, and behind it empty."""
    drafts = replay(0.5).propose(0, np.zeros(length, np.int32), NUM_DRAFTS)
    assert drafts.dtype == np.int32
    assert len(drafts) == num


def test_references_are_never_written() -> None:
    """A proposal is a copy: replaced tokens do not reach the reference."""
    true = reference()
    true.setflags(write=False)
    drafter = ReplayDrafter({"r": true}, parse_acceptance(0), 0, VOCAB)
    drafter.start(0, "r", 1)
    drafter.propose(0, true[:10], 5)[:] = -1
    assert np.array_equal(true, reference())


def test_a_request_without_reference_is_refused() -> None:
    """A storm that would silently propose nothing does not start."""
    with pytest.raises(UnknownRequestError, match="no reference for request 'r9'"):
        replay(0.5).start(0, "r9", 10)


def test_a_vocabulary_of_one_leaves_no_wrong_token() -> None:
    """There must be another token to replace one by."""
    with pytest.raises(UserError, match="vocab_size: 1; at least 2"):
        ReplayDrafter({}, parse_acceptance(0.5), 0, 1)
