"""What an entry is called: the key of a segment of a chain, and whose model's rows it has.

A chain is cut into segments of whole blocks, each at least `SEGMENT_TOKENS` long. A segment is
called by the key of its last block, which stands for all tokens before it, and its parent is the
segment before:

    block size 64     block keys   a b | c d | e        segments   b (no parent), d (parent b)

Segments and not blocks, because a request with state can go on only where its state was kept, which
is where a segment ends; and because a file costs its `fsync` however little is in it.

Knows configurations as data, not what they mean. Invariant: a fingerprint is the same in every
process, and another one if any field of the configurations or any file of the weights is another.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from fractions import Fraction
from hashlib import blake2b
from pathlib import Path

from deepinfer.errors import UserError, check_int, is_int
from deepinfer.prefix_cache import KEY_BYTES

SEGMENT_TOKENS = 128  # how often the state of a request is kept
FINGERPRINT_BYTES = 16
WEIGHT_FILES = (".json", ".safetensors")


@dataclass(frozen=True, slots=True)
class Segment:
    """Blocks `first_block` up to `end_block` of a chain, without the latter; `parent` None: the
    first."""

    key: int
    parent: int | None
    first_block: int
    end_block: int


def segment_blocks(block_size: int) -> int:
    """Blocks of a segment: as many as have `SEGMENT_TOKENS` tokens, or the next more."""
    check_int("block_size", block_size, 1)
    return -(-SEGMENT_TOKENS // block_size)


def segments(block_keys: Sequence[int], block_size: int) -> list[Segment]:
    """The whole segments of a chain, first one first.

    Args:
        block_keys: the chained hashes of its full blocks (`deepinfer.prefix_cache.chain`).
        block_size: tokens of a block.
    """
    step = segment_blocks(block_size)
    ends = range(step, len(block_keys) + 1, step)
    keys = [block_keys[end - 1] for end in ends]
    return [
        Segment(key, parent, end - step, end)
        for key, parent, end in zip(keys, [None, *keys], ends, strict=False)
    ]


def state_key(segment_key: int) -> int:
    """The key of the state at the end of a segment, an entry that continues the segment's.

    BLAKE2b with a digest of 16 bytes over the segment's key, little-endian, personalized `state`.
    """
    check_key("segment_key", segment_key)
    digest = blake2b(
        segment_key.to_bytes(KEY_BYTES, "little"), digest_size=KEY_BYTES, person=b"state"
    )
    return int.from_bytes(digest.digest(), "little")


def check_key(what: str, key: object) -> None:
    """Raise a UserError unless `key` is an integer of `KEY_BYTES` bytes, as `chain` makes them."""
    if not is_int(key) or not 0 <= key < 1 << 8 * KEY_BYTES:
        raise UserError(f"{what}: {key!r}; expected an integer of {KEY_BYTES} bytes, 0 or more")


def fingerprint(*parts: object) -> bytes:
    """16 bytes that stand for whatever rows depend on beside their tokens.

    Args:
        parts: configurations (dataclasses), numbers, names, or collections of these: the model's
            configuration, which has its geometry, row format and seed; the block size; the device.
            A `Path`, also within them, stands for the weights in that folder: its name, and the
            names, sizes and times of its `.json` and `.safetensors` files.

    Raises:
        UserError: a part of another kind, or a folder that cannot be read.
    """
    text = json.dumps([_plain(part) for part in parts], sort_keys=True, ensure_ascii=True)
    return blake2b(text.encode("ascii"), digest_size=FINGERPRINT_BYTES).digest()


def _plain(value: object) -> object:
    """`value` as JSON has it, so that different values of any two kinds differ."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float | Fraction):
        return [type(value).__name__, repr(value)]  # NaN and infinities, too, have one spelling
    if is_dataclass(value) and not isinstance(value, type):
        own = {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
        return [type(value).__name__, own]
    if isinstance(value, Path):
        return ["weights", _files(value)]
    if isinstance(value, Mapping):
        return ["mapping", sorted([str(key), _plain(own)] for key, own in value.items())]
    if isinstance(value, list | tuple):
        return ["sequence", *map(_plain, value)]
    raise UserError(f"fingerprint: {value!r:.80}; expected a configuration, a number or a name")


def _files(folder: Path) -> list[object]:
    """The folder, and what tells its weights from others without reading them."""
    try:
        files = sorted(file for file in folder.iterdir() if file.suffix in WEIGHT_FILES)
        stats = [(file.name, file.stat()) for file in files]
        named = [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]
        return [str(folder.resolve()), *named]
    except OSError as error:
        raise UserError(f"{folder}: cannot read the weights: {error.strerror or error}") from error
