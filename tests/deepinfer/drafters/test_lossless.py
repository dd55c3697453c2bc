"""Drafts do not change what is sampled: verification by match is rejection sampling.

A drafter that names one token d puts all its mass there. Rejection sampling (Leviathan et al.,
arXiv:2211.17192) then accepts d with probability p(d), and otherwise draws from p without d,
renormalised. Drawing one token from p, and accepting d if that token is d, does both at once. The
engine's draws are Gumbel-max with noise fixed by (seed, position), so it goes further: the tokens
are those of the run without drafts, not others with the same distribution.

Two tokens are generated for each of many seeds, with the second one's logits depending on the
first, by the engine's own `sample`. Verifiers with the mistakes known from the field must fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from deepinfer.device.cpu import SteppedCpuDevice
from deepinfer.sampling import sample

NUM_SEEDS = 20_000
VOCAB = 8
TEMPERATURE = 0.7
POSITION = 10  # of the first token

GENERATOR = torch.Generator().manual_seed(0)
LOGITS = 2 * torch.rand(VOCAB, generator=GENERATOR)  # [token]; so near that every cell is filled
NEXT_LOGITS = 2 * torch.rand(VOCAB, VOCAB, generator=GENERATOR)  # [first token, token]
FIRST = (LOGITS / TEMPERATURE).double().softmax(0)
JOINT = FIRST[:, None] * (NEXT_LOGITS / TEMPERATURE).double().softmax(1)

Draw = Callable[[Tensor, int], Tensor]
Verifier = Callable[[Draw, Tensor], tuple[Tensor, Tensor]]


@pytest.fixture(scope="module")
def draw() -> Iterator[Draw]:
    """Samples one token per seed: logits [NUM_SEEDS, VOCAB] and the token's position."""
    device = SteppedCpuDevice()

    def one_each(logits: Tensor, position: int) -> Tensor:
        token_ids, _ = sample(
            logits,
            np.full(NUM_SEEDS, TEMPERATURE, np.float32),
            np.arange(NUM_SEEDS, dtype=np.int64),
            np.full(NUM_SEEDS, position, np.int32),
            device,
        )
        return token_ids.long()

    yield one_each
    device.close()


def everywhere(logits: Tensor) -> Tensor:
    return logits.expand(NUM_SEEDS, VOCAB)


def without_drafts(draw: Draw) -> tuple[Tensor, Tensor]:
    """First and second tokens, int64 [NUM_SEEDS] each, one step after the other."""
    first = draw(everywhere(LOGITS), POSITION)
    return first, draw(NEXT_LOGITS[first], POSITION + 1)


def verify_by_match(draw: Draw, drafts: Tensor) -> tuple[Tensor, Tensor]:
    """What the engine does: sample behind the anchor and behind the draft, in one forward.

    If the first sample is the draft, the second row's sample follows it. If not, the second row
    read a token that is not there: it is thrown away, and the next step samples its position again.
    """
    first = draw(everywhere(LOGITS), POSITION)
    behind_draft = draw(NEXT_LOGITS[drafts], POSITION + 1)
    next_step = draw(NEXT_LOGITS[first], POSITION + 1)
    return first, torch.where(first == drafts, behind_draft, next_step)


def always_accept(draw: Draw, drafts: Tensor) -> tuple[Tensor, Tensor]:
    """Wrong: the draft is the token, whatever was sampled."""
    return drafts, draw(NEXT_LOGITS[drafts], POSITION + 1)


def fresh_noise_with_draft(draw: Draw, drafts: Tensor) -> tuple[Tensor, Tensor]:
    """Wrong: behind a rejection a second draw, from p itself and not from p without the draft."""
    sampled, _ = without_drafts(draw)
    again = draw(everywhere(LOGITS), POSITION + 1_000_000)
    first = torch.where(sampled == drafts, drafts, again)
    return first, draw(NEXT_LOGITS[first], POSITION + 1)


def rejected_row_kept(draw: Draw, drafts: Tensor) -> tuple[Tensor, Tensor]:
    """Wrong: behind a rejection the second row's sample is used, which read the draft."""
    first, _ = without_drafts(draw)
    return first, draw(NEXT_LOGITS[drafts], POSITION + 1)


def random_drafts() -> Tensor:
    return torch.randint(VOCAB, (NUM_SEEDS,), generator=torch.Generator().manual_seed(1))


