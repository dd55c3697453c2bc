"""The dense hybrid reference: equal to the golden values, to transformers, and causal."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bench.dense.hybrid import HybridDense
from bench.verify import DenseReference, Emission, Tolerances
from deepinfer.models.hybrid.layer_plan import (
    CSA,
    HCA,
    SLIDING,
    v4_config,
    v41_config,
)
from deepinfer.models.hybrid.loading import draw_weights, load_weights
from tests.golden_models import GoldenModel, load_golden
from tests.hybrid_configs import v4_raw, v41_raw
from tests.transformers_models import transformers_v4, true_float64

CHOICES = ("selected", "candidates", "experts", "engram_hash")
NAMES = ("v41_a", "v41_b", "v4_a")


@pytest.fixture(scope="module", params=NAMES)
def golden(request: pytest.FixtureRequest) -> GoldenModel:
    return load_golden(request.param)


def dense_of(model: GoldenModel, kind: str, dtype: torch.dtype = torch.float32) -> HybridDense:
    """The reference of a golden run of `kind`: `raw` or `qat`, `_noengram` or not."""
    config = replace(model.config, qat=kind.startswith("qat"))
    return HybridDense(model.weights, config, dtype=dtype, engram=not kind.endswith("_noengram"))


def largest_difference(ours: Tensor, golden: np.ndarray[Any, Any]) -> float:
    """Over all finite values; infinity if they are not infinite, or of a shape, alike."""
    theirs = torch.from_numpy(golden)
    if ours.shape != theirs.shape or not torch.equal(ours.isfinite(), theirs.isfinite()):
        return math.inf
    finite = theirs.isfinite()
    return float((ours[finite] - theirs[finite]).abs().max()) if finite.any() else 0.0


def test_logits_equal_the_golden_ones(golden: GoldenModel) -> None:
    """Every run in the file, raw and quantised, with and without Engram, in both precisions."""
    bounds = {"raw": 5e-5, "raw_noengram": 5e-5, "qat": 1e-3, "qat_noengram": 1e-3}
    runs = [name for name in golden.values if ".logits" in name]
    assert len(runs) >= 4
    for name in runs:
        kind, which, value = name.split(".")
        wide = value == "logits_f64"
        dense = dense_of(golden, kind, torch.float64 if wide else torch.float32)
        difference = largest_difference(dense.logits(golden.ids(int(which))), golden.values[name])
        assert difference < (1e-5 if wide else bounds[kind]), name


@pytest.mark.parametrize("kind", ["raw", "qat"])
def test_values_between_equal_the_golden_ones(golden: GoldenModel, kind: str) -> None:
    """Every checkpoint in the file is met, every choice is the same one."""
    if kind == "qat" and not golden.config.single_pass:
        pytest.skip("no quantised values of V4")
    noted: dict[str, Tensor] = {}
    dense_of(golden, kind).logits(golden.ids(0), noted.__setitem__)
    prefix = f"{kind}.0."
    names = [
        name.removeprefix(prefix)
        for name in golden.values
        if name.startswith(prefix) and "logits" not in name
    ]
    assert len(names) > 15
    for name in names:
        theirs = golden.values[prefix + name]
        layer, _, what = name.rpartition(".")
        if what == "window_kv_tail":
            ours = noted[f"{layer}.window_kv"][-len(theirs) :]
        elif what == "selected":
            ours = row_numbers(noted[name], theirs.shape[1])
        else:
            ours = noted[name]
        if what in CHOICES:
            np.testing.assert_array_equal(ours.numpy(), theirs, err_msg=name)
        else:
            assert largest_difference(ours, theirs) < 5e-5, name


def row_numbers(selected: Tensor, width: int) -> Tensor:
    """bool [T, G] as ascending row numbers [T, width], padded with -1."""
    rows = torch.full((len(selected), width), -1)
    for query, chosen in enumerate(selected):
        numbers = chosen.nonzero()[:, 0]
        rows[query, : len(numbers)] = numbers
    return rows


# ---- V4 and transformers ----


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("ratios", "window", "num"), [((4, 16), 8, 60), ((4, 128), 128, 260)], ids=["mini", "real"]
)
def test_v4_equals_transformers_in_float64(ratios: tuple[int, int], window: int, num: int) -> None:
    """With transformers' casts redirected to float64, every logit agrees to 1e-10."""
    raw = v4_raw(ratios=ratios, window=window)
    model = transformers_v4(raw)
    token_ids = torch.randint(raw["vocab_size"], (num,), generator=torch.Generator().manual_seed(7))
    with true_float64(), torch.no_grad():
        theirs = model(input_ids=token_ids[None], use_cache=False).logits[0]
    config = v4_config(model.config.to_dict())
    weights = load_weights(config, model.state_dict())
    ours = HybridDense(weights, config, dtype=torch.float64).logits(token_ids)
    assert theirs.abs().max() > 1
    torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=0)


