"""The CSV table."""

from __future__ import annotations

import csv
import io

from bench.report.csv import render_csv
from bench.report.table import build_table


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
