"""The tags on the host: their formula, when they are brought up to date, and whose they are."""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer.checks.prefix_tags import MAX_POSITIONS, NUM_ENDED, PrefixTags, go_on
from deepinfer.errors import UserError
from deepinfer.plan import WrongRows
from deepinfer.planning import PlanBuilder, StepCopies
from deepinfer.sequence import SamplingParams, Sequence, SequenceTable

WIDTH, BLOCK = 40, 4
NAMES = np.array(["r0", "r1", "r2"], object)


def splitmix(token, position):
    """The hash of one (token, position), in plain integers."""
    x = ((token << 32) + position + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def tag_row(tokens):
    """The tags of a request, by the formula in the module's docstring."""
    tags = []
    for position in range(len(tokens)):
        total = sum(splitmix(tokens[i], i) for i in range(position + 1)) % 2**64
        tag = (total >> 20 << 20) | (position + 1)
        tags.append(tag - 2**64 if tag >= 2**63 else tag)
    return tags


@pytest.fixture
def seqs():
    """A table of three rows."""
    return SequenceTable(3, WIDTH, BLOCK)


@pytest.fixture
def tags(seqs):
    """The tags of that table, whose rows are r0, r1 and r2."""
    return PrefixTags(seqs, WIDTH, lambda rows: NAMES[rows])


def add(seqs, tokens):
    """A request with these tokens; its row."""
    seq = Sequence("?", 0, np.array(tokens, np.int32), len(tokens), SamplingParams())
    return seq, seqs.add(seq, np.arange(1, 3, dtype=np.int32))


def up_to(seqs, tags, rows, lengths):
    rows = np.array(rows, np.intp)
    return tags.up_to(rows, seqs.epochs[rows], np.array(lengths, np.int32))[0].tolist()


def test_tags_follow_the_formula(seqs, tags):
    """Chunks, single tokens and rows of different lengths: as computed in plain integers."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 2**31, (2, WIDTH)).tolist()
    rows = [add(seqs, row)[1] for row in tokens]
    right = [tag_row(row) for row in tokens]
    for lengths in ((5, 1), (6, 2), (6, 9), (7, 10), (40, 11)):
        expected = [
            row[:n] + [0] * (max(lengths) - n) for row, n in zip(right, lengths, strict=True)
        ]
        assert up_to(seqs, tags, rows, lengths) == expected


def test_a_tag_tells_its_position_and_is_never_0(seqs, tags):
    """Also where the hash has no bit, for 0 says that nothing was written."""
    _, row = add(seqs, [0] * WIDTH)
    (found,) = up_to(seqs, tags, [row], [WIDTH])
    assert [tag % MAX_POSITIONS for tag in found] == list(range(1, WIDTH + 1))


def test_equal_prefixes_have_equal_tags_and_others_do_not(seqs, tags):
    """Tags part where tokens do, and stay apart; the same tokens in another order are others."""
    rows = [add(seqs, tokens)[1] for tokens in ([1, 2, 3, 4], [1, 2, 9, 4], [2, 1, 3, 4])]
    a, b, c = up_to(seqs, tags, rows, [4, 4, 4])
    assert [x == y for x, y in zip(a, b, strict=True)] == [True, True, False, False]
    assert not set(a) & set(c)


def test_a_row_that_changed_hands_starts_anew(seqs, tags):
    """Nothing of the last request is left, whether its end was told or not."""
    for told in (True, False):
        seq, row = add(seqs, [1, 2, 3, 4, 5])
        up_to(seqs, tags, [row], [5])
        if told:
            tags.ended(row, "old")
        seqs.remove(seq)
        other, again = add(seqs, [7, 8])
        assert again == row
        assert up_to(seqs, tags, [row], [2]) == [tag_row([7, 8])]
        assert up_to(seqs, tags, [row], [2]) == [tag_row([7, 8])]
        seqs.remove(other)


def test_what_a_plan_got_stays_as_it_was(seqs, tags):
    """A plan owns its tags: later tokens and the end of the request change nothing in it."""
    _, row = add(seqs, [1, 2, 3])
    rows = np.array([row], np.intp)
    first, _ = tags.up_to(rows, seqs.epochs[rows], np.array([3], np.int32))
    before = first.copy()
    tags.ended(row, "r")
    assert first.tolist() == before.tolist()


def wrong(seqs, tags, rows, reader, position, found):
    """The sentence for one wrong row of a plan over `rows`."""
    rows = np.array(rows, np.intp)
    ones = np.ones(len(rows), np.int32)
    plan = PlanBuilder(seqs, tags).build(1, rows, seqs.gather(rows), ones, StepCopies())
    one = WrongRows(
        1, np.array([reader], np.int32), np.array([position], np.int32), np.array([found])
    )
    return next(tags.describe(plan, one))


def test_whose_row_was_found_is_named(seqs, tags):
    """The reader itself before others, then who is live, then who has ended; else it is unknown."""
    seq, row = add(seqs, [5, 6, 7])
    old = up_to(seqs, tags, [row], [3])[0]
    tags.ended(row, "gone")
    seqs.remove(seq)
    rows = [add(seqs, tokens)[1] for tokens in ([1, 2, 3], [1, 9, 9])]
    seqs.num_computed_tokens[rows] = 2
    own, other = (tag_row(tokens) for tokens in ([1, 2, 3], [1, 9, 9]))
    names = [str(name) for name in NAMES[rows]]

    def found(tag, position=2):
        return wrong(seqs, tags, rows, 0, position, tag).partition(": ")[2]

    mine = "expected its own row, found"
    assert found(own[1]) == f"{mine} the row of request {names[0]!r} position 1"
    assert found(other[2]) == f"{mine} the row of request {names[1]!r} position 2"
    assert found(own[0]) == f"{mine} the row of request {names[0]!r} position 0"  # both have it
    assert found(old[1]) == f"{mine} the row of request 'gone', which has ended, position 1"
    assert found(0) == f"{mine} a row never written"
    assert found(17) == f"{mine} an unknown row of position 16"
    assert found(own[0], 3).startswith("expected a row never written, found the row of")
    head = wrong(seqs, tags, rows, 0, 2, 0).partition(":")[0]
    assert head == f"request {names[0]!r} position 2 (block 1)"


def test_a_reader_that_has_left_is_still_named(seqs, tags):
    """A request aborted with its step in flight is found among those that ended."""
    seq, row = add(seqs, [1, 2])
    rows = np.array([row], np.intp)
    ones = np.ones(1, np.int32)
    plan = PlanBuilder(seqs, tags).build(1, rows, seqs.gather(rows), ones, StepCopies())
    tags.ended(row, "left")
    seqs.remove(seq)
    report = WrongRows(1, np.zeros(1, np.int32), np.zeros(1, np.int32), np.zeros(1, np.int64))
    assert next(tags.describe(plan, report)).startswith("request 'left' position 0")


def test_the_ended_are_forgotten_in_time(seqs, tags):
    """Only the last few keep their tags, so a long run needs no more memory."""
    for number in range(NUM_ENDED + 1):
        seq, row = add(seqs, [number, 0])
        up_to(seqs, tags, [row], [2])
        tags.ended(row, f"e{number}")
        seqs.remove(seq)
    _, row = add(seqs, [999, 999])
    seqs.num_computed_tokens[row] = 1
    texts = [wrong(seqs, tags, [row], 0, 0, tag_row([n])[0]) for n in (0, 1)]
    assert "an unknown row" in texts[0]
    assert "'e1', which has ended" in texts[1]


def test_more_positions_than_a_tag_tells_are_refused(seqs):
    """One line that names the key, the number and the limit."""
    PrefixTags(seqs, MAX_POSITIONS, lambda rows: NAMES[rows])
    with pytest.raises(UserError, match=f"max_model_len: {MAX_POSITIONS + 1}; expected at most"):
        PrefixTags(seqs, MAX_POSITIONS + 1, lambda rows: NAMES[rows])


def test_tags_go_on_from_a_sum_as_if_the_tokens_had_been_known(seqs, tags):
    """What the host knows and what the device goes on with: the tags of the whole."""
    tokens = np.random.default_rng(1).integers(0, 2**31, WIDTH).tolist()
    _, row = add(seqs, tokens)
    rows = np.array([row], np.intp)
    for known in (1, 7, WIDTH - 1):
        _, sums = tags.up_to(rows, seqs.epochs[rows], np.array([known], np.int32))
        rest = go_on(sums[0], known, np.array(tokens[known:], np.int32))
        assert rest.tolist() == tag_row(tokens)[known:]
    assert go_on(sums[0], WIDTH, np.empty(0, np.int32)).tolist() == []


def test_tags_may_be_asked_for_wider_than_they_are_known(seqs, tags):
    """The device puts the rest in: 0 behind each context."""
    _, row = add(seqs, [4, 5, 6])
    rows, known = np.array([row], np.intp), np.array([3], np.int32)
    (found,), _ = tags.up_to(rows, seqs.epochs[rows], known, 7)
    assert found.tolist() == [*tag_row([4, 5, 6]), 0, 0, 0, 0]
