"""What `model:` of a profile may say, by family: keys, types, ranges and what must agree.

The keys are those of each family's `config.json`; a few of ours come with them. Knows nothing of
engines. Invariant: settings made here have a network: `config()` does not fail.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from bench.strict import Count, PositiveFloat, Seed, Strict, Text, conflict
from deepinfer.errors import UserError
from deepinfer.models.hybrid.engram_tables import engram_tables
from deepinfer.models.hybrid.geometry import Geometry
from deepinfer.models.hybrid.layer_plan import (
    CSA,
    HCA,
    SLIDING,
    V4,
    V41,
    HybridConfig,
    v4_config,
    v41_config,
)

QWEN3 = "qwen3"
FAMILIES = (QWEN3, V4, V41)
GEOMETRY = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
)
# Of `HybridConfig`, and in no `config.json`.
_OURS = {"dtype", "cache", "qat", "seed", "num_stored_layers", "max_draft_tokens"}

VocabSize = Annotated[int, Field(ge=2, lt=2**31)]
Natural = Annotated[int, Field(ge=0, lt=2**31)]
Naturals = Annotated[tuple[Natural, ...], Field(strict=False)]
Counts = Annotated[tuple[Count, ...], Field(strict=False)]
Dtype = Literal["float32", "bfloat16", "float16"]


class ModelSettings(Strict):
    """A geometry with weights drawn from `seed`, or `path`: a Hugging Face folder that has both."""

    family: Literal["qwen3"] = "qwen3"
    path: Text | None = None
    num_hidden_layers: Count | None = None
    hidden_size: Count | None = None
    num_attention_heads: Count | None = None
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    intermediate_size: Count | None = None
    vocab_size: Annotated[int, Field(ge=2)] | None = None
    rope_theta: PositiveFloat = 1e6
    rms_norm_eps: PositiveFloat = 1e-6
    tie_word_embeddings: bool = True
    dtype: Dtype = "float32"
    seed: Seed = 0

    @model_validator(mode="after")
    def _agree(self) -> ModelSettings:
        if self.path is not None:
            beside = sorted(self.model_fields_set - {"family", "path", "dtype"})
            if beside:
                raise conflict(f"`path` beside {', '.join(beside)}", "path alone, or a geometry")
            return self
        missing = [name for name in GEOMETRY if getattr(self, name) is None]
        if missing:
            raise conflict(f"missing {', '.join(missing)}", "a whole geometry, or path")
        heads, kv_heads, head_dim = (
            self.num_attention_heads,
            self.num_key_value_heads,
            self.head_dim,
        )
        assert heads is not None
        assert kv_heads is not None
        assert head_dim is not None
        if heads % kv_heads:
            raise conflict(
                f"query heads do not share KV heads evenly (got {heads} and {kv_heads})",
                "num_attention_heads a multiple of num_key_value_heads",
            )
        if head_dim % 2:
            raise conflict(f"head_dim cannot be halved (got {head_dim})", "an even number")
        return self


class HybridSettings(Strict):
    """The keys that both hybrid families have; weights are drawn from `seed`.

    `cache`: how rows are stored. `qat`: rows are rounded as V4.1 does, however they are stored.
    `num_stored_layers`: whose windows a store of finished requests would keep.
    """

    vocab_size: VocabSize
    hidden_size: Count
    num_attention_heads: Count
    head_dim: Count
    q_lora_rank: Count
    o_groups: Count
    o_lora_rank: Count
    sliding_window: Count
    index_n_heads: Count
    index_head_dim: Count
    index_topk: Count
    moe_intermediate_size: Count
    n_routed_experts: Count
    num_experts_per_tok: Count
    routed_scaling_factor: PositiveFloat = 1.5
    swiglu_limit: PositiveFloat = 10.0
    hc_mult: Count = 4
    hc_sinkhorn_iters: Count = 20
    hc_eps: PositiveFloat = 1e-6
    dtype: Dtype = "float32"
    cache: Literal["fp32", "bf16", "packed"] = "fp32"
    qat: bool = False
    num_stored_layers: Natural = 0
    max_draft_tokens: Natural = 5
    seed: Seed = 0

    def config(self) -> HybridConfig:
        """The network of these settings. Raises UserError if there is none."""
        raise NotImplementedError

    def _raw(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Keys as in `config.json`, and those of ours."""
        dumped = self.model_dump(exclude={"family"}, exclude_none=True)
        ours = {name: dumped.pop(name) for name in _OURS}
        return dumped, ours

    @model_validator(mode="after")
    def _has_a_network(self) -> HybridSettings:
        try:
            config = self.config()
            config.check()
            _check_readers(config)
            # The block size is the engine's; with one that all ratios divide the rest is checked.
            Geometry.of(config, math.lcm(*(layer.ratio for layer in config.sources)))
        except UserError as error:
            raise PydanticCustomError("refused", "{text}", {"text": str(error)}) from error
        return self


