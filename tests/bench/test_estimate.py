"""What a run will cost: from earlier results, or by a rule that says it is one."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from bench.estimate import FLOPS, estimate_round, num_parameters
from bench.history import SavedCell
from bench.spec import Resolved
from deepinfer.models.hybrid.layer_plan import v4_config, v41_config
from deepinfer.names import DEVICES
from tests.bench.tiny import PLAIN, ROOT, tiny, workload

AXES = {"release": "deferred"}


def saved(**changes: Any) -> SavedCell:
    """A saved cell of the workload `test` on cpu-tiny."""
    values: dict[str, Any] = {
        "folder": "a",
        "workload": "test",
        "profile": "cpu-tiny",
        "started_at": "2026",
        "status": "complete",
        "host": "here",
        "commit": None,
        "config_hash": "abc",
        "metadata": {},
        "mean_round_s": 4.0,
        "axes": AXES,
        "unsafe": False,
        "baseline": True,
        "rounds": 3,
        "failure": "",
        "metrics": {},
    }
    return SavedCell(**{**values, **changes})


@pytest.fixture
def resolved() -> Resolved:
    """Four requests of 40 + 12 tokens."""
    return tiny(workload(PLAIN))


def test_earlier_runs_of_the_cell_say_it(resolved: Resolved) -> None:
    """The median of those with the same workload, profile and axes; others do not count."""
    earlier = [saved(mean_round_s=cost) for cost in (2.0, 9.0, 3.0)]
    others = [
        saved(mean_round_s=None),
        saved(mean_round_s=100.0, axes={"release": "step"}),
        saved(mean_round_s=100.0, profile="h200"),
        saved(mean_round_s=100.0, workload="other"),
    ]
    found = estimate_round(AXES, resolved, [*earlier, *others])
    assert (found.round_s, found.source) == (3.0, "3 earlier runs")
    assert estimate_round(AXES, resolved, earlier[:1]).source == "1 earlier run"


def test_without_one_a_rule_is_named(resolved: Resolved) -> None:
    """2 operations a parameter and token, twice, at the stated speed."""
    found = estimate_round(AXES, resolved, [])
    expected = 4 * num_parameters(resolved.model) * 4 * (40 + 12) / FLOPS["cpu"]
    assert found.round_s == pytest.approx(expected)
    assert found.source == "rule: 5e10 FLOP/s, never run before"


def test_a_round_lasts_at_least_until_its_last_request(resolved: Resolved) -> None:
    """Arrivals are waited for."""
    slow = tiny(workload({**PLAIN, "arrival": {"every_s": 30.0}}))
    assert estimate_round(AXES, slow, []).round_s == pytest.approx(90.0)


def test_turns_and_phases_count() -> None:
    """A turn computes all that was said before it; thinking and phases take their time in turn."""
    talk = {"count": 3, "prompt_tokens": 8, "think_s": 100.0}
    plain = {"count": 2, "prompt_tokens": 40, "output_tokens": 12}
    found = estimate_round(AXES, tiny(workload({**plain, "turns": talk})), [])
    assert found.round_s == pytest.approx(200.0)
    later = {**plain, "phase": 2, "arrival": {"at_s": 50.0}}
    found = estimate_round(AXES, tiny(workload({**plain, "turns": talk}, later)), [])
    assert found.round_s == pytest.approx(250.0)
    soon = tiny(workload({**plain, "turns": {**talk, "think_s": 0.0}}))
    tokens = 2 * (52 + 72 + 92)
    expected = 4 * num_parameters(soon.model) * tokens / FLOPS["cpu"]
    assert estimate_round(AXES, soon, []).round_s == pytest.approx(expected)


def test_children_count(resolved: Resolved) -> None:
    """Three children of 8 tokens are 24 tokens more."""
    forked = tiny(workload({**PLAIN, "fork": {"children": 3, "output_tokens": 8}}))
    more = estimate_round(AXES, forked, []).round_s / estimate_round(AXES, resolved, []).round_s
    assert more == pytest.approx((52 + 24) / 52)


def test_parameters_are_those_a_token_meets(resolved: Resolved) -> None:
    """Of the layers' matrices and the head; a tied head counts once."""
    model = dataclasses.replace(
        resolved.model,
        num_hidden_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        intermediate_size=16,
        vocab_size=32,
    )
    assert num_parameters(model) == 8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 16 + 8 * 32


@pytest.mark.parametrize("name", ["v41_a", "v41_b", "v4_a"])
def test_parameters_of_a_hybrid_model_are_those_of_its_checkpoint(name: str) -> None:
    """Every matrix but embeddings, of the experts those a token is routed to."""
    data = np.load(ROOT / "tests" / "golden" / f"{name}.npz")
    raw = json.loads(str(data["config_json"]))
    config = v4_config(raw) if name == "v4_a" else v41_config(raw)
    no_matrix = ("embed", "position_bias", "tid2eid", "q_weight", "k_weight")
    total = 0
    for key in data.files:
        if key.startswith("w.") and data[key].ndim > 1 and not any(no in key for no in no_matrix):
            routed = config.num_experts_per_tok if ".experts." in key else 1
            total += data[key].size * routed // (len(data[key]) if routed > 1 else 1)
    assert num_parameters(config) == total


def test_every_device_has_a_speed() -> None:
    """The rule covers whatever a profile may name."""
    assert set(FLOPS) == set(DEVICES)
