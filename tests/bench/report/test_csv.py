"""The CSV table."""

from __future__ import annotations

import csv
import io

from bench.report.csv import render_csv
from bench.report.table import View, build_table
from bench.report.view import apply_view


def test_rows_follow_rfc_4180(synthetic):
    """CRLF line ends, quotes around commas, quotes and line breaks."""
    run = synthetic()
    run.round(run.cell({"release": 'a,"b"\nc'}))
    text = render_csv(build_table(run.end()))
    header, row = csv.reader(io.StringIO(text, newline=""))
    assert row[0] == 'a,"b"\nc'
    assert len(header) == len(row)
    assert text.endswith("\r\n")
    assert '"a,""b""\nc",' in text


def test_undefined_is_empty_and_flags_are_words(comparison):
    """No NVML: an empty field, not 0; unsafe as true or false."""
    rows = list(csv.DictReader(io.StringIO(render_csv(build_table(comparison)), newline="")))
    assert [row["nvml_used_mib"] for row in rows] == ["", "", ""]
    assert [row["unsafe"] for row in rows] == ["false", "true", "false"]
    assert [row["baseline"] for row in rows] == ["true", "false", "false"]
    assert [row["wrong_requests"] for row in rows] == ["0", "3", "0"]
    assert float(rows[2]["vs_baseline"]) == 2.0


def test_values_round_trip(synthetic):
    """Reading the file back gives each figure again, to the last bit, and each setting."""
    run = synthetic(rounds=2, axes={"block_size": [16, 128]})
    cells = [run.cell({"release": "polled", "block_size": n}, baseline=n == 16) for n in (16, 128)]
    for number in (0, 1):
        for cell in cells:
            run.round(cell, number, wall_s=1 / 3 + cell + 0.1 * number, host_us=(0.1, 0.7))
    table = build_table(run.end())
    rows = list(csv.DictReader(io.StringIO(render_csv(table), newline="")))
    for read, row in zip(rows, table.rows, strict=True):
        for column in table.columns:
            value = row.values[column.key]
            text = read[column.key]
            assert (None if text == "" else type(value)(text)) == value


def test_the_view_chooses_columns_and_digits(comparison):
    """Chosen columns, then the flags; three significant figures where asked for."""
    table = apply_view(build_table(comparison), View(columns=("tpot_ms", "release"), precision=3))
    header, first, *_ = csv.reader(io.StringIO(render_csv(table), newline=""))
    assert header == ["tpot_ms", "release", "unsafe", "baseline"]
    assert first == ["150.0", "deferred", "false", "true"]
