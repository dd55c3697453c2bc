"""A step of which the device alone knows where its sequences are computes what one laid out on the
host computes.

Both ways run in float64 beside one another, each over a cache of its own: (a) the plan of where the
sequences really are, and (b) a plan of where they would be if more drafts had been accepted, with
`StepInputs.back`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from deepinfer.config import MAX_DRAFTS, EngineConfig
from deepinfer.device.cpu import SteppedCpuDevice
from deepinfer.hybrid_runner import HybridRunner
from deepinfer.models.hybrid.geometry import POSITIONS, WINDOW
from deepinfer.models.hybrid.layer_plan import V4, HybridConfig, v4_config, v41_config
from deepinfer.models.hybrid.loading import draw_weights
from deepinfer.models.hybrid.weights import HybridWeights
from deepinfer.plan import Ints, LookAhead, StepPlan, WrongRows
from deepinfer.step_inputs import StepInputs
from tests.deepinfer.hybrid_steps import asked_behind
from tests.deepinfer.step_plans import Run, as_planned, step_plan
from tests.hybrid_configs import dspark, v4_raw, v41_raw

MTP = {"num_nextn_predict_layers": 1}
MODELS = {
    "mtp": v4_config({**v4_raw(ratios=(4, 16), window=8), **MTP}),
    "mtp, short window": v4_config({**v4_raw(ratios=(2, 8), window=3), **MTP}),
    "dspark": v41_config(
        {
            **v41_raw(
                [0, 2, 2, 1, 1, 1], sources=[1, 3], selectors=[1, 3, 5], publisher=3, engram=[1]
            ),
            **dspark([1, 2, 4]),
        }
    ),
    "dspark, ratios 2 and 1": v41_config(
        {
            **v41_raw([0, 2, 1, 1], sources=[1, 2], selectors=[1, 2], publisher=2, engram=[1]),
            **dspark([1, 3], 2),
        }
    ),
    "without draft layers": v41_config(
        v41_raw([0, 4, 8, 8], sources=[1, 2], selectors=[1, 2], publisher=2)
    ),
}
MAX_TOKENS, LENGTH = 6, 80
NUM_SLOTS = 8


@cache
def model(name: str) -> tuple[HybridConfig, HybridWeights]:
    config = replace(MODELS[name], dtype="float64", cache="fp64", seed=5)
    return config, draw_weights(config, torch.float64)


@dataclass
class Seq:
    """A sequence: true tokens, and how many of them are computed."""

    tokens: list[int]
    table: list[int]
    state: int
    computed: int = 0


@dataclass(frozen=True)
class Part:
    """What a step computes of a sequence.

    Attributes:
        count: tokens, of which the first `accepted` are true, the others drafts.
        back: how many positions before the planned ones.
    """

    seq: Seq
    count: int
    accepted: int
    back: int = 0


class Pair:
    """The same model twice, in equal states: one steps (a) as planned, one (b) moved.

    `bounded`: plans say how far back a sequence may be; otherwise it may be anywhere.
    """

    def __init__(
        self,
        name: str,
        device: SteppedCpuDevice,
        block_size: int,
        seed: int = 0,
        *,
        bounded: bool = False,
    ) -> None:
        self.bounded = bounded
        self.config, weights = model(name)
        self.device, self.block_size = device, block_size
        self.rng = np.random.default_rng(seed)
        has_drafts = self.config.draft is not None
        settings = EngineConfig(
            block_size=block_size,
            num_blocks=1 + NUM_SLOTS * -(-LENGTH // block_size),
            max_num_seqs=NUM_SLOTS,
            max_model_len=LENGTH,
            drafts=5 if has_drafts else 0,
            drafter="mtp" if has_drafts else "ngram",
        )
        self.exact, self.moved = (
            HybridRunner(self.config, settings, weights, device) for _ in range(2)
        )
        self._blocks = self.rng.permutation(np.arange(1, settings.num_blocks)).tolist()

    def sequence(self, state: int) -> Seq:
        table = [self._blocks.pop() for _ in range(-(-LENGTH // self.block_size))]
        return Seq(self.rng.integers(0, 60, LENGTH).tolist(), table, state)

    def decode(self, seq: Seq) -> Part:
        """One to six tokens of a sequence, some of its drafts wrong, some not there."""
        count = int(self.rng.integers(1, MAX_TOKENS + 1))
        back = int(self.rng.integers(0, MAX_TOKENS))
        return Part(seq, count, int(self.rng.integers(1, count + 1)), back)

    def plans(self, parts: Sequence[Part]) -> tuple[StepPlan, StepPlan]:
        """Where the sequences are, and where they would be."""
        exact, planned = [], []
        for part in parts:
            seq, first = part.seq, part.seq.computed
            drafts = self.rng.integers(0, 60, LENGTH).tolist()
            tokens = seq.tokens[: first + part.accepted] + drafts
            run = Run(tokens, seq.table, first, part.count, state=seq.state)
            exact.append(run)
            planned.append(replace(run, computed=first + part.back))
        plan = step_plan(planned, self.block_size, padding=1)
        unsure = first = plan.context_lens - plan.num_scheduled
        if self.bounded:
            unsure = np.array([part.back + self.rng.integers(0, 3) for part in parts])
        plan = replace(plan, ahead=ahead(np.where(unsure > first, first, unsure)))
        return step_plan(exact, self.block_size, padding=1), plan

    def step(self, *parts: Part) -> tuple[WrongRows, WrongRows]:
        """Compute a step both ways; logits and caches are equal. Gives the wrong rows of both."""
        exact, planned = self.plans(parts)
        back = torch.tensor([part.back for part in parts])
        tokens = np.arange(exact.num_tokens)
        inputs = as_planned(exact)
        logits, wrong = self.device.run(lambda: self.exact.logits(inputs, tokens))
        moved = StepInputs(planned, inputs.token_ids, back)
        found, wrong_there = self.device.run(lambda: self.moved.logits(moved, tokens))
        assert logits is not None
        assert found is not None
        close(found, logits, "logits")
        self.caches_are_equal()
        for part in parts:
            part.seq.computed += part.accepted
        return wrong(), wrong_there()

    def caches_are_equal(self) -> None:
        """All that belongs to anybody: state slots, and blocks but for block 0."""
        ours, theirs = self.moved.cache, self.exact.cache
        positions = ours.region(POSITIONS)[..., 0] - 1
        for part in ours.geometry.slot:
            which = part.kind, part.layer
            found, expected = ours.region(*which), theirs.region(*which)
            if part.draft and part.kind == WINDOW and self.config.family == V4:
                no_pair = positions == 0  # what lies there is never read
                found, expected = found[~no_pair], expected[~no_pair]
            close(found, expected, part.name)
        for rows in ours.geometry.paged:
            which = rows.kind, rows.layer
            close(ours.paged(*which)[1:], theirs.paged(*which)[1:], f"{rows.kind} {rows.layer}")
            assert ours.paged(*which)[0].isfinite().all()

    def drafts_are_equal(self, seqs: Sequence[Seq]) -> None:
        """What follows the newest token of each, that is not computed yet."""
        newest = [(seq.state, seq.tokens[seq.computed], seq.computed) for seq in seqs]
        asked = asked_behind(newest, 5)
        drafts = [
            self.device.run(lambda runner=runner: runner.propose(asked)).token_ids
            for runner in (self.moved, self.exact)
        ]
        assert drafts[0].tolist() == drafts[1].tolist()


def ahead(num_unsure: Ints) -> LookAhead:
    """What a plan leaves open, int [S]; the rest of it is not looked at."""
    none, some = np.zeros(len(num_unsure), np.int32), np.ones(len(num_unsure), np.bool_)
    return LookAhead(none, some, none, none, num_unsure.astype(np.int32), none, (), MAX_DRAFTS)


def close(found: Tensor, expected: Tensor, name: str) -> None:
    """Equal up to float64 rounding, integers exactly."""
    tolerance = 1e-9 if expected.is_floating_point() else 0
    torch.testing.assert_close(
        found, expected, atol=tolerance, rtol=0, msg=lambda message: f"{name}: {message}"
    )


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("block_size", [1, 4, 8, 16])
@pytest.mark.parametrize("name", MODELS)
def test_moved_steps_compute_what_exact_ones_do(
    name: str, block_size: int, bounded: bool, device: SteppedCpuDevice
) -> None:
    """Steps in a row of short and long decodes, of some that stay where they were planned, and of a
    prompt that comes in chunks: logits, caches and drafts."""
    pair = Pair(name, device, block_size, 1 + bounded, bounded=bounded)
    seqs = [pair.sequence(state) for state in range(1, 7)]
    *decodes, prompt = seqs
    for seq, length in zip(decodes, (1, 2, 5, 9, 30), strict=True):
        pair.step(Part(seq, length, length))
    num_wrong = 0
    for chunk in (19, 1, 25, 7, 2, 9, 3):
        parts = [pair.decode(seq) for seq in decodes]
        parts[2] = replace(parts[2], back=0)
        parts.append(Part(prompt, chunk, chunk))
        order = pair.rng.permutation(len(parts))
        num_wrong += sum(rows.count for rows in pair.step(*(parts[i] for i in order)))
        if pair.config.draft is not None:
            pair.drafts_are_equal(seqs)
    assert num_wrong == 0


@pytest.mark.parametrize("back", range(1, 6))
@pytest.mark.parametrize("name", ["mtp", "dspark"])
def test_a_group_that_closes_only_as_planned_or_only_really(
    name: str, back: int, device: SteppedCpuDevice
) -> None:
    """From every place within a group, and with every number of tokens."""
    for first in range(1, 9):
        pair = Pair(name, device, 4, bounded=first % 2 == 0)
        seqs = [pair.sequence(state) for state in range(1, 7)]
        pair.step(*(Part(seq, first, first) for seq in seqs))
        for parts in (
            [Part(seq, count, 1, back) for count, seq in enumerate(seqs, 1)],
            [Part(seq, 2, 1) for seq in seqs],
        ):
            assert [rows.count for rows in pair.step(*parts)] == [0, 0]


def test_a_step_that_sees_no_row_where_the_plan_would(device: SteppedCpuDevice) -> None:
    """Ratio 8: planned behind the first row, really before it; with a selection, and without."""
    pair = Pair("without draft layers", device, 8)
    seqs = [pair.sequence(state) for state in (1, 2)]
    pair.step(*(Part(seq, 1, 1) for seq in seqs))
    wrong = pair.step(*(Part(seq, 2, 1, 30) for seq in seqs))
    assert [rows.count for rows in wrong] == [0, 0]


def test_ring_rows_of_another_position_are_counted(device: SteppedCpuDevice) -> None:
    """A sequence in a slot it was not computed in: the rows it really wants and does not find."""
    pair = Pair("dspark", device, 4)
    seq, other = pair.sequence(1), pair.sequence(2)
    pair.step(Part(seq, 18, 18), Part(other, 7, 7))
    wrong, wrong_there = pair.step(Part(replace(seq, state=3), 2, 1, 4), Part(other, 2, 1, 1))
    assert wrong.count == pair.config.sliding_window - 1  # once for both of its tokens
    assert wrong_there.count == wrong.count
    for name in ("seqs", "positions", "found"):
        assert getattr(wrong_there, name).tolist() == getattr(wrong, name).tolist()


# -- the host does not wait ----------------------------------------------------------------------

WAITS = (
    "_local_scalar_dense",
    "item",
    "is_nonzero",
    "equal",
    "nonzero",
    "masked_select",
    "_unique2",
)
INDEXED = ("index", "index_put", "index_put_", "_index_put_impl_")


class HostWaits(TorchDispatchMode):
    """Raises at an operation whose result, or its size, the host would wait for on CUDA."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.name().removeprefix("aten::").split(".")[0]
        by_mask = name in INDEXED and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if name in WAITS or by_mask or func.name() == "aten::repeat_interleave.Tensor":
            raise AssertionError(f"{func.name()} waits for the device")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: x[x > 0],
        lambda x: x.masked_fill_(x > 0, 0).nonzero(),
        lambda x: x.__setitem__(x > 0, 1.0),
        lambda x: bool(x.any()),
    ],
)
def test_waits_are_seen(wait: Any) -> None:
    """What the next test relies on."""
    with HostWaits(), pytest.raises(AssertionError, match="waits for the device"):
        wait(torch.ones(3))


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("name", MODELS)
def test_the_host_does_not_wait(name: str, block_size: int, device: SteppedCpuDevice) -> None:
    """Layout, forward pass, what draft layers keep, and what they propose. As many tokens as all
    experts take at once: on the CPU few of them are multiplied group by group, on the host."""
    pair = Pair(name, device, block_size)
    seqs = [pair.sequence(state) for state in range(1, 7)]
    pair.step(*(Part(seq, length, length) for length, seq in enumerate(seqs, 1)))
    _, plan = pair.plans([Part(seq, 5, 1, 3) for seq in seqs])
    inputs = StepInputs(plan, torch.from_numpy(plan.token_ids), torch.full((6,), 3))
    asked = asked_behind([(seq.state, 7, 8) for seq in seqs], 5)

    def step() -> Any:
        with HostWaits():
            _, wrong_rows = pair.moved.logits(inputs, np.arange(plan.num_tokens))
            if pair.config.draft is not None:
                pair.moved.propose(asked)
            return wrong_rows

    assert device.run(step)().count == 0
