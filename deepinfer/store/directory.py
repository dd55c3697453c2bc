"""Entries in a directory: one file each, whole or not there, whatever happens to who writes it.

    <fingerprint>-<key>-<parent>.kv1     an entry; three numbers of 32 hex digits, format version 1
    saving-<random>.part                 one being written

A file is written under the second name, synced, and renamed, so the first name is that of a whole
file, unless the machine went down at a bad moment or somebody else had a hand in it. That is why a
file is believed only when all of it has been read and its checksum is right. Anything else is a
miss and one warning (`logging`) for each file, and the file is replaced when its entry is saved
again. A save that fails is refused, with one warning for each reason.

The name of a file tells whose it is and what it continues, so the folder's listing is all the
budget needs: the last use of an entry is the time of its file, which a read sets. Files of other
models and versions count, and go when they are the oldest. Files with other names are let alone.

Several processes may use one directory, and several threads one store. What a process writes is
locked, so that another one, which removes what is left of killed ones when it starts, lets it be.
Each looks at the whole directory whenever it has written a `1 / SHARE` of the budget: n processes
together may exceed it by `(n - 1) / SHARE`.

Knows keys and bytes; no tokens, no rows, no buffers of the other store. Invariant: `read` gives
what was saved or says that it does not; nothing but a bad argument makes it, `find` or `save`
raise.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import secrets
import stat
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from deepinfer.errors import UserError, check_int
from deepinfer.store import segment
from deepinfer.store.chains import Chains, Evictions
from deepinfer.store.keys import FINGERPRINT_BYTES, check_key
from deepinfer.store.segment import HEADER_BYTES, VERSION, Bytes, Identity

ENTRY_NAME = re.compile(r"([0-9a-f]{32}-)([0-9a-f]{32})-([0-9a-f]{32})(\.kv[0-9]+)")
TEMPORARY_NAME = re.compile(r"saving-[0-9a-f]{16}\.part")
SHARE = 16
# A link is not followed; a pipe that has a file's name is not waited for.
READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC

log = logging.getLogger(__name__)


@dataclass(slots=True)
class DirectoryCounters(Evictions):
    """What a store did so far; its process only.

    Attributes:
        num_hits: files that were read and right.
        num_misses: calls of `find` or `read` that did not come to that.
        num_bad_files: warnings about files.
        bytes_saved, bytes_loaded: of content, in files written and in files read and right.
        num_refused_saves: calls of `save` after which the entry is not there.
    """

    num_hits: int = 0
    num_misses: int = 0
    num_bad_files: int = 0
    bytes_saved: int = 0
    bytes_loaded: int = 0
    num_refused_saves: int = 0


def file_name(identity: Identity) -> str:
    """The name of an entry's file. Made of numbers only, so it leads nowhere else."""
    model = identity.fingerprint.hex()
    return f"{model}-{identity.key:032x}-{identity.parent_or_zero:032x}.kv{VERSION}"


