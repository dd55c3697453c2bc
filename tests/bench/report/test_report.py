"""Formats by name and where they are written."""

from __future__ import annotations

import io
import sys

import pytest

from bench.report import FORMATS, build_table, render, write_report
from deepinfer.errors import UserError


@pytest.mark.parametrize("name", list(FORMATS))
def test_every_format_shows_every_cell(comparison, name):
    """Whatever the format, the three policies are in it and it ends its last line."""
    text = render(build_table(comparison), name)
    for release in ("deferred", "early", "polled"):
        assert release in text
    assert text.endswith("\n")


def test_a_file_is_written_whole_in_utf8_with_its_own_line_ends(synthetic, tmp_path):
    """CSV keeps CRLF, names outside ASCII are UTF-8, and no part file is left."""
    run = synthetic()
    run.round(run.cell({"release": "café"}))
    path = tmp_path / "out" / "table.csv"
    path.parent.mkdir()
    write_report(build_table(run.end()), "csv", path)
    assert "café".encode() in path.read_bytes()
    assert path.read_bytes().count(b"\r\n") == 2
    assert list(path.parent.iterdir()) == [path]


def test_stdout_may_have_any_encoding(synthetic, monkeypatch):
    """A cp1252 terminal or a C locale does not stop a table (mempalace#1203)."""
    run = synthetic(workload="中")
    run.round(run.cell())
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="cp1252"))
    write_report(build_table(run.end()))
    assert raw.getvalue().decode("utf-8").startswith("中 on cpu-tiny")


def test_a_file_that_cannot_be_written_is_a_user_error(comparison, tmp_path):
    """A missing folder, a folder, a file as folder: one line each, nothing left behind."""
    table = build_table(comparison)
    (tmp_path / "file").write_text("", encoding="utf-8")
    before = sorted(tmp_path.iterdir())
    for path in (tmp_path / "absent" / "t.md", tmp_path, tmp_path / "file" / "t.md"):
        with pytest.raises(UserError, match=str(path)):
            write_report(table, "md", path)
    assert sorted(tmp_path.iterdir()) == before
