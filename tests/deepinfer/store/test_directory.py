"""Entries in files: what is read is right, what is not right is a miss, and nothing raises."""

from __future__ import annotations

import errno
import os
import re
import resource
import tempfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from deepinfer.errors import UserError
from deepinfer.store.directory import file_name
from deepinfer.store.memory import HostStore
from deepinfer.store.segment import HEADER_BYTES, Identity
from tests.deepinfer.store.entries import (
    KEY,
    MODEL,
    OTHER_MODEL,
    PARENT,
    file_of,
    holds,
    leftovers,
    loaded,
    opened,
    rows,
    warnings_of,
)

# -- what is right -------------------------------------------------------------------------------


@pytest.mark.parametrize("num_bytes", [0, 1, 200, (1 << 18) - 1, 1 << 18, (1 << 19) + 3])
def test_what_was_saved_is_read_by_the_next_process(tmp_path, num_bytes):
    """Of any length, on both sides of what is hashed at once."""
    first = opened(tmp_path)
    assert first.save(KEY, PARENT, rows(KEY, num_bytes))
    second = opened(tmp_path)
    assert second.num_bytes == first.num_bytes == num_bytes + HEADER_BYTES
    assert loaded(second, KEY, PARENT).tobytes() == rows(KEY, num_bytes).tobytes()
    counters = second.counters
    assert (counters.num_hits, counters.num_misses, counters.bytes_loaded) == (1, 0, num_bytes)
    assert first.counters.bytes_saved == num_bytes
    assert [file.name for file in tmp_path.iterdir()] == [file_of(tmp_path, KEY, PARENT).name]


def test_a_system_that_moves_less_than_it_is_asked_to(tmp_path, monkeypatch):
    """Reads and writes in pieces, as networks do, give the same bytes."""
    write, read = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, view, at: write(fd, view[:30], at))
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: read(fd, [views[0][:30]], at))
    store = opened(tmp_path)
    assert store.save(KEY, PARENT, rows(KEY))
    assert holds(store, KEY, PARENT)


def test_an_entry_that_was_never_saved_is_a_silent_miss(good, caplog):
    """Nothing is wrong with that."""
    store = opened(good)
    assert loaded(store, KEY + 1, PARENT) is None
    assert loaded(store, KEY, None) is None
    assert store.counters.num_misses == 2
    assert not warnings_of(caplog)


def test_what_is_known_needs_no_look(good, monkeypatch):
    """By the listing at the start and by what this store saved; no file is opened for it."""
    store = opened(good)
    assert store.save(2, None, rows(2, 7))
    monkeypatch.setattr(os, "open", None)
    with store._lock:  # as while another thread lists the directory
        assert (store.known(KEY, PARENT), store.known(2, None)) == (200, 7)
        assert (store.known(KEY, None), store.known(3, 2)) == (None, None)


def test_the_keys_at_both_ends_have_names(tmp_path):
    """0 and 2^128 - 1; beyond them is an error of the caller."""
    store = opened(tmp_path)
    for key in (0, (1 << 128) - 1):
        assert store.save(key, None, rows(1))
        assert store.find(key, None) == 200
    for key in (-1, 1 << 128, "../../etc/passwd"):
        with pytest.raises(UserError, match="expected an integer of 16 bytes"):
            store.save(key, None, rows(1))
    with pytest.raises(UserError, match="parent: -1"):
        store.find(1, -1)


def test_names_are_numbers(tmp_path):
    """Nothing but hexadecimal digits of fixed length, and the version."""
    name = file_name(Identity(b"../../../../../x", KEY, None))
    assert re.fullmatch(r"[0-9a-f]{32}-[0-9a-f]{32}-[0-9a-f]{32}\.kv1", name)


def test_an_entry_that_is_there_is_not_written_again(good):
    """Saving it is a use, and no more."""
    file = file_of(good, KEY, PARENT)
    os.utime(file, ns=(1, 1))
    inode = file.stat().st_ino
    store = opened(good)
    assert store.save(KEY, PARENT, rows(KEY))
    assert file.stat().st_ino == inode
    assert file.stat().st_mtime_ns > 1
    assert store.counters.bytes_saved == 0


def test_both_stores_together(tmp_path):
    """What memory evicts is on disk, and comes back through a save that a read fills."""
    memory, directory = HostStore(400), opened(tmp_path)
    for key in (1, 2, 3):
        saving = memory.begin_save(key, None, 200)
        saving.buffer[:] = rows(key)
        memory.commit(saving)
        pin = memory.pin(key)
        assert directory.save(key, None, pin.buffer)
        memory.close(pin)
    assert memory.open(1) is None
    back = memory.begin_save(1, None, directory.find(1, None))
    assert directory.read(1, None, back.buffer)
    memory.commit(back)
    assert memory.open(1).buffer.tobytes() == rows(1).tobytes()


# -- what is not right ---------------------------------------------------------------------------