class RopeScaling(Strict):
    """YaRN, for the layers that read compressed rows."""

    factor: PositiveFloat = 16.0
    beta_fast: PositiveFloat = 32.0
    beta_slow: PositiveFloat = 1.0
    original_max_position_embeddings: Count = 65536


class V41Settings(HybridSettings):
    """A DeepSeek-V4.1 text model, by the keys of its `config.json`."""

    family: Literal["deepseek_v41"]
    num_hidden_layers: Count
    qk_rope_head_dim: Count
    compress_ratios: Naturals
    kv_source_layer_ids: Naturals
    index_source_layer_ids: Naturals
    candidate_source_layer_id: Natural | None = None
    candidate_topk_blocks: Natural = 0
    candidate_block_size: Count = 8
    rms_norm_eps: PositiveFloat = 1e-20
    rope_theta: PositiveFloat = 10000.0
    compress_rope_theta: PositiveFloat = 160000.0
    rope_scaling: RopeScaling = RopeScaling()
    engram_layer_ids: Naturals = ()
    engram_num_embeddings: Counts | None = None
    engram_vocab_size: Count | None = None
    engram_compressed_vocab_size: Count | None = None
    engram_max_ngram_size: Annotated[int, Field(ge=2, le=64)] | None = None
    engram_n_heads: Count | None = None
    engram_head_dim: Count | None = None
    engram_pad_id: Natural | None = None
    num_nextn_predict_layers: Natural = 0
    dspark_block_size: Natural = 0
    dspark_noise_token_id: Natural | None = None
    dspark_target_layer_ids: Naturals = ()
    dspark_markov_rank: Count | None = None
    dspark_n_routed_experts: Count | None = None
    dspark_num_experts_per_tok: Count | None = None

    def config(self) -> HybridConfig:
        """The network of these settings. Raises UserError if there is none."""
        raw, ours = self._raw()
        _check_layer_ids(self)
        _check_draft_keys(self)
        config = v41_config(raw, **ours)
        if config.engram is not None:
            engram_tables(config.engram, self.engram_layer_ids)  # refuses other numbers of rows
        return config


class RopeBase(Strict):
    """Rotary frequencies of the layers that only see their window."""

    rope_theta: PositiveFloat = 10000.0


class CompressedRope(RopeScaling):
    """Rotary frequencies of the layers that read compressed rows."""

    rope_theta: PositiveFloat = 160000.0


class RopeParameters(Strict):
    """Rotary frequencies by kind of layer."""

    main: RopeBase = RopeBase()
    compress: CompressedRope = CompressedRope()


class CompressRates(Strict):
    """Tokens per compressed row, by kind of layer."""

    compressed_sparse_attention: Count
    heavily_compressed_attention: Count


V4Layers = Literal[
    "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
]
assert V4Layers.__args__ == (SLIDING, CSA, HCA)  # type: ignore[attr-defined]


