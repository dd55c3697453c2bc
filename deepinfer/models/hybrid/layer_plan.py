"""What each layer of a hybrid network reads, keeps and shares, as data.

Every layer attends to a sliding window of its own (a ring in the request's state slot). A layer
with a ratio also reads compressed rows, one per `ratio` tokens, of which some layers are the source
and the later ones the readers:

    window only   ratio 0
    source        makes rows (`compressor`), and usually index keys to score them by
    selector      scores the rows of its source and selects the best for itself and its readers
    reader        reads the rows of `source` that `selector` selected

    V4     csa        source and selector of itself, ratio 4, overlapping pools, position bias
           hca        source without index, ratio 128: every visible row is read (`selector` None)
    V4.1   full       source and selector
           reindex    reads an earlier source, selects anew
           reuse      reads an earlier source with an earlier selection

Knows no tensors and no storage; no torch. Invariant: source and selector of a layer are itself or
come before it, and a layer has its own window whatever else it reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from deepinfer.config import EngineConfig, ModelConfig
from deepinfer.errors import UserError, check_int
from deepinfer.models.hybrid.draft_plan import DraftPlan, dspark_plan, mtp_plan

V4, V41 = "deepseek_v4", "deepseek_v41"
FAMILIES = (V4, V41)
SLIDING, CSA, HCA = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)


@dataclass(frozen=True, slots=True)
class Compressor:
    """How `ratio` tokens become one row.

    Attributes:
        gated: rows are pooled by a softmax over the group; otherwise (ratio 1) just projected.
        overlap: a group's pool also has the first series of the group before it (V4 ratio 4).
        position_bias: the gate has a learned bias by position in the group.
    """

    ratio: int
    gated: bool
    overlap: bool
    position_bias: bool

    @property
    def open_rows(self) -> int:
        """Positions whose projections must be kept while their group is open."""
        if not self.gated:
            return 0
        return 2 * self.ratio if self.overlap else self.ratio


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer.

    Attributes:
        index: its number, from 0.
        ratio: tokens per compressed row it reads; 0 = none.
        compressor: if it is a source.
        source: the layer whose compressed rows it reads; None with ratio 0.
        selector: the layer whose selection it reads them by; None = every visible row.
        index_keys: of a source with an index: `latent` (from the row before its rotation, V4.1) or
            `pooled` (by a compressor of its own, V4); None without.
        candidates: `publish` (restricts later selectors), `obey`, or None.
        engram: whether n-gram embeddings are added before it.
        router: `bias` (experts by score + bias) or `hash` (by a table over token ids).
    """

    index: int
    ratio: int = 0
    compressor: Compressor | None = None
    source: int | None = None
    selector: int | None = None
    index_keys: str | None = None
    candidates: str | None = None
    engram: bool = False
    router: str = "bias"

    @property
    def is_selector(self) -> bool:
        """Whether it scores rows itself."""
        return self.selector == self.index


@dataclass(frozen=True, slots=True)
class Yarn:
    """YaRN scaling of the frequencies of layers with a ratio; cos and sin are not scaled."""

    factor: float = 16.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    original_max_position_embeddings: int = 65536


@dataclass(frozen=True, slots=True)
class Engram:
    """N-gram embeddings of the last tokens (V4.1); the tables come with the weights.

    Attributes:
        max_ngram_size: tokens of the longest n-gram; `max_ngram_size - 1` ids are looked back.
        num_heads: hashes per n-gram size.
        head_dim: width of one looked-up row.
        pad_id: the token id that stands before the start.
        num_embeddings: rows of each Engram layer's table, in layer order.
        vocab_size: below the smallest modulus of a hash.
        compressed_vocab_size: ids that `token_map` maps token ids to.
    """

    max_ngram_size: int
    num_heads: int
    head_dim: int
    pad_id: int
    num_embeddings: tuple[int, ...]
    vocab_size: int
    compressed_vocab_size: int

    @property
    def look_back(self) -> int:
        """Token ids of each request to be kept between steps."""
        return self.max_ngram_size - 1

    @property
    def columns(self) -> int:
        """Rows looked up per token."""
        return (self.max_ngram_size - 1) * self.num_heads