def assert_one_warning_and_healed(store, caplog, match):
    """A miss each time, one warning in all; saved again it is right, and the next fault is told."""
    for _ in range(3):
        assert loaded(store, KEY, PARENT) is None
        assert store.known(KEY, PARENT) is None
    (warning,) = warnings_of(caplog)
    assert re.search(match, warning)
    assert store.counters.num_misses == 3
    assert store.counters.num_bad_files == 1
    assert store.save(KEY, PARENT, rows(KEY))
    assert store.known(KEY, PARENT) == 200
    assert holds(store, KEY, PARENT)
    assert len(warnings_of(caplog)) == 1
    os.truncate(next(file for file in store._path.iterdir() if file.suffix == ".kv1"), 10)
    assert loaded(store, KEY, PARENT) is None
    assert len(warnings_of(caplog)) == 2


def test_any_changed_byte_is_a_miss(good):
    """Of the header or the rows, one bit of it and all of them."""
    file = file_of(good, KEY, PARENT)
    whole = file.read_bytes()
    for offset in range(len(whole)):
        for change in (1 << offset % 8, 0xFF):
            damaged = bytearray(whole)
            damaged[offset] ^= change
            file.write_bytes(damaged)
            assert_bad(good, f"byte {offset} changed by {change}")
    file.write_bytes(whole)
    assert holds(opened(good), KEY, PARENT)


def test_any_truncated_file_is_a_miss(good):
    """From one byte less than all to an empty file."""
    file = file_of(good, KEY, PARENT)
    for length in reversed(range(file.stat().st_size)):
        os.truncate(file, length)
        assert_bad(good, f"{length} bytes left")


def assert_bad(path, what):
    store = opened(path)
    assert loaded(store, KEY, PARENT) is None, what
    assert store.counters.num_bad_files == 1, what


REPLACED = {
    "empty": (lambda whole: b"", "cut off after 0 bytes"),
    "half a header": (lambda whole: whole[:40], "cut off after 40 bytes"),
    "no rows": (lambda whole: whole[:HEADER_BYTES], "cut off: 88 bytes instead of 288"),
    "half the rows": (lambda whole: whole[:-100], "cut off: 188 bytes instead of 288"),
    "too long": (lambda whole: whole + b"\0", "too long: 289 bytes instead of 288"),
    "zeros": (lambda whole: bytes(len(whole)), "not a file of this store"),
    "text": (lambda whole: b"Dear reader, " * 20, "not a file of this store"),
    "version": (lambda whole: whole[:8] + b"\2" + whole[9:], "of format version 2, not 1"),
    "header size": (lambda whole: whole[:12] + b"\1" + whole[13:], "a header of 1 bytes"),
    "huge length": (lambda whole: whole[:64] + b"\xff" * 8 + whole[72:], "cut off: 288 bytes"),
    "rows": (lambda whole: whole[:-1] + bytes([whole[-1] ^ 1]), "its checksum is another"),
}


@pytest.mark.parametrize("damage", REPLACED)
def test_a_bad_file_is_one_warning_until_it_is_saved_again(good, caplog, damage):
    """The warning names the file and says what is wrong with it."""
    change, message = REPLACED[damage]
    file = file_of(good, KEY, PARENT)
    file.write_bytes(change(file.read_bytes()))
    assert_one_warning_and_healed(opened(good), caplog, f"{re.escape(str(file))}: .*{message}")


def test_damage_behind_the_first_look_is_found(good, caplog):
    """Between `find` and `read` the file is cut, then it is gone."""
    store = opened(good)
    into = np.empty(store.find(KEY, PARENT), np.uint8)
    file = file_of(good, KEY, PARENT)
    os.truncate(file, 100)
    assert not store.read(KEY, PARENT, into)
    assert "cut off" in warnings_of(caplog)[0]
    file.unlink()
    assert not store.read(KEY, PARENT, into)
    assert len(warnings_of(caplog)) == 1


def test_a_buffer_of_another_length_is_not_filled(good, caplog):
    """The file may have been replaced since its length was asked for."""
    assert not opened(good).read(KEY, PARENT, np.empty(7, np.uint8))
    assert "200 bytes of rows instead of 7" in warnings_of(caplog)[0]


@pytest.mark.parametrize("saved_by", ["this process", "an earlier one"])
def test_a_vanished_file_is_one_warning(good, caplog, saved_by):
    """It was there when the store began, or was saved by it, and nobody said that it would go."""
    store = opened(good)
    file_of(good, KEY, PARENT).unlink()
    if saved_by == "this process":
        assert store.save(KEY, PARENT, rows(KEY))
        file_of(good, KEY, PARENT).unlink()
    assert_one_warning_and_healed(store, caplog, "has vanished")


@pytest.mark.parametrize("kind", ["model", "key", "parent"])
def test_a_file_under_a_name_that_is_not_its_own_is_a_miss(tmp_path, caplog, kind):
    """Renamed by somebody: the header knows better."""
    model, key, parent = {
        "model": (OTHER_MODEL, KEY, PARENT),
        "key": (MODEL, KEY + 1, PARENT),
        "parent": (MODEL, KEY, PARENT + 1),
    }[kind]
    assert opened(tmp_path, model).save(key, parent, rows(key))
    file_of(tmp_path, key, parent, model).rename(file_of(tmp_path, KEY, PARENT))
    message = {"model": "another model", "key": "other tokens", "parent": "another segment"}[kind]
    assert_one_warning_and_healed(opened(tmp_path), caplog, message)


