"""Draft layers over the rings: what they guess is what the dense reference guesses.

In float64, where the logits they are chosen by agree to 1e-9, and so the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from bench.dense.drafting import DenseDrafting
from deepinfer.device.cpu import SteppedCpuDevice
from deepinfer.models.hybrid.layer_plan import HybridConfig, v4_config, v41_config
from deepinfer.models.hybrid.loading import draw_weights
from deepinfer.models.hybrid.weights import HybridWeights
from tests.deepinfer.hybrid_steps import Request, Steps, asked_behind, chunked
from tests.hybrid_configs import dspark, v4_raw, v41_raw

V41_RAW = v41_raw([0, 2, 2, 1, 1], sources=[1, 3], selectors=[1, 3], publisher=3, engram=[1])
MODELS = {
    "mtp": v4_config({**v4_raw(ratios=(4, 16), window=8), "num_nextn_predict_layers": 1}),
    "mtp, short window": v4_config(
        {**v4_raw(ratios=(4, 16), window=3), "num_nextn_predict_layers": 1}
    ),
    "dspark": v41_config({**V41_RAW, **dspark([1, 2, 4])}),
    "dspark, one layer, packed": v41_config({**V41_RAW, **dspark([4], 1)}, cache="packed"),
}
IDS = np.random.default_rng(4).integers(0, 61, 60).tolist()


@cache
def model(name: str) -> tuple[HybridConfig, HybridWeights]:
    config = MODELS[name]
    rows = "packed" if config.cache == "packed" else "fp64"
    config = replace(config, dtype="float64", cache=rows, seed=5)
    return config, draw_weights(config, torch.float64)


@cache
def expected(name: str, token_ids: tuple[int, ...]) -> Tensor:
    """[5, V], what drafts behind `token_ids` are chosen by; the last of these is not computed."""
    config, weights = model(name)
    return DenseDrafting(weights, config, dtype=torch.float64).logits(torch.tensor(token_ids), 5)


def steps_of(name: str, device: SteppedCpuDevice) -> Steps:
    return Steps(*model(name), device, num_blocks=200, drafter="mtp")


def guesses(steps: Steps, *seqs: tuple[Request, int], num_drafts: int = 5) -> list[list[int]]:
    """Of each (sequence, newest token) behind what is computed."""
    asked = asked_behind([(seq.state, token, seq.computed) for seq, token in seqs], num_drafts)
    drafts, counts = steps.device.run(lambda: steps.runner.propose(asked))
    assert counts.tolist() == [drafts.shape[1]] * len(seqs)
    return drafts.tolist()


def check(name: str, steps: Steps, seq: Request) -> None:
    """The guesses behind what is computed of `seq` are those of a run without a cache."""
    for newest in (seq.tokens[seq.computed], 7):
        logits = expected(name, (*seq.tokens[: seq.computed], newest))
        found = list[Tensor]()
        assert steps.runner.drafting is not None
        steps.runner.drafting.recorder = found.append
        drafts = guesses(steps, (seq, newest))
        steps.runner.drafting.recorder = None
        assert drafts == [logits.argmax(-1).tolist()], seq.computed
        assert (torch.cat(found) - logits).abs().max() < 1e-9, seq.computed


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("chunks", [[59], [1] * 30, chunked(59, 7), [2, 40, 1, 3, 13]])
def test_guesses_are_those_of_a_run_without_a_cache(
    name: str, chunks: Sequence[int], device: SteppedCpuDevice
) -> None:
    """Behind every step, whatever its size; windows that are not full, rings that went round."""
    steps = steps_of(name, device)
    seq = steps.sequence(IDS, state=1)
    for count in chunks:
        steps.step((seq, count))
        check(name, steps, seq)


@pytest.mark.parametrize("name", MODELS)
def test_rejected_drafts_leave_nothing_behind(name: str, device: SteppedCpuDevice) -> None:
    """Steps of a token and five drafts of which 0 to 5 are right, over two turns of the ring."""
    steps = steps_of(name, device)
    seq = steps.sequence(IDS, state=1)
    steps.step((seq, 11))
    for right in (0, 0, 5, 1, 4, 0, 2, 3, 0, 5, 5, 0):
        true = list(seq.tokens)
        wrong = slice(seq.computed + 1 + right, seq.computed + 6)
        seq.tokens[wrong] = [(token + 1) % 61 for token in true[wrong]]
        steps.step((seq, 6))
        seq.tokens, seq.computed = true, seq.computed - 5 + right
        check(name, steps, seq)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("behind", [0, 1, 6])
def test_a_fork_guesses_from_its_own_tokens(
    name: str, behind: int, device: SteppedCpuDevice
) -> None:
    """It goes on from a copied slot, `behind` its parent, with another token than its parent."""
    steps = steps_of(name, device)
    parent = steps.sequence(IDS, state=1)
    steps.step((parent, 40))
    tokens = [*IDS[: 40 - behind], *(3, 9, 4, 1, 5)]
    child = steps.sequence(tokens, state=2)
    columns = range(len(parent.table[: len(child.table)]))
    steps.copy([(parent.table[i], child.table[i]) for i in columns], [(1, 2)])
    child.computed = 40 - behind
    check(name, steps, parent)
    if behind == 0:
        check(name, steps, child)
    steps.step((child, 1), (parent, 6))
    check(name, steps, child)
    check(name, steps, parent)
    steps.step((child, 3))
    check(name, steps, child)


@pytest.mark.parametrize("name", MODELS)
def test_guesses_do_not_depend_on_company(name: str, device: SteppedCpuDevice) -> None:
    """Sequences asked together get what each gets alone, and fewer drafts are the first of more."""
    steps = steps_of(name, device)
    seqs = [steps.sequence(IDS[start:], state=1 + start) for start in range(4)]
    for seq, count in zip(seqs, (3, 17, 30, 1), strict=True):
        steps.step((seq, count))
    asked = [(seq, 5) for seq in seqs]
    together = guesses(steps, *asked)
    assert together == [guesses(steps, one)[0] for one in asked]
    assert [row[:2] for row in together] == guesses(steps, *asked, num_drafts=2)


def test_a_slot_that_changes_hands_is_a_new_one(device: SteppedCpuDevice) -> None:
    """Nothing of the last owner is read, though nobody cleared the slot."""
    for name in ("mtp", "dspark"):
        steps = steps_of(name, device)
        steps.step((steps.sequence(IDS[::-1], state=1), 50))
        seq = steps.sequence(IDS, state=1)
        for count in (1, 2, 9):
            steps.step((seq, count))
            check(name, steps, seq)


def test_logits_are_those_of_a_network_without_draft_layers(device: SteppedCpuDevice) -> None:
    """They read what the model computes, and change nothing in it."""
    for name in ("mtp", "dspark"):
        config, weights = model(name)
        plain = Steps(config, weights, device, num_blocks=200)
        assert plain.runner.draft_head is None
        steps = steps_of(name, device)
        logits = [part.run(part.sequence(IDS, state=1), [20, 40]) for part in (plain, steps)]
        assert torch.equal(*logits)
        assert plain.runner.cache.bytes_per_slot < steps.runner.cache.bytes_per_slot
