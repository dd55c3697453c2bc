"""What draft layers a model has, as data: MTP (V4) or a DSpark block (V4.1).

MTP is one layer that guesses a token at a time. It reads the streams behind the model's last layer
and the token that followed; then its own streams and the token it guessed. A DSpark block is
guessed at once by several layers, and corrected from left to right by a table of pairs of tokens.

The first V4 checkpoints have one MTP layer; those of 0731 have DSpark in its place, as V4.1 has.
Here the family decides: V4 has MTP, V4.1 has DSpark.

Knows the keys of `config.json`; no tensors, no torch. Invariant: a plan that passed `check()` names
layers and tokens there are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deepinfer.errors import UserError, check_int


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """The model's own draft layers. Each sees a window alone, and has experts of its own.

    Attributes:
        num_layers: of them.
        n_routed_experts, num_experts_per_tok: of each.
        block_size: tokens of a block; 0 = one at a time (MTP).
        noise_id: of a block, the token id that stands where nothing is guessed yet.
        targets: the model's layers whose inputs a block reads.
        markov_rank: width of the table of pairs.
    """

    num_layers: int
    n_routed_experts: int
    num_experts_per_tok: int
    block_size: int = 0
    noise_id: int = 0
    targets: tuple[int, ...] = ()
    markov_rank: int = 0

    def check(self, vocab_size: int, num_layers: int) -> None:
        """Raise UserError, naming the key, for draft layers that a model of `num_layers` cannot
        have."""
        check_int("num_nextn_predict_layers", self.num_layers, 1)
        if not self.block_size:
            if self.num_layers > 1:
                raise UserError(f"num_nextn_predict_layers: {self.num_layers}; MTP is one layer")
            return
        check_int("dspark_block_size", self.block_size, 1)
        check_int("dspark_markov_rank", self.markov_rank, 1)
        if not 0 < self.num_experts_per_tok <= self.n_routed_experts:
            raise UserError(
                f"dspark_num_experts_per_tok: {self.num_experts_per_tok} of "
                f"{self.n_routed_experts} experts"
            )
        if not 0 <= self.noise_id < vocab_size:
            raise UserError(
                f"dspark_noise_token_id: {self.noise_id}; token ids are 0 to {vocab_size - 1}"
            )
        in_order = sorted(set(self.targets))
        if not in_order or list(self.targets) != in_order or in_order[-1] >= num_layers:
            raise UserError(
                f"dspark_target_layer_ids: {list(self.targets)}; expected layers of 0 to "
                f"{num_layers - 1}, at least one, in order"
            )


def mtp_plan(raw: Mapping[str, Any]) -> DraftPlan | None:
    """The MTP layer of a V4 `config.json`; its experts are as many as every layer's."""
    num_layers = raw.get("num_nextn_predict_layers", 0)
    if not num_layers:
        return None
    return DraftPlan(num_layers, raw["n_routed_experts"], raw["num_experts_per_tok"])


def dspark_plan(raw: Mapping[str, Any]) -> DraftPlan | None:
    """The DSpark layers of a V4.1 `config.json`; numbers of experts left out are the model's."""
    if not raw.get("dspark_block_size"):
        return None
    return DraftPlan(
        raw["num_nextn_predict_layers"],
        raw.get("dspark_n_routed_experts") or raw["n_routed_experts"],
        raw.get("dspark_num_experts_per_tok") or raw["num_experts_per_tok"],
        raw["dspark_block_size"],
        raw["dspark_noise_token_id"],
        tuple(raw["dspark_target_layer_ids"]),
        raw["dspark_markov_rank"],
    )
