"""Requests are drawn so that seed, round and place decide them, and nothing else."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bench.arrivals import build_requests, scale_length, turn_behind
from bench.schema import Workload
from bench.spec import load_workload
from deepinfer.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
TRACES = ROOT.parent / "shared" / "traces"

GROUP = {"count": 3, "prompt_tokens": 8, "output_tokens": 4}
FORK = {"children": 3, "output_tokens": 5}


def workload(*groups, **more):
    return Workload.model_validate({"description": "x", "requests": list(groups), **more})


def build(*groups, seed=0, vocab_size=1000, round_index=0, **more):
    return build_requests(workload(*groups, **more), seed, vocab_size, round_index)


def as_tuple(spec):
    """A request with its arrays as bytes, so that equal means byte-identical."""
    fork = spec.fork and (
        spec.fork.after_tokens,
        tuple(
            (c.request_id, c.own_prompt_token_ids.tobytes(), c.max_tokens, c.temperature, c.seed)
            for c in spec.fork.children
        ),
    )
    fields = (spec.request_id, spec.arrival_s, spec.prompt_token_ids.tobytes(), spec.max_tokens)
    return (*fields, spec.temperature, spec.seed, fork, spec.abort_after_tokens)


MIXED = load_workload(ROOT / "workloads" / "mixed-chat.yaml")


def test_equal_arguments_give_identical_requests():
    """A workload, seed and round are byte-identical from call to call."""
    first, second = (build_requests(MIXED, 3, 8192, 1) for _ in range(2))
    assert [as_tuple(spec) for spec in first] == [as_tuple(spec) for spec in second]


def test_equal_arguments_give_identical_requests_in_another_process():
    """Nothing hangs on the process: hash seeds, import order, earlier draws."""
    code = (
        "from pathlib import Path; from bench.spec import load_workload;"
        "from bench.arrivals import build_requests;"
        "specs = build_requests(load_workload(Path('workloads/mixed-chat.yaml')), 3, 8192, 1);"
        "print([(s.request_id, s.arrival_s, s.seed, s.max_tokens, s.abort_after_tokens,"
        " s.prompt_token_ids.tolist()) for s in specs])"
    )
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    expected = [
        (
            s.request_id,
            s.arrival_s,
            s.seed,
            s.max_tokens,
            s.abort_after_tokens,
            s.prompt_token_ids.tolist(),
        )
        for s in build_requests(MIXED, 3, 8192, 1)
    ]
    assert out.stdout.strip() == str(expected)


def test_seed_and_round_change_the_draws():
    """Another seed or another round, the warm-up included, has other prompts and sampling seeds."""
    variants = [(0, 0), (1, 0), (0, 1), (0, -1), (1, -1)]
    prompts, seeds, ids = set(), set(), set()
    for seed, round_index in variants:
        for spec in build(GROUP, seed=seed, round_index=round_index):
            prompts.add(spec.prompt_token_ids.tobytes())
            seeds.add(spec.seed)
            ids.add((seed, spec.request_id))
    assert len(prompts) == len(seeds) == len(ids) == 3 * len(variants)


def test_adding_requests_leaves_the_others_alone():
    """More requests in a group, or another group behind it, change no request there was."""
    random = {
        "prompt_tokens": {"uniform": [4, 40]},
        "output_tokens": {"lognormal": {"median": 20, "sigma": 1.0, "max": 90}},
        "arrival": {"poisson_per_s": 3.0},
        "abort": {"fraction": 0.5, "after_tokens": 2},
        "fork": {**FORK, "own_prompt_tokens": 3},
    }
    few = build({"count": 5, **random})
    many = build({"count": 9, **random}, GROUP)
    by_id = {spec.request_id: as_tuple(spec) for spec in many}
    assert len(by_id) == 12
    assert [by_id[spec.request_id] for spec in few] == [as_tuple(spec) for spec in few]


def test_types_and_ranges():
    """Token ids are int32 within the vocabulary and reach all of it; seeds fit in an int64."""
    specs = build({**GROUP, "count": 50}, vocab_size=7)
    tokens = np.concatenate([spec.prompt_token_ids for spec in specs])
    assert tokens.dtype == np.int32
    assert set(tokens.tolist()) == set(range(7))
    assert all(0 <= spec.seed < 2**63 for spec in specs)


def test_a_phrase_is_said_again_and_again():
    """Each request has its own; a prompt may end within it, and lengths scale with it."""
    group = {"count": 2, "prompt_tokens": 20, "phrase_tokens": 8, "output_tokens": 1}
    first, second = build(group)
    assert first.prompt_token_ids[:8].tolist() != second.prompt_token_ids[:8].tolist()
    assert first.prompt_token_ids.tolist() == np.resize(first.prompt_token_ids[:8], 20).tolist()
    (scaled, _) = build(group, scale_lengths=0.5)
    assert scaled.prompt_token_ids.tolist() == np.resize(scaled.prompt_token_ids[:4], 10).tolist()


def test_uniform_lengths_reach_both_ends():
    """`uniform: [low, high]` includes both."""
    specs = build({**GROUP, "count": 200, "prompt_tokens": {"uniform": [3, 5]}})
    assert {len(spec.prompt_token_ids) for spec in specs} == {3, 4, 5}


def test_lognormal_lengths_have_the_median_and_the_cut():
    """Half the draws lie below the median, and none above `max`."""
    law = {"lognormal": {"median": 50, "sigma": 1.0, "max": 120}}
    lengths = [spec.max_tokens for spec in build({**GROUP, "count": 400, "output_tokens": law})]
    assert 44 <= np.median(lengths) <= 56
    assert max(lengths) == 120
    assert min(lengths) >= 1


def test_arrival_forms():
    """At once, evenly spaced, and Poisson with the asked rate; sorted, ties in file order."""
    assert [s.arrival_s for s in build(GROUP)] == [0.0, 0.0, 0.0]
    assert [s.arrival_s for s in build({**GROUP, "arrival": {"at_s": 2}})] == [2.0] * 3
    even = build({**GROUP, "arrival": {"every_s": 0.5, "start_s": 1.0}}, GROUP)
    assert [s.request_id for s in even] == [
        "r0-1-0",
        "r0-1-1",
        "r0-1-2",
        "r0-0-0",
        "r0-0-1",
        "r0-0-2",
    ]
    assert [s.arrival_s for s in even[3:]] == [1.0, 1.5, 2.0]
    poisson = {"poisson_per_s": 4.0, "start_s": 10.0}
    times = [s.arrival_s for s in build({**GROUP, "count": 400, "arrival": poisson})]
    assert times == sorted(times)
    gaps = np.diff([10.0, *times])
    assert np.mean(gaps) == pytest.approx(0.25, rel=0.15)
    assert np.std(gaps) == pytest.approx(0.25, rel=0.25)


def test_forks_have_own_seeds_and_decode_path_by_default():
    """Children differ in their sampling seed, sample at temperature 1 and own no prompt."""
    (spec,) = build({**GROUP, "count": 1, "fork": FORK})
    children = spec.fork.children
    assert spec.fork.after_tokens == 1
    assert len({spec.seed, *(child.seed for child in children)}) == 4
    assert [child.temperature for child in children] == [1.0] * 3
    assert [child.request_id for child in children] == ["r0-0-0.0", "r0-0-0.1", "r0-0-0.2"]
    assert all(child.own_prompt_token_ids.shape == (0,) for child in children)
    assert all(child.own_prompt_token_ids.dtype == np.int32 for child in children)


def test_prompt_path_children_read_prompts_of_their_own():
    """`own_prompt_tokens` gives each child that many tokens, all different."""
    (spec,) = build({**GROUP, "count": 1, "fork": {**FORK, "own_prompt_tokens": 6}})
    own = [child.own_prompt_token_ids for child in spec.fork.children]
    assert [len(tokens) for tokens in own] == [6, 6, 6]
    assert len({tokens.tobytes() for tokens in own}) == 3


@pytest.mark.parametrize("scale", [1.0, 0.1])
def test_a_parent_lives_until_it_has_forked(scale):
    """However short a parent is drawn or scaled, it has a token left after the fork."""
    group = {
        **GROUP,
        "count": 50,
        "output_tokens": {"uniform": [1, 9]},
        "fork": {**FORK, "after_tokens": 4},
        "abort": {"fraction": 1.0, "after_tokens": 1},
    }
    for spec in build(group, scale_lengths=scale):
        assert spec.max_tokens > spec.fork.after_tokens
        if spec.abort_after_tokens is not None:
            assert spec.fork.after_tokens < spec.abort_after_tokens < spec.max_tokens


def test_aborts_hit_the_fraction_and_come_before_the_end():
    """About the asked share is aborted, each before its last token; none without `abort`."""
    abort = {"fraction": 0.25, "after_tokens": {"uniform": [1, 40]}}
    specs = build({**GROUP, "count": 400, "output_tokens": 20, "abort": abort})
    after = [s.abort_after_tokens for s in specs if s.abort_after_tokens is not None]
    assert 70 <= len(after) <= 130
    assert min(after) == 1
    assert max(after) == 19
    assert all(spec.abort_after_tokens is None for spec in build(GROUP))


@pytest.mark.parametrize(
    ("length", "factor", "expected"),
    [(10, 0.1, 1), (14, 0.1, 1), (15, 0.1, 2), (1, 0.01, 1), (5, 0.5, 3), (7, 1.0, 7), (3, 2.5, 8)],
)
def test_scaling_rounds_to_the_nearest_and_never_to_zero(length, factor, expected):
    """Halves go up; a length is at least one token."""
    assert scale_length(length, factor) == expected


def test_scaled_groups_keep_their_draws():
    """Scaling changes lengths, not which lengths were drawn, nor arrivals or seeds."""
    group = {**GROUP, "prompt_tokens": {"uniform": [10, 400]}, "arrival": {"poisson_per_s": 1.0}}
    full, scaled = build(group), build(group, scale_lengths=0.1)
    for one, other in zip(full, scaled, strict=True):
        assert len(other.prompt_token_ids) == scale_length(len(one.prompt_token_ids), 0.1)
        assert (one.arrival_s, one.seed) == (other.arrival_s, other.seed)


def trace(tmp_path, rows, **more):
    """A workload that replays Mooncake rows (ms, input, output, ids)."""
    keys = ("timestamp", "input_length", "output_length", "hash_ids")
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(dict(zip(keys, row, strict=True))) + "\n" for row in rows))
    settings = {"format": "mooncake", "path": str(path), **more}
    return Workload.model_validate({"description": "x", "trace": settings})


MOONCAKE = [
    (1000, 1200, 10, [7, 8, 9]),
    (1500, 1024, 1, [7, 8]),
    (3000, 1300, 30, [7, 5, 9]),
]


@pytest.mark.parametrize(("scale", "chunk"), [(1.0, 512), (0.1, 51), (0.0005, 1)])
def test_equal_hash_ids_become_equal_token_prefixes(tmp_path, scale, chunk):
    """Chunks with equal ids are equal, others differ, and a scaled chunk is a shorter chunk."""
    specs = build_requests(trace(tmp_path, MOONCAKE, scale_lengths=scale), 0, 8192, 0)
    first, second, third = (spec.prompt_token_ids for spec in specs)
    assert len(second) == 2 * chunk
    assert (first[: 2 * chunk] == second).all()
    assert (first[:chunk] == third[:chunk]).all()
    assert not (first[chunk : 2 * chunk] == third[chunk : 2 * chunk]).all()
    # The last id of both is 9, with 176 and 276 tokens left: one is the beginning of the other.
    tail = first[2 * chunk :]
    assert len(tail) == max(1, round(176 * scale))
    assert (third[2 * chunk :][: len(tail)] == tail).all()


def test_rounds_of_a_trace_share_no_prompt(tmp_path):
    """Equal hash ids mean equal tokens within a round only."""
    replay = trace(tmp_path, MOONCAKE)
    chunks = [
        build_requests(replay, 0, 8192, round_index)[0].prompt_token_ids[:512].tobytes()
        for round_index in (-1, 0, 1)
    ]
    assert len(set(chunks)) == 3


def test_speed_divides_arrivals_and_limit_cuts(tmp_path):
    """Arrivals count from the first row; twice the speed halves them."""
    specs = build_requests(trace(tmp_path, MOONCAKE, speed=2.0, limit=2), 0, 100, 0)
    assert [spec.arrival_s for spec in specs] == [0.0, 0.25]
    assert [spec.max_tokens for spec in specs] == [10, 1]
    assert [spec.request_id for spec in specs] == ["r0-0", "r0-1"]


def test_a_missing_trace_says_where_it_comes_from():
    """Without a path the error names the flag, and the hint the public source."""
    with pytest.raises(UserError, match="expected --trace-file PATH") as caught:
        build_requests(load_workload(ROOT / "workloads" / "azure-code.yaml"), 0, 100, 0)
    assert "github.com/Azure/AzurePublicDataset" in caught.value.hint


@pytest.mark.traces
def test_real_traces_become_requests():
    """The first rows of both formats have the lengths that the files state."""
    path = str(TRACES / "AzureLLMInferenceTrace_code.csv")
    azure = {"format": "azure", "path": path, "limit": 3}
    specs = build_requests(Workload.model_validate({"description": "x", "trace": azure}), 0, 100, 0)
    assert [len(s.prompt_token_ids) for s in specs] == [4808, 3180, 110]
    assert [s.max_tokens for s in specs] == [10, 8, 27]
    assert specs[1].arrival_s == pytest.approx(0.052)
    path = str(TRACES / "mooncake_fast25_conversation.jsonl")
    mooncake = {"format": "mooncake", "path": path, "limit": 2}
    specs = build_requests(
        Workload.model_validate({"description": "x", "trace": mooncake}), 0, 8192, 0
    )
    first, second = (s.prompt_token_ids for s in specs)
    assert (len(first), len(second)) == (6758, 7322)
    assert (first[:512] == second[:512]).all()
    assert not (first[512:1024] == second[512:1024]).all()


def tokens(spec):
    return spec.prompt_token_ids.tolist()


def test_a_shared_prefix_is_the_same_for_all():
    """Of every group, as far as each goes; then come tokens of its own. It scales, and is another
    one in another round."""
    long, short = {**GROUP, "shared_prefix_tokens": 20}, {**GROUP, "shared_prefix_tokens": 12}
    specs = build(long, short, GROUP)
    assert [len(spec.prompt_token_ids) for spec in specs] == [28] * 3 + [20] * 3 + [8] * 3
    prefix = tokens(specs[0])[:20]
    assert all(tokens(spec)[:20] == prefix for spec in specs[:3])
    assert all(tokens(spec)[:12] == prefix[:12] for spec in specs[3:6])
    own = {tuple(tokens(spec)[-8:]) for spec in specs}
    assert len(own) == 9
    assert own == {tuple(tokens(spec)) for spec in build(GROUP, GROUP, GROUP)}
    assert tokens(build(long, round_index=1)[0])[:20] != prefix
    assert len(build(long, scale_lengths=0.5)[0].prompt_token_ids) == 14


def test_prompts_of_another_group_are_said_again():
    """Each with tokens of its own behind it; round and round if there are fewer of them."""
    source = {**GROUP, "name": "docs", "prompt_tokens": {"uniform": [5, 50]}}
    again = {**GROUP, "count": 5, "prompts_of": "docs", "prompt_tokens": 2, "name": "again"}
    more = {**GROUP, "count": 1, "prompts_of": "again", "prompt_tokens": 1}
    specs = build(source, again, more)
    docs, said = specs[:3], specs[3:8]
    for number, spec in enumerate(said):
        assert tokens(spec)[:-2] == tokens(docs[number % 3])
    assert len({tuple(tokens(spec)[-2:]) for spec in said}) == 5
    assert tokens(specs[8])[:-1] == tokens(said[0])
    assert [as_tuple(spec) for spec in build(source)] == [as_tuple(spec) for spec in docs]


def test_phases_come_in_order_and_within_them_arrivals():
    """A phase's number decides before any time; equal times stay in file order."""
    late, early = {**GROUP, "phase": 2}, {**GROUP, "arrival": {"at_s": 9}}
    assert [(s.phase, s.arrival_s) for s in build(late, early, GROUP)] == (
        [(1, 0.0)] * 3 + [(1, 9.0)] * 3 + [(2, 0.0)] * 3
    )


