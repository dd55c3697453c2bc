"""The SQL script, loaded into sqlite3."""

from __future__ import annotations

import json
import sqlite3

import pytest

from bench.report.sql import literal, render_sql
from bench.report.table import View, build_table
from bench.report.view import apply_view


def load(table):
    """A database with the script's tables."""
    database = sqlite3.connect(":memory:")
    database.row_factory = sqlite3.Row
    database.executescript(render_sql(table))
    assert not database.in_transaction
    return database


def columns(database, name):
    """Column -> declared type of a table."""
    return {row["name"]: row["type"] for row in database.execute(f"PRAGMA table_info({name})")}


def test_every_record_is_a_row(comparison):
    """As many rows as the file has records of each kind."""
    database = load(build_table(comparison))
    expected = {
        "runs": 1,
        "cells": 3,
        "rounds": 9,
        "requests": len(comparison.requests),
        "steps": len(comparison.steps),
        "verifications": len(comparison.verifications),
    }
    for name, num_rows in expected.items():
        assert database.execute(f"SELECT count(*) FROM {name}").fetchone()[0] == num_rows


def test_types_are_those_of_the_values(comparison):
    """Whole numbers, reals and text; undefined is NULL and its reason is JSON."""
    database = load(build_table(comparison))
    types = columns(database, "steps")
    assert (types["step"], types["end_s"], types["host_us_commit"]) == ("INTEGER", "REAL", "REAL")
    assert columns(database, "runs")["workload"] == "TEXT"
    row = database.execute("SELECT * FROM cells WHERE release = 'early'").fetchone()
    assert (row["unsafe"], row["wrong_requests"], row["tok_per_s"]) == (1, 3, 2.0)
    assert row["nvml_used_mib"] is None
    assert json.loads(row["undefined"])["nvml_used_mib"] == "nvml: no usable NVIDIA driver"


def test_the_database_answers_what_the_table_says(comparison):
    """A join over cells, rounds and requests gives the table's median TTFT."""
    database = load(build_table(comparison))
    query = """
        SELECT DISTINCT 1e3 * requests.ttft_s FROM requests
        JOIN rounds USING (cell, round) JOIN cells USING (cell)
        WHERE NOT rounds.warmup AND cells.release = 'polled'"""
    (ttft_ms,) = database.execute(query).fetchone()
    assert ttft_ms == build_table(comparison).rows[2].values["ttft_ms_p50"]


def test_lists_are_json(comparison):
    """Token times are an array that SQL can take apart."""
    database = load(build_table(comparison))
    (text,) = database.execute("SELECT token_times_s FROM requests").fetchone()
    assert tuple(json.loads(text)) == comparison.requests[0].token_times_s


def test_a_run_that_never_began_has_empty_tables(synthetic):
    """Every table is there, with its columns."""
    database = load(build_table(synthetic().end("interrupted")))
    assert database.execute("SELECT count(*) FROM steps").fetchone()[0] == 0
    assert "end_s" in columns(database, "steps")


def test_the_view_chooses_the_cells_columns(comparison):
    """Columns, order and digits are those of the exported table."""
    view = View(columns=("release", "vs_baseline"), sort=("-release",))
    database = load(apply_view(build_table(comparison), view))
    rows = database.execute("SELECT release, vs_baseline FROM cells").fetchall()
    assert [tuple(row) for row in rows] == [("polled", 2.0), ("early", 1.0), ("deferred", 1.0)]


@pytest.mark.parametrize(
    "value", ["it's", "'; DROP TABLE runs; --", "a\nb", 'say "x"', "é中", "nul\0!", "\\"]
)
def test_text_comes_back_as_it_went_in(synthetic, value):
    """Quotes, line ends, statements and NUL are characters of a text, also in a name."""
    run = synthetic(workload=value, axes={value: [1]})
    run.round(run.cell({"release": value}))
    database = load(build_table(run.end()))
    assert database.execute("SELECT release FROM cells").fetchone()[0] == value
    assert database.execute("SELECT workload FROM runs").fetchone()[0] == value


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "NULL"), (True, "1"), (3, "3"), (0.1, "0.1"), (1e-9, "1e-09"), (float("inf"), "NULL")],
)
def test_literals(value, text):
    """Numbers are written so that they are read as the same number; none is infinite."""
    assert literal(value) == text


def test_an_axis_of_words_and_numbers_keeps_both(synthetic):
    """16 stays a number beside `auto`."""
    run = synthetic()
    for size in (16, "auto"):
        run.round(run.cell({"block_size": size}))
    rows = load(build_table(run.end())).execute("SELECT block_size FROM cells").fetchall()
    assert [row[0] for row in rows] == [16, "auto"]


def test_a_script_cut_off_loads_nothing(comparison):
    """One transaction: without its last line no table stays."""
    script = render_sql(build_table(comparison)).removesuffix("COMMIT;\n")
    database = sqlite3.connect(":memory:")
    database.executescript(script)
    database.rollback()
    assert database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
