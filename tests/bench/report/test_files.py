"""Files of a report."""

from __future__ import annotations

import pytest

from bench.report.files import write_file
from deepinfer.errors import UserError


def test_a_file_is_replaced_whole(tmp_path):
    """The new content is there and no part file is left."""
    path = tmp_path / "table"
    for content in (b"long content", b"short"):
        write_file(path, content)
    assert path.read_bytes() == b"short"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_leaves_what_there_was(tmp_path, monkeypatch):
    """The disk fills up: the old file stays, the part file goes."""
    path = tmp_path / "table"
    path.write_bytes(b"old")

    def refuse(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(path), "replace", refuse)
    with pytest.raises(UserError, match="cannot write: No space left"):
        write_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_is_refused(tmp_path):
    """It is named, and nothing is made."""
    with pytest.raises(UserError, match="is a folder"):
        write_file(tmp_path, b"")
    assert list(tmp_path.iterdir()) == []