class V4Settings(HybridSettings):
    """A DeepSeek-V4 model, by the keys of its `config.json`."""

    family: Literal["deepseek_v4"]
    layer_types: Annotated[tuple[V4Layers, ...], Field(strict=False)]
    mlp_layer_types: Annotated[tuple[Literal["hash_moe", "moe"], ...], Field(strict=False)]
    compress_rates: CompressRates
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1)] = 0.125
    rms_norm_eps: PositiveFloat = 1e-6
    rope_parameters: RopeParameters = RopeParameters()
    num_nextn_predict_layers: Natural = 0

    def config(self) -> HybridConfig:
        """The network of these settings. Raises UserError if there is none."""
        if len(self.layer_types) != len(self.mlp_layer_types):
            raise UserError(
                f"layer_types: {len(self.layer_types)} layers, and mlp_layer_types has "
                f"{len(self.mlp_layer_types)}"
            )
        raw, ours = self._raw()
        return v4_config(raw, **ours)


def _check_layer_ids(settings: V41Settings) -> None:
    """Layer numbers are those of layers, and an Engram has all of its keys."""
    num_layers, ratios = settings.num_hidden_layers, settings.compress_ratios
    if len(ratios) < num_layers:
        raise UserError(f"compress_ratios: {len(ratios)} numbers for {num_layers} layers")
    for key in ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids"):
        for layer in getattr(settings, key):
            if layer >= num_layers:
                raise UserError(f"{key}: {layer}; layers are 0 to {num_layers - 1}")
            if key != "engram_layer_ids" and not ratios[layer]:
                raise UserError(f"{key}: {layer}; layer {layer} has no rows: its ratio is 0")
    publisher = settings.candidate_source_layer_id
    if publisher is not None and publisher not in settings.index_source_layer_ids:
        raise UserError(f"candidate_source_layer_id: {publisher} is not in index_source_layer_ids")
    if settings.engram_layer_ids:
        names = [name for name in V41Settings.model_fields if name.startswith("engram_")]
        missing = [name for name in names if getattr(settings, name) is None]
        if missing:
            raise UserError(f"engram_layer_ids: needs {', '.join(missing)} too")


def _check_draft_keys(settings: V41Settings) -> None:
    """A DSpark block has all of its keys, and without one no draft layers are named."""
    given = settings.model_fields_set
    optional = {"dspark_n_routed_experts", "dspark_num_experts_per_tok"}
    names = [name for name in V41Settings.model_fields if name.startswith("dspark_")]
    names.append("num_nextn_predict_layers")
    if settings.dspark_block_size:
        missing = [name for name in names if name not in optional | given]
        if missing:
            raise UserError(f"dspark_block_size: needs {', '.join(missing)} too")
    elif beside := [name for name in names if getattr(settings, name)]:
        raise UserError(f"{beside[0]}: draft layers are those of a block", hint="dspark_block_size")


def _check_readers(config: HybridConfig) -> None:
    """What a layer reads was made at its ratio, and selected from the rows it reads."""
    for layer in config.layers:
        if layer.source is None:
            continue
        source = config.layers[layer.source]
        if source.ratio != layer.ratio:
            raise UserError(
                f"layer {layer.index} reads rows of ratio {layer.ratio}, and its source, layer "
                f"{source.index}, makes them at {source.ratio}"
            )
        if layer.selector is not None and config.layers[layer.selector].source != layer.source:
            raise UserError(
                f"layer {layer.index} reads the rows of layer {layer.source} as selected from "
                f"other rows, by layer {layer.selector}; a source of rows must be an index source "
                "too"
            )


def _family(model: Any) -> str:
    """The tag of the settings class; a tag is no key, as its brackets show."""
    if isinstance(model, (ModelSettings, V41Settings, V4Settings)):
        return f"<{model.family}>"
    return f"<{model.get('family', QWEN3) if isinstance(model, dict) else QWEN3}>"


AnyModel = Annotated[
    Annotated[ModelSettings, Tag("<qwen3>")]
    | Annotated[V41Settings, Tag("<deepseek_v41>")]
    | Annotated[V4Settings, Tag("<deepseek_v4>")],
    Discriminator(_family),
]
