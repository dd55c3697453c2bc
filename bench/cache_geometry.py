"""What a profile's cache is made of: bytes of a token, a block, a slot and the whole pool.

Knows the two kinds of model by their configurations; loads no torch and allocates nothing.
Invariant: the bytes are those the engine allocates for the same profile.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

from bench.model_schema import QWEN3
from bench.schema import Profile
from bench.spec import UNMEASURED, engine_config, model_config
from deepinfer.config import EngineConfig, ModelConfig
from deepinfer.models.hybrid.geometry import Geometry, PagedRows, Region
from deepinfer.models.hybrid.layer_plan import HybridConfig
from deepinfer.sizing import num_state_slots

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class CacheGeometry:
    """The cache of a profile.

    Attributes:
        profile, family: what it is of.
        block_size: token positions per block.
        paged: rows that every block holds, by layer and kind.
        slot: regions of a state slot; empty for a model without state.
        ring_len: rows of a window ring, None without state.
        stored_bytes, bytes_per_slot: 0 without state.
        num_blocks, num_slots: block 0 and slot 0 included; no number of blocks if it is measured.
    """

    profile: str
    family: str
    block_size: int
    paged: tuple[PagedRows, ...]
    slot: tuple[Region, ...]
    ring_len: int | None
    stored_bytes: int
    bytes_per_slot: int
    num_blocks: int | None
    num_slots: int

    @property
    def bytes_per_token(self) -> Fraction:
        """Bytes of paged rows that one more token costs in the long run."""
        return sum((Fraction(rows.bytes_per_row, rows.ratio) for rows in self.paged), Fraction(0))

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers."""
        return sum(rows.bytes_per_block for rows in self.paged)

    @property
    def tag_bytes_per_block(self) -> int:
        """Bytes beside a block while its rows are tagged: one tag for all rows of a ratio."""
        return 8 * sum({rows.ratio: rows.rows_per_block for rows in self.paged}.values())

    @property
    def pool(self) -> tuple[tuple[str, int | None, int, int | None], ...]:
        """What is allocated: name, number, bytes of each, bytes of all."""
        blocks, each = self.num_blocks, self.bytes_per_block
        parts = [("blocks", blocks, each, None if blocks is None else blocks * each)]
        if self.num_slots:
            states = self.num_slots * self.bytes_per_slot
            parts.append(("state slots", self.num_slots, self.bytes_per_slot, states))
        return tuple(parts)

    def to_dict(self) -> dict[str, Any]:
        """Strict-JSON form."""
        token = self.bytes_per_token
        return {
            "profile": self.profile,
            "family": self.family,
            "block_size": self.block_size,
            "ring_len": self.ring_len,
            "bytes_per_token": int(token) if token.denominator == 1 else float(token),
            "bytes_per_block": self.bytes_per_block,
            "bytes_per_slot": self.bytes_per_slot,
            "stored_bytes": self.stored_bytes,
            "pool": [
                dict(zip(("name", "number", "bytes_each", "bytes"), part, strict=True))
                for part in self.pool
            ],
            "paged": [
                asdict(rows) | {"bytes_per_block": rows.bytes_per_block} for rows in self.paged
            ],
            "slot": [asdict(region) | {"bytes": region.num_bytes} for region in self.slot],
        }


def cache_geometry(profile: Profile) -> CacheGeometry:
    """The cache that an engine with this profile's settings has.

    Raises UserError for a block size the model's ratios do not allow.
    """
    return cache_of(profile.name, model_config(profile), engine_config(profile.engine))


def cache_of(name: str, config: ModelConfig | HybridConfig, engine: EngineConfig) -> CacheGeometry:
    """The cache of a model and an engine; `name` is their profile's. Raises as `cache_geometry`."""
    if isinstance(config, ModelConfig):
        return CacheGeometry(
            profile=name,
            family=QWEN3,
            block_size=engine.block_size,
            paged=tuple(_keys_and_values(config, engine.block_size)),
            slot=(),
            ring_len=None,
            stored_bytes=0,
            bytes_per_slot=0,
            num_blocks=_num_blocks(engine),
            num_slots=0,
        )
    return _hybrid(name, config, engine)


def _hybrid(name: str, config: HybridConfig, engine: EngineConfig) -> CacheGeometry:
    geometry = Geometry.of(config.served(engine.uses_draft_layers), engine.block_size)
    return CacheGeometry(
        profile=name,
        family=config.family,
        block_size=engine.block_size,
        paged=geometry.paged,
        slot=geometry.slot,
        ring_len=geometry.ring_len,
        stored_bytes=geometry.stored_bytes,
        bytes_per_slot=geometry.bytes_per_slot,
        num_blocks=_num_blocks(engine),
        num_slots=num_state_slots(engine.max_num_seqs, engine.num_state_slots),
    )


def _num_blocks(engine: EngineConfig) -> int | None:
    return None if engine.num_blocks == UNMEASURED else engine.num_blocks


def _keys_and_values(config: ModelConfig, block_size: int) -> list[PagedRows]:
    row = config.num_key_value_heads * config.head_dim * _DTYPE_BYTES[config.dtype]
    return [
        PagedRows(layer, kind, 1, block_size, row)
        for layer in range(config.num_hidden_layers)
        for kind in ("keys", "values")
    ]