def test_other_models_never_hit(good, caplog):
    """They have files of their own, in the same directory."""
    other = opened(good, OTHER_MODEL)
    assert loaded(other, KEY, PARENT) is None
    assert other.save(KEY, PARENT, rows(5))
    assert loaded(other, KEY, PARENT).tobytes() == rows(5).tobytes()
    assert holds(opened(good), KEY, PARENT)
    assert not warnings_of(caplog)


@pytest.mark.timeout(10)
@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_what_is_no_file_is_a_miss(good, caplog, kind):
    """A link is not followed, a pipe not waited for; a folder cannot even be replaced."""
    file = file_of(good, KEY, PARENT)
    file.rename(good / "elsewhere")
    if kind == "link":
        file.symlink_to(good / "elsewhere")
    elif kind == "pipe":
        os.mkfifo(file)
    else:
        file.mkdir()
    store = opened(good)
    assert loaded(store, KEY, PARENT) is None
    assert loaded(store, KEY, PARENT) is None
    assert len(warnings_of(caplog)) == 1
    assert store.save(KEY, PARENT, rows(KEY)) == (kind != "folder")
    assert holds(store, KEY, PARENT) == (kind != "folder")
    assert not leftovers(good)


def test_a_file_that_cannot_be_read_is_a_miss(good, caplog, monkeypatch):
    """A bad sector is one warning, as any damage is."""

    def broken(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    store = opened(good)
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", broken)
        assert loaded(store, KEY, PARENT) is None
    assert warnings_of(caplog)[0].endswith("Input/output error; counts as not there")


# -- what cannot be written ----------------------------------------------------------------------


@contextmanager
def largest_file(num_bytes):
    """The kernel takes no more than that for one file: a write is cut short, the next fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_save_that_is_cut_short_is_refused(tmp_path, caplog):
    """One warning for the reason, nothing left behind; when there is room again it goes on."""
    store = opened(tmp_path)
    with largest_file(1000):
        assert not store.save(1, None, rows(1, 5000))
        assert not store.save(2, None, rows(2, 5000))
    assert warnings_of(caplog) == [f"{tmp_path}: entries are not saved: File too large"]
    assert store.counters.num_refused_saves == 2
    assert not list(tmp_path.iterdir())
    assert store.num_bytes == 0
    assert store.save(1, None, rows(1, 5000))
    assert holds(store, 1)
    with largest_file(1000):
        assert not store.save(2, None, rows(2, 5000))
    assert len(warnings_of(caplog)) == 2


def test_a_disk_that_is_full_at_the_sync_refuses_the_save(tmp_path, caplog, monkeypatch):
    """Some file systems say so only then; nothing has the entry's name before."""
    store = opened(tmp_path)

    def full(_):
        assert not file_of(tmp_path, 1).exists()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert not store.save(1, None, rows(1))
    assert warnings_of(caplog) == [f"{tmp_path}: entries are not saved: No space left on device"]
    assert not list(tmp_path.iterdir())


@contextmanager
def as_nobody():
    """Without the rights of root, if the tests have them."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


def test_a_directory_that_cannot_be_written_to_can_be_read(caplog):
    """Entries are found, saves are refused with one warning, and its leftovers stay."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name)
        assert opened(path).save(1, None, rows(1))
        (path / "saving-0123456789abcdef.part").write_bytes(b"half")
        for file in path.iterdir():
            file.chmod(0o444)
        path.chmod(0o555)
        with as_nobody():
            store = opened(path, budget=300)
            assert holds(store, 1)
            assert not store.save(2, None, rows(2, 10))
            assert not store.save(3, None, rows(3, 10))
            assert store.save(1, None, rows(1))
        assert warnings_of(caplog) == [
            f"{path}: entries are not saved: no more room within 300 bytes"
        ]
        caplog.clear()
        with as_nobody():
            assert not opened(path).save(2, None, rows(2))
        assert warnings_of(caplog) == [f"{path}: entries are not saved: Permission denied"]
        assert len(list(path.iterdir())) == 2
        path.chmod(0o755)


def test_a_directory_that_goes_away_makes_misses(good, caplog):
    """Its removal while the store is open is no reason to end."""
    store = opened(good)
    file_of(good, KEY, PARENT).unlink()
    good.rmdir()
    assert loaded(store, KEY, PARENT) is None
    assert not store.save(2, None, rows(2))
    assert len(warnings_of(caplog)) == 2


def test_a_path_that_is_no_folder_is_an_error_of_the_user(tmp_path):
    """Said at the start, with the reason."""
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UserError, match=r"file.*: not a folder to keep entries in: "):
            opened(path)
    with pytest.raises(UserError, match="fingerprint: 3 bytes; 16 expected"):
        opened(tmp_path, b"abc")
    assert holds(opened(tmp_path / "new" / "folder"), 1) is False