class DirectoryStore:
    """Entries of one model in a directory, within a budget.

    Args:
        path: the folder; made if it is not there. One that cannot be written to can be read.
        fingerprint: of the model (`deepinfer.store.keys.fingerprint`).
        budget_bytes: most bytes of all files of the directory, whoever wrote them.

    Raises:
        UserError: there is no such folder and it cannot be made, or it cannot be listed.
    """

    def __init__(self, path: Path, fingerprint: bytes, budget_bytes: int) -> None:
        check_int("budget_bytes", budget_bytes, 1)
        if len(fingerprint) != FINGERPRINT_BYTES:
            raise UserError(f"fingerprint: {len(fingerprint)} bytes; {FINGERPRINT_BYTES} expected")
        self.budget_bytes = budget_bytes
        self.counters = DirectoryCounters()
        self._path = path
        self._fingerprint = fingerprint
        # Of all below and the counters; not held while bytes move. `known` goes without it.
        self._lock = threading.Lock()
        self._sizes: dict[str, int] = {}  # of files by name, as this process knows them
        self._num_bytes = 0
        self._num_since_listing = 0  # bytes written
        self._warned: set[str] = set()  # names of files that are bad or gone
        self._refusals: set[str] = set()  # reasons, since the last save that was not refused
        try:
            path.mkdir(parents=True, exist_ok=True)
            _remove_leftovers(path)
            self._make_room(0, None)
        except OSError as error:
            raise UserError(f"{path}: not a folder to keep entries in: {error.strerror}") from error

    @property
    def num_bytes(self) -> int:
        """Bytes of the files, headers included, as this process knows them."""
        return self._num_bytes

    # -- looking and reading ---------------------------------------------------------------------

    def known(self, key: int, parent: int | None) -> int | None:
        """How many bytes the entry has by what this process saw last; None if it knows of none.

        Looks at no file and waits for nobody, so `read` may find it bad, or gone. One that there
        was a warning about counts as not there until it is saved again. What others save is known
        from the next listing on.
        """
        name = file_name(self._identity(key, parent))
        size = self._sizes.get(name, 0)
        return None if size < HEADER_BYTES or name in self._warned else size - HEADER_BYTES

    def find(self, key: int, parent: int | None) -> int | None:
        """How many bytes the entry has; None if there is none, or one that is seen to be bad.

        Reads the header only, so `read` may still find it bad, or gone.
        """
        identity = self._identity(key, parent)
        size = self._look(identity, lambda fd: segment.header_problem(fd, identity))
        with self._lock:
            self.counters.num_misses += size is None
            if size is not None:
                self._know(file_name(identity), size)
        return None if size is None else size - HEADER_BYTES

    def read(self, key: int, parent: int | None, into: Bytes) -> bool:
        """Fill `into`, uint8 of the length that `find` said, with the entry; whether it is right.

        If not, there is anything in `into`.
        """
        identity = self._identity(key, parent)
        size = self._look(identity, lambda fd: segment.read(fd, identity, into), use=True)
        with self._lock:
            self.counters.num_misses += size is None
            self.counters.num_hits += size is not None
            self.counters.bytes_loaded += 0 if size is None else len(into)
        return size is not None

    def distrust(self, key: int, parent: int | None, error: Exception) -> None:
        """Warn about an entry that could not be read or saved for a reason that nobody foresaw."""
        self._warn(file_name(self._identity(key, parent)), repr(error), error)

    # -- saving ----------------------------------------------------------------------------------

    def save(self, key: int, parent: int | None, content: Bytes) -> bool:
        """Write the entry, uint8 [bytes], which must not change meanwhile; whether it is there.

        Older files go if the budget asks for it: not what the entry continues, and none for an
        entry whose parent is not there.
        """
        identity = self._identity(key, parent)
        name, size = file_name(identity), HEADER_BYTES + len(content)
        if name not in self._warned and self._is_there(identity):
            return True
        try:
            if not self._make_room(size, identity):
                return self._refuse(f"no more room within {self.budget_bytes} bytes")
            self._write(identity, content)
        except OSError as error:
            return self._refuse(error.strerror or str(error))
        with self._lock:
            self._num_since_listing += size
            self._forget(name)
            self._know(name, size)
            self._warned.discard(name)
            self._refusals.clear()
            self.counters.bytes_saved += len(content)
        return True

    def _is_there(self, identity: Identity) -> bool:
        """Whether saving would change nothing, as far as a header tells. Counts as a use."""
        with self._lock:
            self._forget(file_name(identity))  # whoever removed it: it is about to be written
        size = self._look(identity, lambda fd: segment.header_problem(fd, identity), use=True)
        with self._lock:
            if size is not None:
                self._know(file_name(identity), size)
        return size is not None

    def _write(self, identity: Identity, content: Bytes) -> None:
        fd, temporary = self._new_temporary()
        try:
            segment.write(fd, identity, content)
            _use_now(fd)
            os.fsync(fd)  # before the rename; a rename that is lost is a miss, a torn file is worse
            os.replace(temporary, self._path / file_name(identity))
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
        finally:
            os.close(fd)

    def _new_temporary(self) -> tuple[int, Path]:
        """A new file, locked for as long as it is open."""
        while True:
            path = self._path / f"saving-{secrets.token_hex(8)}.part"
            fd = os.open(path, WRITE_FLAGS, 0o666)
            with suppress(OSError):  # a file system without locks: others cannot lock it either
                fcntl.flock(fd, fcntl.LOCK_EX)
            if os.fstat(fd).st_nlink:
                return fd, path
            os.close(fd)  # taken for a leftover before it was locked

    def _refuse(self, reason: str) -> bool:
        with self._lock:
            self.counters.num_refused_saves += 1
            known = reason in self._refusals
            self._refusals.add(reason)
        if not known:
            log.warning("%s: entries are not saved: %s", self._path, reason)
        return False

    # -- room ------------------------------------------------------------------------------------

    def _make_room(self, size: int, identity: Identity | None) -> bool:
        """Whether `size` bytes fit, after removing files if they did not; lists when it is time."""
        share = self.budget_bytes // SHARE
        with self._lock:
            over = self._num_bytes + size - self.budget_bytes
            if identity is not None and over <= 0 and self._num_since_listing + size <= share:
                return True
            chains, names = self._listed()
            over = self._num_bytes + size - self.budget_bytes
            if over <= 0 or size > self.budget_bytes:
                return over <= 0
            parent = None if identity is None else _place(file_name(identity))[1]
            if parent is not None and parent not in chains:
                return False
            # More than must go, so that the directory is not listed for every file.
            more = chains.choose(over + share, spare=parent)
            chosen = more or chains.choose(over, spare=parent) or []
            for place in chosen:
                fits = self._num_bytes + size <= self.budget_bytes
                if fits and place == chosen[-1]:
                    break  # so that, of few large files, none goes without need
                with suppress(OSError):
                    (self._path / names[place]).unlink(missing_ok=True)
                    self._forget(names[place])
                    self.counters.count(chains.remove(place))
            return self._num_bytes + size <= self.budget_bytes

    def _listed(self) -> tuple[Chains[str], dict[str, str]]:
        """The files as chains, those used longest ago first, and their names; all sizes anew."""
        found = []
        with os.scandir(self._path) as items:
            for item in items:
                if ENTRY_NAME.fullmatch(item.name):
                    with suppress(FileNotFoundError):  # another process removed it
                        status = item.stat(follow_symlinks=False)
                        if stat.S_ISREG(status.st_mode):
                            found.append((status.st_mtime_ns, item.name, status.st_size))
        chains, names, sizes = Chains[str](), {}, {}
        for _, name, size in sorted(found):
            own, parent = _place(name)
            if own in chains:  # somebody made a second file of one key
                own, parent = name, None
            chains.add(own, parent, size)
            names[own] = name
            sizes[name] = size
        self._sizes = sizes  # whole, for `known`
        self._num_bytes = chains.num_bytes
        self._num_since_listing = 0
        return chains, names

    def _know(self, name: str, size: int) -> None:
        if name not in self._sizes:
            self._sizes[name] = size
            self._num_bytes += size

    def _forget(self, name: str) -> bool:
        """Whether the file was known."""
        size = self._sizes.pop(name, None)
        self._num_bytes -= size or 0
        return size is not None

    # -- inside ----------------------------------------------------------------------------------

    def _identity(self, key: int, parent: int | None) -> Identity:
        check_key("key", key)
        if parent is not None:
            check_key("parent", parent)
        return Identity(self._fingerprint, key, parent)

    def _look(
        self, identity: Identity, problem_of: Callable[[int], str | None], *, use: bool = False
    ) -> int | None:
        """The size of an entry's file, if there is one without a problem."""
        name = file_name(identity)
        try:
            fd = os.open(self._path / name, READ_FLAGS)
        except FileNotFoundError:
            with self._lock:
                known = self._forget(name)
            if known:
                self._warn(name, "has vanished")
            return None
        except OSError as error:
            self._warn(name, error.strerror or str(error))
            return None
        try:
            status = os.fstat(fd)
            regular = stat.S_ISREG(status.st_mode)
            problem = problem_of(fd) if regular else "not a regular file"
            if problem is None and use:
                with suppress(OSError):  # not ours to change
                    _use_now(fd)
        except OSError as error:
            problem = error.strerror or str(error)
        finally:
            os.close(fd)
        if problem is None:
            return status.st_size
        self._warn(name, problem)
        return None

    def _warn(self, name: str, problem: str, error: Exception | None = None) -> None:
        with self._lock:
            if name in self._warned:
                return
            self._warned.add(name)
            self.counters.num_bad_files += 1
        path = self._path / name
        log.warning("%s: %s; counts as not there", path, problem, exc_info=error)


def _place(name: str) -> tuple[str, str | None]:
    """What the file of an entry and that of its parent are called in a `Chains`."""
    found = ENTRY_NAME.fullmatch(name)
    assert found is not None
    model, key, parent, version = found.groups()
    return f"{model}{key}{version}", f"{model}{parent}{version}" if int(parent, 16) else None


def _use_now(fd: int) -> None:
    """Make now the time of the file. The system's own `now` is the same for milliseconds."""
    now = time.time_ns()
    os.utime(fd, ns=(now, now))


def _remove_leftovers(path: Path) -> None:
    """Remove what killed processes were writing; what is locked is being written still."""
    for name in os.listdir(path):
        if not TEMPORARY_NAME.fullmatch(name):
            continue
        with suppress(OSError):  # gone, locked, or not ours to remove
            fd = os.open(path / name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                (path / name).unlink()
            finally:
                os.close(fd)
