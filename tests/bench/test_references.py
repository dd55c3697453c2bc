"""Reference runs: what every request says without drafts, found once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench.arrivals import RequestSpec
from bench.references import References, child_prompt, plain_config
from bench.runner import Target
from bench.spec import Resolved
from tests.bench.tiny import PLAIN, requests_of, run_round, tiny, workload

FORK = {"children": 2, "output_tokens": 6, "after_tokens": 3}
WORK = workload(
    PLAIN,
    {"count": 1, "prompt_tokens": 20, "output_tokens": 8, "fork": FORK},
    {
        "count": 1,
        "prompt_tokens": 20,
        "output_tokens": 4,
        "temperature": 0.8,
        "fork": {**FORK, "own_prompt_tokens": 5},
    },
    {
        "count": 1,
        "prompt_tokens": 9,
        "output_tokens": 10,
        "abort": {"fraction": 1.0, "after_tokens": 2},
    },
    {
        "count": 2,
        "prompt_tokens": 9,
        "output_tokens": 4,
        "turns": {"count": 3, "prompt_tokens": 5},
    },
    acceptance=0.5,
)


@pytest.fixture(scope="module")
def resolved() -> Resolved:
    """Requests of every kind, on cpu-tiny."""
    return tiny(WORK)


@pytest.fixture(scope="module")
def target(resolved: Resolved) -> Iterator[Target]:
    """Its device and weights."""
    opened = Target(resolved)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def requests(resolved: Resolved) -> list[RequestSpec]:
    """Those of round 0."""
    return requests_of(resolved)


def test_every_request_and_child_has_all_it_may_say(
    resolved: Resolved, target: Target, requests: list[RequestSpec]
) -> None:
    """A round's tokens are the beginning of the references; who gave up or was replaced goes on."""
    found = References(target.device, target.weights).of(resolved, requests)
    emissions = run_round(resolved, target, requests).emissions
    assert found.keys() == emissions.keys()
    for name, emission in emissions.items():
        assert found[name][: len(emission.token_ids)].tolist() == list(emission.token_ids)
    for spec in requests:
        assert len(found[spec.request_id]) == len(spec.prompt_token_ids) + spec.max_tokens


def test_cells_that_differ_in_what_changes_no_token_share_a_run(
    resolved: Resolved, target: Target, requests: list[RequestSpec]
) -> None:
    """Drafts, overlap, policies, checks; a block size of its own is a run of its own."""
    references = References(target.device, target.weights)
    found = references.of(resolved, requests)
    choices = {"drafts": 3, "overlap": "on", "release": "polled", "checks": "all"}
    assert references.of(tiny(WORK, **choices), requests) is found
    assert references.of(tiny(WORK, block_size=32), requests) is not found
    assert references.of(resolved, requests[:2]).keys() == {r.request_id for r in requests[:2]}


def test_the_plain_engine_has_room_for_the_same_and_no_choice() -> None:
    """A reference run neither drafts nor checks, whatever the cell does."""
    config = tiny(WORK, drafts=5, drafter="replay", num_blocks=50, checks="all").engine
    plain = plain_config(config)
    assert (plain.drafts, plain.drafter, plain.checks) == (0, "ngram", "off")
    assert (plain.num_blocks, plain.block_size) == (50, config.block_size)


def test_what_can_never_fit_is_left_out(target: Target) -> None:
    """It is refused in a round, too, and never asks for drafts; nor do its children exist."""
    fork = {"count": 1, "prompt_tokens": 90, "output_tokens": 8, "fork": FORK}
    resolved = tiny(workload(fork, {"count": 1, "prompt_tokens": 5, "output_tokens": 2}))
    small = tiny(resolved.workload, num_blocks=4)
    found = References(target.device, target.weights).of(small, requests_of(small))
    assert list(found) == ["r0-1-0"]


def test_a_child_knows_what_its_parent_had_said_and_no_more(requests: list[RequestSpec]) -> None:
    """So many tokens as it was forked after, or the prompt and tokens of its own."""
    decodes, reads = (spec for spec in requests if spec.fork is not None)
    prompt = decodes.prompt_token_ids.tolist()
    assert decodes.fork is not None
    assert child_prompt(decodes, decodes.fork.children[0], [7, 8, 9, 10]) == [*prompt, 7, 8, 9]
    assert reads.fork is not None
    child = reads.fork.children[1]
    prompt = reads.prompt_token_ids.tolist()
    assert child_prompt(reads, child, [7, 8]) == prompt + child.own_prompt_token_ids.tolist()