DRAFTERS: dict[str, Callable[[], Tensor]] = {
    "random": random_drafts,
    "likeliest": lambda: LOGITS.argmax().expand(NUM_SEEDS),
    "unlikeliest": lambda: LOGITS.argmin().expand(NUM_SEEDS),
    "one of three": lambda: random_drafts() % 3,
}


def p_value(counts: Tensor, expected: Tensor, degrees: int) -> float:
    """Chance that counts drawn as expected are at least this far off (Pearson's chi-square)."""
    assert expected.min() >= 5, "too few for the chi-square approximation"
    chi_square = ((counts - expected) ** 2 / expected).sum()
    half = torch.tensor(degrees / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half, chi_square / 2))


def fit_of_tokens(first: Tensor, second: Tensor) -> float:
    """Of the pairs of tokens to softmax(logits / T), over all cells [first, second]."""
    counts = torch.bincount(first * VOCAB + second, minlength=VOCAB**2).double()
    return p_value(counts, NUM_SEEDS * JOINT.flatten(), VOCAB**2 - 1)


def fit_given_draft(first: Tensor, drafts: Tensor) -> float:
    """Of the first token to p, for each draft apart: a token must not depend on the draft.

    The cells where it is the draft are the accepted ones. Without this table a verifier may pass
    whose errors for one draft and for another cancel.
    """
    num_drafts = torch.bincount(drafts, minlength=VOCAB)
    used = num_drafts > 0
    counts = torch.bincount(drafts * VOCAB + first, minlength=VOCAB**2).double()
    expected = num_drafts[used, None] * FIRST
    return p_value(counts.view(VOCAB, VOCAB)[used], expected, int(used.sum()) * (VOCAB - 1))


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_verification_by_match_is_lossless(draw: Draw, drafter: str) -> None:
    """With any drafter the tokens fit softmax(logits / T), and fit it given the draft."""
    drafts = DRAFTERS[drafter]()
    first, second = verify_by_match(draw, drafts)
    assert fit_of_tokens(first, second) > 1e-3
    assert fit_given_draft(first, drafts) > 1e-3


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_tokens_are_those_of_the_run_without_drafts(draw: Draw, drafter: str) -> None:
    """Seed by seed, not only in distribution."""
    plain, verified = without_drafts(draw), verify_by_match(draw, DRAFTERS[drafter]())
    assert torch.equal(plain[0], verified[0])
    assert torch.equal(plain[1], verified[1])


def test_a_draft_is_accepted_with_its_probability(draw: Draw) -> None:
    """Draft d is accepted with probability p(d); the token behind it fits p given d."""
    drafts = random_drafts()
    first, second = verify_by_match(draw, drafts)
    accepted = first == drafts
    num_drafts = torch.bincount(drafts, minlength=VOCAB).double()
    num_accepted = torch.bincount(drafts[accepted], minlength=VOCAB).double()
    outcomes = torch.stack([num_accepted, num_drafts - num_accepted])
    expected = num_drafts * torch.stack([FIRST, 1 - FIRST])
    assert p_value(outcomes, expected, VOCAB) > 1e-3

    likely = FIRST > 0.1  # the others are accepted too seldom to fill eight cells each
    pairs = torch.bincount((first * VOCAB + second)[accepted], minlength=VOCAB**2).double()
    behind = num_accepted[:, None] * JOINT / FIRST[:, None]
    degrees = int(likely.sum()) * (VOCAB - 1)
    assert p_value(pairs.view(VOCAB, VOCAB)[likely], behind[likely], degrees) > 1e-3


@pytest.mark.parametrize("wrong", [always_accept, fresh_noise_with_draft, rejected_row_kept])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_wrong_verifiers_are_told(draw: Draw, wrong: Verifier, drafter: str) -> None:
    """The same tables reject each mistake, whatever the drafter."""
    drafts = DRAFTERS[drafter]()
    first, second = wrong(draw, drafts)
    assert min(fit_of_tokens(first, second), fit_given_draft(first, drafts)) < 1e-9


def test_uniform_drafts_hide_a_mistake_from_the_plain_table(draw: Draw) -> None:
    """Why there are two tables: over all drafts together the second draw's errors cancel."""
    drafts = random_drafts()
    first, second = fresh_noise_with_draft(draw, drafts)
    assert fit_of_tokens(first, second) > 1e-3
    assert fit_given_draft(first, drafts) < 1e-9
