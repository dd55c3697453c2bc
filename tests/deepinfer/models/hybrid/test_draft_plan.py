"""Draft layers from the keys of a `config.json`, and what a model cannot have."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deepinfer.errors import UserError
from deepinfer.models.hybrid.draft_plan import DraftPlan, dspark_plan, mtp_plan
from deepinfer.models.hybrid.layer_plan import Layer, v4_config
from tests.hybrid_configs import dspark, v4_raw

MODEL = {"n_routed_experts": 6, "num_experts_per_tok": 2}
BLOCK = DraftPlan(3, 4, 1, 5, 60, (1, 3), 6)
MTP = DraftPlan(1, 6, 2)


def test_keys_of_both_families():
    """A block has experts of its own, or as many as the model; MTP has the model's."""
    assert dspark_plan({**MODEL, **dspark([1, 3])}) == DraftPlan(3, 4, 1, 5, 60, (1, 3), 6)
    shared = {name: value for name, value in dspark([1]).items() if "exp" not in name}
    assert dspark_plan({**MODEL, **shared}) == DraftPlan(3, 6, 2, 5, 60, (1,), 6)
    assert mtp_plan({**MODEL, "num_nextn_predict_layers": 1}) == DraftPlan(1, 6, 2)
    assert mtp_plan(MODEL) is dspark_plan(MODEL) is None
    assert dspark_plan({**MODEL, "num_nextn_predict_layers": 3}) is None


def test_draft_layers_are_numbered_behind_the_model():
    """Each with a window alone; a model that is not asked has none."""
    config = v4_config({**v4_raw(ratios=(4, 16), window=8), "num_nextn_predict_layers": 1})
    assert config.draft_layers == (Layer(4),)
    assert config.kept_width == 4 * 32
    assert config.served(False).draft_layers == ()
    assert config.served(False).kept_width == 0
    assert config.served(True) is config
    with pytest.raises(UserError, match="this deepseek_v4 model has none"):
        config.served(False).served(True)


@pytest.mark.parametrize(
    ("plan", "changes", "message"),
    [
        (MTP, {"num_layers": 2}, "num_nextn_predict_layers: 2; MTP is one layer"),
        (BLOCK, {"num_layers": 0}, "num_nextn_predict_layers"),
        (BLOCK, {"num_experts_per_tok": 5}, "dspark_num_experts_per_tok: 5 of 4 experts"),
        (BLOCK, {"noise_id": 61}, "dspark_noise_token_id: 61; token ids are 0 to 60"),
        (BLOCK, {"targets": ()}, r"dspark_target_layer_ids: \[\]; expected layers of 0 to 3"),
        (BLOCK, {"targets": (2, 4)}, r"dspark_target_layer_ids: \[2, 4\]"),
        (BLOCK, {"targets": (3, 1)}, "in order"),
        (BLOCK, {"markov_rank": 0}, "dspark_markov_rank"),
    ],
)
def test_what_cannot_be_is_refused(plan: DraftPlan, changes: dict[str, object], message: str):
    """With the key it comes from."""
    plan.check(61, 4)
    with pytest.raises(UserError, match=message):
        replace(plan, **changes).check(61, 4)