@dataclass(frozen=True, slots=True)
class HybridConfig:
    """Geometry of a hybrid network; names follow the families' `config.json`.

    `dtype` is a torch dtype name (of weights and activations). `cache` names the row format
    (`deepinfer.models.hybrid.formats`). `qat`: the V4.1 cache quantisers are applied, whatever the
    row format stores. `seed` draws the weights where none are given.
    """

    family: str
    layers: tuple[Layer, ...]
    vocab_size: int
    hidden_size: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    yarn: Yarn = field(default_factory=Yarn)
    candidate_topk_blocks: int = 0
    candidate_block_size: int = 8
    routed_scaling_factor: float = 1.5
    swiglu_limit: float = 10.0
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    rms_norm_eps: float = 1e-20
    engram: Engram | None = None
    draft: DraftPlan | None = None
    num_stored_layers: int = 0
    max_draft_tokens: int = 5
    dtype: str = "float32"
    cache: str = "fp32"
    qat: bool = False
    seed: int = 0

    @property
    def num_hidden_layers(self) -> int:
        """Layers in all."""
        return len(self.layers)

    @property
    def sources(self) -> tuple[Layer, ...]:
        """Layers that make compressed rows, in order."""
        return tuple(layer for layer in self.layers if layer.compressor is not None)

    @property
    def ring_len(self) -> int:
        """Rows of a window ring: the window, and a step's rows that may be rolled back.

        128 + 1 + 5 drafts = 134 rows in V4.1: a verify step of six rows leaves a full window before
        it whatever is rejected.
        """
        return self.sliding_window + 1 + self.max_draft_tokens

    @property
    def single_pass(self) -> bool:
        """Whether a sublayer's mix is used by the next one (V4.1), not by itself (V4)."""
        return self.family == V41

    @property
    def draft_layers(self) -> tuple[Layer, ...]:
        """The draft layers, numbered behind the model's own."""
        first = len(self.layers)
        return tuple(Layer(first + i) for i in range(self.draft.num_layers if self.draft else 0))

    @property
    def of_draft_layers(self) -> HybridConfig:
        """The sizes of the draft layers."""
        assert self.draft is not None, "this model has none"
        num, chosen = self.draft.n_routed_experts, self.draft.num_experts_per_tok
        return replace(self, n_routed_experts=num, num_experts_per_tok=chosen)

    @property
    def kept_width(self) -> int:
        """Numbers kept of each of a request's last tokens for the draft layers to go on from.

        MTP reads the streams behind the model's last layer. A block reads rows of its rings alone.
        """
        reads_streams = self.draft is not None and not self.draft.block_size
        return self.hc_mult * self.hidden_size if reads_streams else 0

    def served(self, with_drafts: bool) -> HybridConfig:
        """The same with its draft layers, or without them where nobody asks them.

        Raises UserError if they are asked for and the model has none.
        """
        if with_drafts and self.draft is None:
            raise UserError(
                f"drafter: 'mtp' asks the model's own draft layers, and this {self.family} model "
                "has none",
                hint="a config that has some says num_nextn_predict_layers",
            )
        return self if with_drafts else replace(self, draft=None)

    def check(self) -> None:
        """Raise UserError, naming the key, for a geometry this network cannot have."""
        if self.family not in FAMILIES:
            raise UserError(f"family: {self.family!r} is not one of {', '.join(FAMILIES)}")
        if not self.layers:
            raise UserError("layers: none; at least one")
        for key in (
            *("vocab_size", "hidden_size", "num_attention_heads", "head_dim", "q_lora_rank"),
            *("qk_rope_head_dim", "o_groups", "o_lora_rank", "sliding_window", "index_n_heads"),
            *("index_head_dim", "index_topk", "moe_intermediate_size", "n_routed_experts"),
            *("num_experts_per_tok", "hc_mult", "hc_sinkhorn_iters"),
        ):
            check_int(key, getattr(self, key), 1)
        if self.qk_rope_head_dim % 2 or self.qk_rope_head_dim > self.head_dim:
            raise UserError(
                f"qk_rope_head_dim: {self.qk_rope_head_dim}; must be even and at most head_dim "
                f"{self.head_dim}"
            )
        if self.index_head_dim < self.qk_rope_head_dim:
            raise UserError(
                f"index_head_dim: {self.index_head_dim}; at least qk_rope_head_dim "
                f"{self.qk_rope_head_dim}, the part that is rotated"
            )
        if self.num_attention_heads % self.o_groups:
            raise UserError(
                f"o_groups: {self.o_groups} does not divide {self.num_attention_heads} heads"
            )
        if self.num_experts_per_tok > self.n_routed_experts:
            raise UserError(
                f"num_experts_per_tok: {self.num_experts_per_tok} of "
                f"{self.n_routed_experts} experts"
            )
        if self.draft is not None:
            self.draft.check(self.vocab_size, len(self.layers))
        if any(layer.candidates for layer in self.layers):  # without candidates nothing is read
            check_int("candidate_topk_blocks", self.candidate_topk_blocks, 1)
            check_int("candidate_block_size", self.candidate_block_size, 1)
        if self.engram is not None and not 0 <= self.engram.pad_id < self.vocab_size:
            raise UserError(
                f"engram_pad_id: {self.engram.pad_id}; token ids are 0 to {self.vocab_size - 1}"
            )


def check_drafts(model: ModelConfig | HybridConfig, config: EngineConfig) -> None:
    """Raise UserError if `config` asks for drafts that a model of either kind has no layers or no
    room for."""
    if isinstance(model, HybridConfig):
        if config.drafts > model.max_draft_tokens:
            raise UserError(
                f"drafts: {config.drafts}; the rings of this model have room for "
                f"{model.max_draft_tokens} (max_draft_tokens)"
            )
        model.served(config.uses_draft_layers)
    elif config.uses_draft_layers:
        raise UserError(
            f"drafter: {config.drafter!r} asks the model's own draft layers, and a Qwen3 model has "
            "none",
            hint="drafter: ngram",
        )


