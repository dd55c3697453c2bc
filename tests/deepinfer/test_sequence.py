"""The sequence table: rows change hands, block tables grow and shrink, counters stay apart."""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer.sequence import NO_STOP_TOKEN, SamplingParams, Sequence, SequenceTable, blocks_for


def ids(*values):
    return np.array(values, np.int32)


def request(name, tokens, num_prompt=None, **sampling):
    num_prompt = len(tokens) if num_prompt is None else num_prompt
    return Sequence(name, 0, ids(*tokens), num_prompt, SamplingParams(**sampling))


@pytest.fixture
def seqs():
    return SequenceTable(max_num_seqs=3, max_model_len=20, block_size=4)


def test_a_row_shows_what_the_sequence_brought(seqs):
    """Counters, sampling settings and table are the sequence's."""
    seq = request("a", [5, 6, 7], max_tokens=4, temperature=0.5, seed=9, stop_token_id=2)
    row = seqs.add(seq, ids(3, 1), num_reserved_blocks=2)
    assert seq.row == row
    now = seqs.gather(np.array([row]))
    assert [int(counter[0]) for counter in now] == [3, 0, 0, 0, 2, 2, 7, 2, 0]
    assert (seqs.temperature[row], seqs.seeds[row]) == (0.5, 9)
    assert seqs.table(row).tolist() == [3, 1]


def test_a_row_that_changes_hands_keeps_nothing(seqs):
    """The next owner of a row sees no old block, lookahead or stop token, and a new epoch."""
    first = request("a", [5, 6, 7], stop_token_id=2)
    row = seqs.add(first, ids(3, 1, 2))
    seqs.num_lookahead_slots[row], seqs.num_in_flight_tokens[row] = 3, 1
    epoch = seqs.epochs[row]
    assert seqs.remove(first).tolist() == [3, 1, 2]
    assert seqs.add(request("b", [8]), ids(4)) == row
    now = seqs.gather(np.array([row]))
    assert (now.num_in_flight_tokens[0], now.num_lookahead_slots[0]) == (0, 0)
    assert now.stop_token_ids[0] == NO_STOP_TOKEN
    assert now.epochs[0] != epoch
    assert seqs.block_tables[row].tolist() == [4, 0, 0, 0, 0]


def test_a_removed_sequence_takes_its_tokens_along(seqs):
    """Tokens and log-probabilities sampled while running survive preemption and return."""
    seq = request("a", [5, 6], num_prompt=2)
    row = seqs.add(seq, ids(1))
    seqs.token_ids[row, 2], seqs.logprobs[row, 2], seqs.num_tokens[row] = 9, -0.5, 3
    seqs.num_computed_tokens[row] = 2
    seqs.remove(seq)
    assert seq.token_ids.tolist() == [5, 6, 9]
    assert seq.logprobs.tolist() == [-0.5]
    assert (seq.row, seq.num_computed_tokens) == (-1, 0)
    again = seqs.add(seq, ids(2))
    assert seqs.token_ids[again, :3].tolist() == [5, 6, 9]
    assert seqs.logprobs[again, 2] == -0.5


def test_grow_appends_to_several_tables_at_once(seqs):
    """Each row gets its own run of the new ids, behind the blocks it has."""
    rows = np.array([seqs.add(request(n, [1]), ids(b)) for n, b in (("a", 7), ("b", 8))])
    seqs.grow(rows[::-1], ids(2, 1), ids(1, 2, 3))
    assert seqs.table(rows[0]).tolist() == [7, 3]
    assert seqs.table(rows[1]).tolist() == [8, 1, 2]


def test_shrink_returns_the_surplus_in_table_order(seqs):
    """The ids cut off are a copy, and their entries read "no block" afterwards."""
    row = seqs.add(request("a", [1]), ids(7, 8, 9))
    surplus = seqs.shrink(row, 1)
    seqs.grow(np.array([row]), ids(1), ids(4))
    assert surplus.tolist() == [8, 9]
    assert seqs.block_tables[row].tolist() == [7, 4, 0, 0, 0]


def test_every_change_of_a_table_changes_the_version(seqs):
    """Whoever laid tables out before knows that they are stale."""
    seq, versions = request("a", [1]), [seqs.tables_version]
    row = seqs.add(seq, ids(7, 8))
    versions.append(seqs.tables_version)
    seqs.grow(np.array([row]), ids(1), ids(4))
    versions.append(seqs.tables_version)
    seqs.replace_block(row, 0, 5)
    versions.append(seqs.tables_version)
    seqs.shrink(row, 1)
    versions.append(seqs.tables_version)
    seqs.remove(seq)
    versions.append(seqs.tables_version)
    assert len(set(versions)) == len(versions)


