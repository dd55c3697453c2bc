"""`env --geometry` and `--sizing`: a profile's cache and memory as text or JSON.

Knows how they are written; `bench.cache_geometry` and `bench.probes.sizing` know the numbers.
Invariant: both forms have every byte, and layers that are alike share a line of the text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from bench.cache_geometry import CacheGeometry
from bench.schema import AUTO
from bench.spec import UNMEASURED, engine_config
from deepinfer.models.hybrid.geometry import (
    IDS,
    OPEN,
    OPEN_INDEX,
    POSITIONS,
    STREAMS,
    WINDOW,
    Region,
)

if TYPE_CHECKING:
    from bench.probes.sizing import MeasuredSizing
    from bench.schema import Profile

MIB = 2**20
_REGIONS = {
    WINDOW: "window ring",
    OPEN: "open group, fp32",
    OPEN_INDEX: "open group of keys, fp32",
    IDS: "token ids, int64",
    STREAMS: "streams",
    POSITIONS: "ring positions, int64",
}


def render_geometry(cache: CacheGeometry, format_name: str) -> str:
    """The geometry as `text` or `json`, ending with a line break."""
    if format_name == "json":
        return json.dumps(cache.to_dict(), indent=2, allow_nan=False) + "\n"
    parts = [_facts(cache), _pool(cache), _paged(cache)]
    if cache.slot:
        parts.append(_slot(cache))
    return "\n\n".join(parts) + "\n"


def render_sizing(profile: Profile, measured: MeasuredSizing, format_name: str) -> str:
    """The waterfall as `text` or `json`, ending with a line break."""
    sizing, asked = measured.sizing, engine_config(profile.engine).num_blocks
    is_auto = asked == UNMEASURED
    if format_name == "json":
        document = {
            "profile": profile.name,
            "num_blocks_of_profile": AUTO if is_auto else asked,
            "fits": asked <= sizing.num_blocks,
            **measured.to_dict(),
        }
        return json.dumps(document, indent=2, allow_nan=False) + "\n"
    lines = [*sizing.lines, ("for blocks", sizing.bytes_for_blocks)]
    rows = [(name, f"{size:,}", f"{size / MIB:,.1f}") for name, size in lines]
    steps = " and ".join(
        f"{sum(step):,} tokens in {len(step)} prompt{'s' if len(step) > 1 else ''}"
        for step in measured.steps
    )
    remarks = [
        f"{sizing.num_blocks:,} blocks of {measured.needs.bytes_per_block:,} bytes fit, block 0 "
        "and row tags included",
        "the profile has auto: a run gets what fits" if is_auto else _compared(asked, measured),
        f"steps run: {steps}",
        *measured.notes,
    ]
    return _grid(("memory", "bytes", "MiB"), rows) + "\n\n" + "\n".join(remarks) + "\n"


def _compared(asked: int, measured: MeasuredSizing) -> str:
    """Whether a profile's own number fits."""
    spare = measured.sizing.num_blocks - asked
    if spare < 0:
        return f"the profile has {asked:,}: does NOT fit, {-spare:,} too many"
    return f"the profile has {asked:,}: fits"


def _facts(cache: CacheGeometry) -> str:
    token = cache.bytes_per_token
    facts = [
        ("profile", cache.profile),
        ("family", cache.family),
        ("block size", f"{cache.block_size} tokens"),
        ("bytes per token", f"{int(token):,}" if token.denominator == 1 else f"{float(token):,}"),
        ("bytes per block", f"{cache.bytes_per_block:,}"),
    ]
    if cache.ring_len is None:
        facts.append(("bytes per slot", "- (this family keeps no state beside its blocks)"))
    else:
        facts += [
            ("bytes per slot", f"{cache.bytes_per_slot:,}"),
            ("  of it stored", f"{cache.stored_bytes:,}"),
            ("ring", f"{cache.ring_len} rows"),
        ]
    return "\n".join(f"{name:<16} {value}" for name, value in facts)


def _pool(cache: CacheGeometry) -> str:
    rows, whole = [], 0
    for name, number, each, total in cache.pool:
        if number is None or total is None:
            rows.append((name, AUTO, f"{each:,}", "-", "-"))
            continue
        rows.append((name, f"{number:,}", f"{each:,}", f"{total:,}", f"{total / MIB:,.1f}"))
        whole += total
    if cache.num_blocks is not None:
        rows.append(("together", "", "", f"{whole:,}", f"{whole / MIB:,.1f}"))
    return _grid(("pool", "number", "bytes each", "bytes", "MiB"), rows)


def _paged(cache: CacheGeometry) -> str:
    alike: dict[tuple[object, ...], list[int]] = {}
    for rows in cache.paged:
        key = (rows.kind, rows.ratio, rows.rows_per_block, rows.bytes_per_row, rows.bytes_per_block)
        alike.setdefault(key, []).append(rows.layer)
    return _grid(
        ("rows in a block", "layers", "ratio", "rows", "bytes per row", "bytes of a layer"),
        [
            (str(kind), _ranges(layers), *(f"{number:,}" for number in numbers))
            for (kind, *numbers), layers in alike.items()
        ],
    )


def _slot(cache: CacheGeometry) -> str:
    rows = []
    for (what, *_), found in groupby(
        cache.slot,
        lambda part: (_what(part), part.num_rows, part.bytes_per_row, part.stored),
    ):
        parts = list(found)
        first = parts[0]
        rows.append(
            (
                what,
                _ranges(part.layer for part in parts if part.layer is not None),
                f"{first.offset:,}",
                f"{first.num_rows:,}",
                f"{first.bytes_per_row:,}",
                f"{first.num_bytes:,}",
                "yes" if first.stored else "no",
            )
        )
    headers = ("regions of a slot", "layers", "offset", "rows", "bytes per row", "bytes of one")
    return _grid((*headers, "stored"), rows)


def _what(region: Region) -> str:
    return f"{_REGIONS[region.kind]}{', draft layers' if region.draft else ''}"


def _ranges(layers: Iterable[int]) -> str:
    """`0-3, 7`; `all` for what is no single layer's."""
    layers = list(layers)
    spans = []
    for _, run in groupby(enumerate(layers), lambda pair: pair[1] - pair[0]):
        numbers = [layer for _, layer in run]
        span = (numbers[0], numbers[-1])
        spans.append(f"{span[0]}" if span[0] == span[1] else f"{span[0]}-{span[1]}")
    return ", ".join(spans) or "all"


def _grid(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    from tabulate import tabulate

    align = ["left" if name in ("layers", "stored", headers[0]) else "right" for name in headers]
    return tabulate(rows, headers=headers, tablefmt="simple", disable_numparse=True, colalign=align)
