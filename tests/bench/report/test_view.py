"""Columns, order, groups and digits of a reader's choice."""

from __future__ import annotations

import pytest

from bench.report.table import View, build_table
from bench.report.view import apply_view, groups, plain_value, split_keys
from deepinfer.errors import UserError


@pytest.fixture
def grid(synthetic):
    """Two policies by two orders and a block size that is sometimes a word; one never ran."""
    run = synthetic(axes={"release": ["polled", "early"], "free_order": ["reverse", "forward"]})
    for release in ("polled", "early"):
        for order in ("reverse", "forward"):
            size = 16 if order == "reverse" else "auto"
            cell = run.cell({"release": release, "free_order": order, "block_size": size})
            if (release, order) != ("early", "forward"):
                run.round(cell, wall_s=1.0 + cell)
    return build_table(run.end())


def cells(table):
    """The rows' cells in order."""
    return [row.cell for row in table.rows]


def test_columns_come_as_asked(comparison):
    """Order as given, once each; the rows keep their values."""
    table = build_table(comparison)
    chosen = apply_view(table, View(columns=("tok_per_s", "release", "tok_per_s")))
    assert [column.key for column in chosen.columns] == ["tok_per_s", "release"]
    assert chosen.rows == table.rows


def test_without_a_wish_nothing_changes(grid):
    """The default view is the table."""
    assert apply_view(grid, View()) == grid


@pytest.mark.parametrize(
    ("sort", "order"),
    [
        (("tok_per_s",), [2, 1, 0, 3]),
        (("-tok_per_s",), [0, 1, 2, 3]),
        (("free_order", "-release"), [1, 3, 0, 2]),
        (("block_size",), [0, 2, 1, 3]),
        (("-block_size",), [1, 3, 0, 2]),
    ],
)
def test_rows_are_sorted_and_the_undefined_stay_last(grid, sort, order):
    """Either direction; equals keep the file's order; numbers come before words."""
    assert cells(apply_view(grid, View(sort=sort))) == order


def test_groups_are_tables_of_one_value_each(grid):
    """In the file's order, sorted inside, without the column that the heading replaces."""
    table = apply_view(grid, View(sort=("tok_per_s",), group_by="free_order"))
    parts = groups(table)
    assert [heading for heading, _ in parts] == ["free_order: reverse", "free_order: forward"]
    assert [cells(part) for _, part in parts] == [[2, 0], [1, 3]]
    assert all("free_order" not in [c.key for c in part.columns] for _, part in parts)
    assert cells(table) == [2, 0, 1, 3]


def test_a_group_axis_is_a_column_of_formats_that_have_no_groups(grid):
    """Chosen columns without the axis get it in front."""
    table = apply_view(grid, View(columns=("tok_per_s",), group_by="release"))
    assert [column.key for column in table.columns] == ["release", "tok_per_s"]


def test_without_groups_there_is_one_table(grid):
    """No heading, everything in it."""
    assert groups(grid) == [("", grid)]


@pytest.mark.parametrize(
    ("view", "message"),
    [
        (View(columns=("tok_per_sec",)), r"no column 'tok_per_sec'.*'tok_per_s' \(the nearest"),
        (View(sort=("-ttft",)), r"no sort key 'ttft' in this table"),
        (View(group_by="tok_per_s"), r"no group axis 'tok_per_s'.*release, free_order"),
    ],
)
def test_an_unknown_key_is_refused_with_the_valid_ones(comparison, view, message):
    """One line that names the key and what there is."""
    with pytest.raises(UserError, match=message):
        apply_view(build_table(comparison), view)


@pytest.mark.parametrize(
    ("key", "precision", "value"),
    [("tok_per_s", None, 3 / 7), ("tok_per_s", 2, 0.43), ("block_copies", 1, 14)],
)
def test_precision_rounds_what_is_measured_and_no_count(synthetic, key, precision, value):
    """Two significant figures of a speed; a count of 14 stays 14."""
    run = synthetic()
    run.round(run.cell(), wall_s=7.0, counters={"num_block_copies": 14})
    table = build_table(run.end())
    (column,) = (column for column in table.columns if column.key == key)
    assert plain_value(table.rows[0], column, precision) == value


def test_keys_are_split_at_commas():
    """Blanks and empty parts do not count."""
    assert split_keys(" a,b ,, -c") == ("a", "b", "-c")
    assert split_keys("") == ()