@pytest.mark.parametrize("in_flight", [0, 1, 3])
@pytest.mark.parametrize("lookahead", [0, 1, 5])
@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 8, 9])
def test_needed_blocks_are_a_rounded_up_sum(seqs, num_tokens, lookahead, in_flight):
    """ceil((length + in flight + lookahead) / block_size), up to the request's last position."""
    row = seqs.add(request("a", [1] * num_tokens, max_tokens=20 - num_tokens), ids(1))
    seqs.num_lookahead_slots[row], seqs.num_in_flight_tokens[row] = lookahead, in_flight
    needed = seqs.gather(np.array([row])).blocks_needed(4)
    positions = min(num_tokens + in_flight + lookahead, 19)
    assert needed.tolist() == [-(-positions // 4)]


def test_a_reservation_is_never_given_back(seqs):
    """What was reserved at admission counts as needed."""
    row = seqs.add(request("a", [1]), ids(1, 2, 3), num_reserved_blocks=3)
    assert seqs.gather(np.array([row])).blocks_needed(4).tolist() == [3]


def test_blocks_for_rounds_up():
    """0 tokens need no block; an exact multiple needs no extra one."""
    assert [blocks_for(n, 4) for n in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-3, np.float32(0.5), 7])
def test_temperatures_that_can_be_divided_by_pass(temperature):
    """Zero, the smallest one, numpy's and whole ones; integers of numpy for the rest."""
    SamplingParams(np.int64(3), temperature, np.int32(1), np.int32(0)).check("a")


# -- steps in flight -------------------------------------------------------------------------------


def in_flight(seqs, *, tokens=5, computed=4, rows=0, pending=0, drafts=0, last=20):
    """A row with so much of it in flight, as an array of one row."""
    row = seqs.add(request("a", [1] * tokens, max_tokens=last - tokens), ids(1))
    seqs.num_computed_tokens[row], seqs.num_in_flight_tokens[row] = computed, rows
    seqs.num_pending_tokens[row], seqs.num_in_flight_drafts[row] = pending, drafts
    return np.array([row])


@pytest.mark.parametrize(
    ("flying", "num_tokens", "computed", "unsure"),
    [
        ({}, 5, 4, 0),
        ({"rows": 1, "pending": 1}, 6, 5, 0),
        ({"rows": 4, "pending": 4, "drafts": 3}, 9, 8, 3),
        ({"rows": 8, "pending": 8, "drafts": 6}, 13, 12, 6),
        ({"computed": 0, "rows": 3}, 5, 3, 0),  # a chunk: no token comes
        ({"computed": 0, "rows": 5, "pending": 1}, 6, 5, 0),  # a prompt's last one: one token
    ],
)
def test_ahead_is_where_a_row_will_be_if_all_in_flight_is_accepted(
    seqs, flying, num_tokens, computed, unsure
):
    """And how much less it may be: the drafts in flight."""
    rows = in_flight(seqs, **flying)
    ahead = seqs.gather_ahead(rows)
    assert (ahead.num_tokens.tolist(), ahead.num_computed_tokens.tolist()) == (
        [num_tokens],
        [computed],
    )
    assert ahead.num_in_flight_tokens.tolist() == [0]
    assert seqs.num_unsure(rows, ahead).tolist() == [unsure]


def test_a_row_that_goes_on_lacks_a_token(seqs):
    """With all accepted it would have ended, and would not be asked for: one less than its last."""
    rows = in_flight(seqs, rows=4, pending=4, drafts=3, last=8)
    ahead = seqs.gather_ahead(rows)
    assert (ahead.num_tokens.tolist(), ahead.num_computed_tokens.tolist()) == ([7], [6])
    assert seqs.num_unsure(rows, ahead).tolist() == [1]  # 5 computed rows at least


def test_what_is_gathered_ahead_is_a_copy(seqs):
    """The planner changes it, and the table stays as it is."""
    rows = in_flight(seqs, rows=1, pending=1)
    seqs.gather_ahead(rows).num_tokens[:] = 0
    assert (seqs.num_tokens[rows[0]], seqs.num_in_flight_tokens[rows[0]]) == (5, 1)


def test_a_state_ends_where_it_was_ever_written_or_will_be(seqs):
    """Rejected drafts and what a parent wrote count, and what is in flight."""
    (row,) = in_flight(seqs, rows=3, pending=3, drafts=2)
    assert seqs.state_end(row) == 7
    seqs.num_written_tokens[row] = 9
    assert seqs.state_end(row) == 9
    seqs.remove(seqs.at(row))
    fork = request("b", [1, 2, 3])
    fork.num_computed_tokens, fork.num_written_tokens = 2, 6
    assert seqs.add(fork, ids(1)) == row
    assert seqs.state_end(row) == 6
    seqs.remove(fork)
    assert fork.num_written_tokens == 0


def test_a_row_that_changes_hands_has_nothing_in_flight(seqs):
    """Steps in flight are those of its last owner."""
    (row,) = in_flight(seqs, rows=4, pending=4, drafts=3)
    seqs.num_proposed_drafts[row] = 2
    seqs.remove(seqs.at(row))
    for counter in ("num_pending_tokens", "num_in_flight_drafts", "num_proposed_drafts"):
        assert getattr(seqs, counter)[row] == 0