def v41_config(raw: Mapping[str, Any], **overrides: Any) -> HybridConfig:
    """A V4.1 network from the keys of its `config.json` (text part).

    Layers of `kv_source_layer_ids` are full, others of `index_source_layer_ids` reindex, the rest
    with a ratio reuse; `compress_ratios` says what a layer reads.
    """
    ratios = list(raw["compress_ratios"])[: raw["num_hidden_layers"]]
    sources, selectors = set(raw["kv_source_layer_ids"]), set(raw["index_source_layer_ids"])
    publisher = raw.get("candidate_source_layer_id")
    engrams = list(raw.get("engram_layer_ids", ()))
    layers: list[Layer] = []
    source = selector = None
    for index, ratio in enumerate(ratios):
        if not ratio:
            layers.append(Layer(index, engram=index in engrams))
            continue
        source = index if index in sources else source
        selector = index if index in selectors else selector
        if source is None or selector is None:
            raise UserError(
                f"compress_ratios: layer {index} reads rows, and no source is before it"
            )
        candidates = None
        if publisher is not None and index in selectors and index >= publisher:
            candidates = "publish" if index == publisher else "obey"
        own = index in sources
        if own and candidates == "obey":
            raise UserError(
                f"kv_source_layer_ids: layer {index} is behind the candidate source {publisher}, "
                "whose candidates are not rows of it"
            )
        layers.append(
            Layer(
                index,
                ratio,
                Compressor(ratio, gated=ratio > 1, overlap=False, position_bias=False)
                if own
                else None,
                source,
                selector,
                index_keys="latent" if own else None,
                candidates=candidates,
                engram=index in engrams,
            )
        )
    engram = None
    if engrams:
        engram = Engram(
            raw["engram_max_ngram_size"],
            raw["engram_n_heads"],
            raw["engram_head_dim"],
            raw["engram_pad_id"],
            tuple(raw["engram_num_embeddings"]),
            raw["engram_vocab_size"],
            raw["engram_compressed_vocab_size"],
        )
    shared = _shared(raw)
    shared.update(
        qk_rope_head_dim=raw["qk_rope_head_dim"],
        rope_theta=raw["rope_theta"],
        compress_rope_theta=raw["compress_rope_theta"],
        yarn=_yarn(raw["rope_scaling"]),
        candidate_topk_blocks=raw.get("candidate_topk_blocks", 0),
        candidate_block_size=raw.get("candidate_block_size", 8),
        engram=engram,
        draft=dspark_plan(raw),
    )
    return HybridConfig(V41, tuple(layers), **{**shared, **overrides})


def v4_config(raw: Mapping[str, Any], **overrides: Any) -> HybridConfig:
    """A V4 network from the keys of transformers' `DeepseekV4Config`."""
    kinds, routers = raw["layer_types"], raw["mlp_layer_types"]
    layers = []
    for index, (kind, router) in enumerate(zip(kinds, routers, strict=True)):
        route = "hash" if router == "hash_moe" else "bias"
        if kind == SLIDING:
            layers.append(Layer(index, router=route))
            continue
        ratio, is_csa = raw["compress_rates"][kind], kind == CSA
        layers.append(
            Layer(
                index,
                ratio,
                Compressor(ratio, gated=True, overlap=is_csa, position_bias=True),
                source=index,
                selector=index if is_csa else None,
                index_keys="pooled" if is_csa else None,
                router=route,
            )
        )
    rope = raw["rope_parameters"]
    main, compress = rope.get("main", rope), rope.get("compress", rope)
    shared = _shared(raw)
    shared.update(
        qk_rope_head_dim=round(raw["partial_rotary_factor"] * raw["head_dim"]),
        rope_theta=main.get("rope_theta", 10000.0),
        compress_rope_theta=compress.get("rope_theta", 160000.0),
        yarn=_yarn(compress),
        draft=mtp_plan(raw),
    )
    return HybridConfig(V4, tuple(layers), **{**shared, **overrides})


def _shared(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Keys that both families have under one name."""
    keys = (
        *("vocab_size", "hidden_size", "num_attention_heads", "head_dim", "q_lora_rank"),
        *("o_groups", "o_lora_rank", "sliding_window", "index_n_heads", "index_head_dim"),
        *("index_topk", "moe_intermediate_size", "n_routed_experts", "num_experts_per_tok"),
        *("routed_scaling_factor", "swiglu_limit", "hc_mult", "hc_sinkhorn_iters", "hc_eps"),
        "rms_norm_eps",
    )
    return {key: raw[key] for key in keys}


def _yarn(raw: Mapping[str, Any]) -> Yarn:
    return Yarn(
        float(raw["factor"]),
        float(raw["beta_fast"]),
        float(raw["beta_slow"]),
        int(raw["original_max_position_embeddings"]),
    )
