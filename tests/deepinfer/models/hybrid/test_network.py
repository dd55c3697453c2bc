"""The network through its paged, chunked and forked cache: equal to golden values and to itself."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from bench.dense.hybrid import HybridDense
from deepinfer.device.cpu import SteppedCpuDevice
from deepinfer.models.hybrid.layer_plan import (
    CSA,
    HCA,
    SLIDING,
    HybridConfig,
    v4_config,
    v41_config,
)
from deepinfer.models.hybrid.loading import draw_weights, load_weights
from deepinfer.models.hybrid.weights import HybridWeights
from tests.deepinfer.hybrid_steps import Request, Steps, chunked
from tests.golden_models import GoldenModel, load_golden
from tests.hybrid_configs import v4_raw, v41_raw
from tests.transformers_models import transformers_v4, true_float64

NAMES = ("v41_a", "v41_b", "v4_a")
RAW, QAT = 5e-5, 1e-3  # bounds of the golden README


golden = cache(load_golden)


def without_engram(weights: HybridWeights) -> HybridWeights:
    return replace(weights, layers=tuple(replace(part, engram=None) for part in weights.layers))


def largest_difference(ours: Tensor, theirs: np.ndarray | Tensor) -> float:
    return float((ours - torch.as_tensor(theirs)).abs().max())


def check_choices(model: GoldenModel, request: Request) -> None:
    """Rows, candidates, experts and hashes of every token are the golden ones."""
    num = 0
    for name, values in model.values.items():
        kind, which, *rest = name.split(".")
        if kind != "raw" or which != "0" or len(rest) != 2:
            continue
        layer, what = int(rest[0][1:]), rest[1]
        if what not in ("selected", "candidates", "experts", "engram_hash"):
            continue
        num += 1
        ours = request.chosen[layer, what]
        # Tokens that see no row are not asked; they are the first.
        asked = range(len(values) - len(ours), len(values))
        for position, value in zip(asked, ours, strict=True):
            expected = values[position]
            if what == "candidates":
                visible = (position + 1) // model.config.layers[layer].ratio
                assert value[:visible].tolist() == expected[:visible].tolist(), name
            elif what == "engram_hash":
                assert value.tolist() == expected.tolist(), name
            else:
                chosen = sorted(value[value >= 0].tolist())
                assert chosen == expected[expected >= 0].tolist(), name
        unasked = values[: len(values) - len(ours)]
        assert (unasked <= 0).all(), name
    assert num >= 6


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("block_size", "size"),
    [(4, 60), (4, 1), (4, 3), (4, 6), (4, 7), (4, 30), (16, 60), (16, 1), (16, 7)],
)
def test_logits_and_choices_are_the_golden_ones(
    name: str, block_size: int, size: int, device: SteppedCpuDevice
) -> None:
    """At every position, however the tokens are spread over steps and blocks."""
    model = golden(name)
    steps = Steps(model.config, model.weights, device, block_size=block_size)
    request = steps.sequence(model.values["ids.0"], state=2)
    logits = steps.run(request, chunked(60, size))
    assert largest_difference(logits, model.values["raw.0.logits"]) < RAW
    check_choices(model, request)
    assert steps.wrong_rows == 0


@pytest.mark.parametrize("cache_format", ["fp32", "packed"])
@pytest.mark.parametrize("name", ["v41_a", "v41_b"])
@pytest.mark.parametrize("size", [60, 1, 7])
def test_quantised_logits_are_the_golden_ones(
    name: str, size: int, cache_format: str, device: SteppedCpuDevice
) -> None:
    """With the quantisers on floats, and with rows that are really packed."""
    model = golden(name)
    config = replace(model.config, qat=cache_format == "fp32", cache=cache_format)
    for which in (0, 1):
        steps = Steps(config, model.weights, device)
        ids = model.values[f"ids.{which}"]
        logits = steps.run(steps.sequence(ids, state=1), chunked(len(ids), size))
        assert largest_difference(logits, model.values[f"qat.{which}.logits"]) < QAT


@pytest.mark.parametrize("size", [60, 7])
def test_engram_can_be_left_out(size: int, device: SteppedCpuDevice) -> None:
    """The same weights without their n-gram embeddings."""
    model = golden("v41_b")
    for kind, bound in (("raw", RAW), ("qat", QAT)):
        config = replace(model.config, qat=kind == "qat")
        steps = Steps(config, without_engram(model.weights), device)
        logits = steps.run(steps.sequence(model.values["ids.0"], state=1), chunked(60, size))
        assert largest_difference(logits, model.values[f"{kind}_noengram.0.logits"]) < bound


@pytest.mark.parametrize("name", NAMES)
def test_requests_of_one_step_do_not_meet(name: str, device: SteppedCpuDevice) -> None:
    """Decodes, equal and unequal chunks of several requests in one step, slots in any order."""
    model = golden(name)
    steps = Steps(model.config, model.weights, device, num_blocks=80)
    first, second = model.values["ids.0"], model.values["ids.1"]
    a, b = steps.sequence(first, state=4), steps.sequence(second, state=1)
    c, d = steps.sequence(first, state=3), steps.sequence(second[:20], state=2)
    steps.step((a, 20), (b, 20), (c, 3))
    steps.step((b, 1), (a, 1), (d, 1), (c, 9))
    while a.computed < 60:
        parts = [(a, min(2, 60 - a.computed)), (c, 1), (d, 3), (b, 1)]
        steps.step(*((s, n) for s, n in parts if s.computed + n <= len(s.tokens)))
    steps.step((c, 60 - c.computed), (b, 40 - b.computed))
    for request, which in ((a, 0), (b, 1), (c, 0), (d, 1)):
        expected = model.values[f"raw.{which}.logits"][: request.computed]
        assert largest_difference(request.all_logits, expected) < RAW
    check_choices(model, a)
    assert steps.wrong_rows == 0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("at", [1, 21, 30, 47])
def test_fork_continues_from_copied_state(name: str, at: int, device: SteppedCpuDevice) -> None:
    """Complete blocks are shared, the partial one and the slot copied: parent and child differ
    from then on, and each equals its own single run."""
    model = golden(name)
    steps = Steps(model.config, model.weights, device, num_blocks=100)
    ids = model.values["ids.0"].tolist()
    parent = steps.sequence(ids, state=5)
    steps.run(parent, chunked(at, 6))
    own = ids[:at] + ids[: 60 - at][::-1]
    child = steps.sequence(own, state=3)
    whole, part = divmod(at, steps.block_size)
    child.table[:whole] = parent.table[:whole]
    child.computed = at
    steps.copy([(parent.table[whole], child.table[whole])] if part else [], [(5, 3)])
    while child.computed < 60:
        steps.step((child, 1), (parent, 1))
    alone = steps.sequence(own, state=1)
    expected = steps.run(alone, [60])
    assert largest_difference(child.all_logits, expected[at:]) < RAW
    assert largest_difference(parent.all_logits, model.values["raw.0.logits"]) < RAW
    assert steps.wrong_rows == 0


@pytest.mark.parametrize("name", NAMES)
def test_slot_and_blocks_change_hands_without_clearing(name: str, device: SteppedCpuDevice) -> None:
    """The next owner reads nothing of the last one, and no row of it is counted as wrong."""
    model = golden(name)
    steps = Steps(model.config, model.weights, device)
    last = steps.sequence(model.values["ids.0"], state=2)
    steps.run(last, chunked(60, 7))
    for size in (40, 1, 5):
        again = Request(model.values["ids.1"].tolist(), last.table[::-1], state=2)
        logits = steps.run(again, chunked(40, size))
        assert largest_difference(logits, model.values["raw.1.logits"]) < RAW
    assert steps.wrong_rows == 0


def test_recomputing_the_last_tokens_changes_nothing(device: SteppedCpuDevice) -> None:
    """As many tokens as may be drafted can be taken back and computed again without an undo."""
    for name in NAMES:
        model = golden(name)
        steps = Steps(model.config, model.weights, device)
        ids = model.values["ids.0"].tolist()
        request = steps.sequence(ids, state=2)
        steps.run(request, chunked(30, 10))
        while request.computed < 54:
            request.tokens[request.computed + 1 :] = [1] * (59 - request.computed)  # drafts
            steps.step((request, 6))
            request.computed -= 5  # all rejected
            del request.logits[request.computed :]
            request.tokens = list(ids)
        assert largest_difference(request.all_logits, model.values["raw.0.logits"][:54]) < RAW
        assert steps.wrong_rows == 0


def split_model() -> tuple[HybridConfig, HybridWeights]:
    """Window 8, ratios 1 and 2, every kind of V4.1 layer, in float64."""
    raw = v41_raw([0, 2, 2, 1, 1, 1], sources=[1, 3], selectors=[1, 3, 5], publisher=3, engram=[1])
    config = v41_config(raw, dtype="float64", cache="fp64", seed=3)
    return config, draw_weights(config, torch.float64)


def check_identical(ours: Tensor, theirs: Tensor, what: object) -> None:
    """The same integers; the same floats once they are rounded to float32, bit for bit."""
    assert ours.dtype == theirs.dtype
    if ours.is_floating_point():
        ours, theirs = (x.float().view(torch.int32) for x in (ours, theirs))
    assert torch.equal(ours, theirs), what


def test_every_split_of_a_prompt_gives_identical_logits_rows_and_tags(
    device: SteppedCpuDevice,
) -> None:
    """Two chunks at every place, and chunks of every size, of 40 tokens, blocks of 4; the same rows
    and tags are left behind.

    Tags and token ids are equal. Rows and logits are computed in float64, where a product of
    another shape is summed in another order and ends up to 4e-14 away; rounded to float32 not one
    bit differs. (A value so close to the middle of two floats that 4e-14 decides is one in
    millions: the half million of this test have none. In float32 throughout, 1e-5 stays.)
    """
    config, weights = split_model()
    steps = Steps(config, weights, device, num_blocks=1000)
    ids = np.random.default_rng(1).integers(0, config.vocab_size, 40)
    request = steps.sequence(ids, state=1)
    whole, left = steps.run(request, [40]), steps.left_behind(request)
    assert len(left) == 6 + 4 + 2  # rings; rows and keys of two sources; tags and ids
    splits = [[first, 40 - first] for first in range(1, 40)]
    splits += [chunked(40, size) for size in range(1, 20)]
    for number, split in enumerate(splits):
        request = steps.sequence(ids, state=1 + number % 5)
        check_identical(steps.run(request, split), whole, split)
        for name, values in steps.left_behind(request).items():
            check_identical(values, left[name], (split, name))
    assert steps.wrong_rows == 0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [60, 7, 1])
def test_float64_equals_the_golden_float64(name: str, size: int, device: SteppedCpuDevice) -> None:
    """With float64 weights, rows and open groups."""
    model = golden(name)
    config = replace(model.config, dtype="float64", cache="fp64")
    steps = Steps(config, model.weights.to(torch.float64), device)
    logits = steps.run(steps.sequence(model.values["ids.0"], state=1), chunked(60, size))
    assert largest_difference(logits, model.values["raw.0.logits_f64"]) < 1e-5
    alone = HybridDense(model.weights, config, dtype=torch.float64)
    assert largest_difference(logits, alone.logits(model.ids(0))) < 1e-11


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("ratios", "window", "num", "sizes"),
    [((4, 16), 8, 60, (60, 1, 6, 7, 30)), ((4, 128), 128, 260, (260, 6, 7, 130))],
    ids=["mini", "real"],
)
def test_v4_equals_transformers(
    ratios: tuple[int, int],
    window: int,
    num: int,
    sizes: tuple[int, ...],
    device: SteppedCpuDevice,
) -> None:
    """Every logit, to 1e-10 in float64 and to 2e-4 in float32, however the tokens are chunked."""
    raw = v4_raw(ratios=ratios, window=window)
    model = transformers_v4(raw)
    ids = torch.randint(raw["vocab_size"], (num,), generator=torch.Generator().manual_seed(7))
    with true_float64(), torch.no_grad():
        expected = model(input_ids=ids[None], use_cache=False).logits[0]
    config = v4_config(model.config.to_dict())
    weights = load_weights(config, model.state_dict())
    for dtype, cache_format, bound in (("float64", "fp64", 1e-10), ("float32", "fp32", 2e-4)):
        steps = Steps(
            replace(config, dtype=dtype, cache=cache_format),
            weights.to(getattr(torch, dtype)),
            device,
            block_size=16,
            num_blocks=100,
        )
        for size in sizes:
            request = steps.sequence(ids.tolist(), state=1)
            logits = steps.run(request, chunked(num, size))
            assert largest_difference(logits, expected) < bound
        assert steps.wrong_rows == 0


OTHER_SIZES = {
    "v4, ratios 4 and 8": v4_config(v4_raw(ratios=(4, 8), window=5)),
    "v4, ratios 2 and 32": v4_config(
        v4_raw(ratios=(2, 32), window=16, layers=(HCA, CSA, CSA, SLIDING), head_dim=64)
    ),
    "v41, ratio 4": v41_config(
        v41_raw([4, 4, 0, 2, 2], sources=[0, 3], selectors=[0, 1, 3], publisher=None)
    ),
    "v41, selectors of all kinds": v41_config(
        v41_raw(
            [2, 2, 0, 2, 1, 1, 0, 1],
            sources=[0, 4],
            selectors=[0, 1, 4, 7],
            publisher=4,
            engram=[0, 4],
        )
    ),
}


@pytest.mark.parametrize("which", OTHER_SIZES)
@pytest.mark.parametrize("cache_format", ["fp32", "packed"])
def test_other_sizes_equal_the_dense_reference(
    which: str, cache_format: str, device: SteppedCpuDevice
) -> None:
    """Any layer order, ratio and head size, in one chunk, in several, and token by token."""
    config = replace(OTHER_SIZES[which], cache=cache_format, seed=5)
    weights = draw_weights(config)
    ids = torch.from_numpy(np.random.default_rng(2).integers(0, config.vocab_size, 70))
    expected = HybridDense(weights, config).logits(ids)
    steps = Steps(config, weights, device, num_blocks=200, block_size=8)
    for split in ([70], [33, 5, 30, 2], chunked(70, 1)):
        logits = steps.run(steps.sequence(ids.tolist(), state=1), split)
        assert largest_difference(logits, expected) < (RAW if cache_format == "fp32" else QAT)
    assert steps.wrong_rows == 0
