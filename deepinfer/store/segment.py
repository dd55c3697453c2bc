"""The form of one file: a header that says whose bytes these are, the bytes, nothing else.

    offset   bytes   little-endian
    0        8       magic
    8        4       version of this form
    12       4       bytes of this header, 88
    16       16      fingerprint of the model (`deepinfer.store.keys`)
    32       16      key
    48       16      parent's key; 0 for the first of a chain
    64       8       bytes of the content
    72       16      BLAKE2b-128 of bytes 0 to 71 and the content
    88       ...     content

Knows open files, not names or folders. Invariant: what `read` calls right is, byte for byte, what
was written for the same fingerprint, key and parent.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from deepinfer.prefix_cache import KEY_BYTES

Bytes = NDArray[np.uint8]

MAGIC = b"DIKVSEG\n"
VERSION = 1
CHECKSUM_BYTES = 16
CHUNK_BYTES = 1 << 18  # hashed while the processor's cache still has it
_FIELDS = struct.Struct("<8sII16s16s16sQ")
HEADER_BYTES = _FIELDS.size + CHECKSUM_BYTES


@dataclass(frozen=True, slots=True)
class Identity:
    """Whose bytes: `fingerprint` (16 bytes) of the model, `key`, and `parent`, None for a first."""

    fingerprint: bytes
    key: int
    parent: int | None

    @property
    def parent_or_zero(self) -> int:
        """The parent as files have it, and as `chain` hashes it."""
        return self.parent or 0


def write(fd: int, identity: Identity, content: Bytes) -> None:
    """Fill an empty file. Raises OSError; what is in the file then is not whole."""
    fields = _FIELDS.pack(
        *(MAGIC, VERSION, HEADER_BYTES, identity.fingerprint),
        identity.key.to_bytes(KEY_BYTES, "little"),
        identity.parent_or_zero.to_bytes(KEY_BYTES, "little"),
        len(content),
    )
    digest = blake2b(fields, digest_size=CHECKSUM_BYTES)
    view = content.data
    offset = 0
    while offset < len(view):
        chunk = view[offset : offset + CHUNK_BYTES]
        digest.update(chunk)
        _write_all(fd, chunk, HEADER_BYTES + offset)
        offset += len(chunk)
    _write_all(fd, memoryview(fields + digest.digest()), 0)


def header_problem(fd: int, identity: Identity) -> str | None:
    """What is wrong with the header or the length of a file, None if nothing. Raises OSError."""
    return _check_header(os.pread(fd, HEADER_BYTES, 0), os.fstat(fd).st_size, identity)


def read(fd: int, identity: Identity, into: Bytes) -> str | None:
    """Read the content into a buffer of its length, uint8 [content bytes].

    Returns:
        What is wrong with the file, and the buffer then has anything; None if nothing is.

    Raises:
        OSError: it cannot be read.
    """
    header = os.pread(fd, HEADER_BYTES, 0)
    if problem := _check_header(header, os.fstat(fd).st_size, identity):
        return problem
    num_bytes = _FIELDS.unpack_from(header)[-1]
    if num_bytes != len(into):
        return f"{num_bytes} bytes of rows instead of {len(into)}"
    digest = blake2b(header[: _FIELDS.size], digest_size=CHECKSUM_BYTES)
    view = into.data
    offset = 0
    while offset < num_bytes:
        chunk = view[offset : offset + CHUNK_BYTES]
        count = os.preadv(fd, [chunk], HEADER_BYTES + offset)
        if not count:
            return "cut off while it was read"
        digest.update(chunk[:count])
        offset += count
    if digest.digest() != header[_FIELDS.size :]:
        return "corrupt: its checksum is another"
    return None


def _check_header(header: bytes, num_file_bytes: int, identity: Identity) -> str | None:
    """The checks that need no content, those first that explain most."""
    if len(header) < HEADER_BYTES:
        return f"cut off after {num_file_bytes} bytes"
    magic, version, header_bytes, model, key, parent, num_bytes = _FIELDS.unpack_from(header)
    if magic != MAGIC:
        return "not a file of this store"
    if version != VERSION:
        return f"of format version {version}, not {VERSION}"
    if header_bytes != HEADER_BYTES:
        return f"corrupt: a header of {header_bytes} bytes"
    if model != identity.fingerprint:
        return "rows of another model, geometry or row format"
    if int.from_bytes(key, "little") != identity.key:
        return "rows of other tokens"
    if int.from_bytes(parent, "little") != identity.parent_or_zero:
        return "rows behind another segment"
    expected = HEADER_BYTES + num_bytes
    if num_file_bytes != expected:
        cut = "cut off" if num_file_bytes < expected else "too long"
        return f"{cut}: {num_file_bytes} bytes instead of {expected}"
    return None


def _write_all(fd: int, view: memoryview, offset: int) -> None:
    """`pwrite` may take less than it is given, the last time before a disk is full."""
    while view:
        count = os.pwrite(fd, view, offset)
        view, offset = view[count:], offset + count