def test_a_conversation_has_its_turns_one_behind_the_other():
    """Each a request with an id, a seed, lengths and a way to end of its own."""
    talk = {"count": 3, "prompt_tokens": {"uniform": [1, 9]}, "think_s": 0.5}
    group = {
        **GROUP,
        "turns": talk,
        "phase": 2,
        "output_tokens": {"uniform": [5, 50]},
        "abort": {"fraction": 0.5, "after_tokens": 2},
    }
    specs = build({**group, "count": 40})
    first, second, third = specs[0], specs[0].next_turn, specs[0].next_turn.next_turn
    assert third.next_turn is None
    assert [s.request_id for s in (first, second, third)] == ["r0-0-0", "r0-0-0-1", "r0-0-0-2"]
    assert [s.arrival_s for s in (first, second, third)] == [0.0, 0.5, 0.5]
    assert {s.phase for s in (first, second, third)} == {2}
    assert len({s.seed for s in (first, second, third)}) == 3
    turns = [turn for spec in specs for turn in (spec.next_turn, spec.next_turn.next_turn)]
    assert {len(turn.prompt_token_ids) for turn in turns} == set(range(1, 10))
    assert len({turn.max_tokens for turn in turns}) > 20
    assert 20 <= sum(turn.abort_after_tokens is not None for turn in turns) <= 60
    alone = build({**group, "count": 40, "turns": {**talk, "count": 2}})
    assert [as_tuple(s.next_turn) for s in alone] == [as_tuple(s.next_turn) for s in specs]


def test_a_turn_follows_all_that_was_said():
    """Prompt, answer, and tokens of its own; the turn behind it is still to come."""
    (first,) = build({**GROUP, "count": 1, "turns": {"count": 3, "prompt_tokens": 2}})
    second = turn_behind(first, [7, 8])
    assert tokens(second) == [*tokens(first), 7, 8, *tokens(first.next_turn)]
    third = turn_behind(second, [9])
    assert tokens(third) == [*tokens(second), 9, *tokens(first.next_turn.next_turn)]
    assert third.prompt_token_ids.dtype == np.int32
    assert turn_behind(third, [1]) is None