# ---- other sizes ----

OTHERS = {
    "reuse-first": v41_config(v41_raw([1, 1, 0, 1], sources=[0], selectors=[0, 3], publisher=0)),
    "two-ratios": v41_config(
        v41_raw([0, 2, 2, 1, 1], sources=[1, 3], selectors=[1, 2, 3, 4], publisher=3)
    ),
    "ratio-4": v41_config(v41_raw([4, 4, 0], sources=[0], selectors=[0], publisher=None), seed=3),
    "engram": v41_config(
        v41_raw([0, 2, 1], sources=[1, 2], selectors=[1, 2], publisher=2, engram=[0, 2])
    ),
    "v4": v4_config(v4_raw(ratios=(4, 16), window=8)),
    "v4-other": v4_config(
        v4_raw(ratios=(2, 8), window=5, layers=[HCA, CSA, SLIDING, CSA], head_dim=64), seed=5
    ),
}


@pytest.mark.parametrize("qat", [False, True], ids=["raw", "qat"])
@pytest.mark.parametrize("name", OTHERS)
def test_a_prefix_has_the_first_logits_of_the_whole(name: str, qat: bool) -> None:
    """Nothing later is seen: cut anywhere, also inside a group, the logits before are the same."""
    config = replace(OTHERS[name], qat=qat)
    if qat and config.index_head_dim % 32:
        pytest.skip("index keys narrower than a quantiser's block")
    dense = HybridDense(draw_weights(config, torch.float64), config, dtype=torch.float64)
    token_ids = torch.randint(config.vocab_size, (41,), generator=torch.Generator().manual_seed(1))
    whole = dense.logits(token_ids)
    for num in (1, 2, 3, 4, 7, 8, 9, 16, 17, 23, 32, 40):
        torch.testing.assert_close(dense.logits(token_ids[:num]), whole[:num], atol=1e-9, rtol=0)


@pytest.mark.parametrize("name", OTHERS)
def test_the_past_is_read_beyond_the_window(name: str) -> None:
    """Another first token changes the last logits, by way of compressed rows."""
    config = OTHERS[name]
    dense = HybridDense(draw_weights(config), config)
    token_ids = torch.arange(41) % config.vocab_size
    other = token_ids.clone()
    other[0] += 1
    assert not torch.equal(dense.logits(token_ids)[-1], dense.logits(other)[-1])


def test_packed_rows_are_quantised_as_in_training() -> None:
    """`cache: packed` has the logits of `qat`, which are not those of plain rows."""
    model = load_golden("v41_b")
    logits = {
        name: HybridDense(model.weights, replace(model.config, **changes)).logits(model.ids(1))
        for name, changes in {
            "plain": {},
            "packed": {"cache": "packed"},
            "qat": {"qat": True},
            "bf16": {"cache": "bf16"},
        }.items()
    }
    assert torch.equal(logits["packed"], logits["qat"])
    assert (logits["packed"] - logits["plain"]).abs().max() > 0.01
    assert (logits["bf16"] - logits["plain"]).abs().max() > 1e-4


def test_queries_in_pieces_read_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of queries that attend at once changes no logit beyond rounding."""
    model = load_golden("v41_b")
    dense = HybridDense(model.weights, model.config, dtype=torch.float64)
    whole = dense.logits(model.ids(0))
    monkeypatch.setattr("bench.dense.hybrid_attention.QUERIES", 7)
    torch.testing.assert_close(dense.logits(model.ids(0)), whole, atol=1e-12, rtol=0)


# ---- the verdict ----


def greedy(dense: HybridDense, prompt: list[int], num: int) -> Emission:
    """What an engine without a fault emits after `prompt`."""
    tokens, logprobs = list(prompt), []
    for _ in range(num):
        last = dense.logits(torch.tensor(tokens))[-1].log_softmax(-1)
        tokens.append(int(last.argmax()))
        logprobs.append(float(last.max()))
    return Emission(tokens, len(prompt), 0.0, 0, logprobs)


@pytest.mark.parametrize("name", NAMES)
def test_emitted_tokens_are_judged(name: str) -> None:
    """Right tokens are right, one that was replaced is wrong where it stands."""
    model = load_golden(name)
    reference = DenseReference(model.weights, model.config)
    dense = HybridDense(model.weights, model.config)
    right = [greedy(dense, model.ids(0)[:n].tolist(), 6) for n in (11, 11, 20)]
    wrong_ids = [*right[0].token_ids[:-1], (right[0].token_ids[-1] + 1) % model.config.vocab_size]
    verdicts = reference.check_all(
        [*right, replace(right[0], token_ids=wrong_ids)], Tolerances(1e-3, 2e-4)
    )
    assert [verdict.wrong for verdict in verdicts] == [False, False, False, True]
    assert verdicts[3].wrong_positions == (16,)
