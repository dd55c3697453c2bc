"""The engine end to end: a tiny real model, every policy, and the order of a step's moments."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from deepinfer.block_manager import Verdict
from deepinfer.config import EngineConfig
from deepinfer.device import open_device
from deepinfer.engine import LLMEngine
from deepinfer.errors import DeepInferError, UnknownRequestError, UserError
from deepinfer.models.weights import load_weights
from deepinfer.names import DISCIPLINES, FENCES, FREE_ORDERS, RELEASE_POLICIES
from deepinfer.sequence import SamplingParams
from tests.deepinfer.step_plans import TINY

CONFIG = EngineConfig(
    block_size=4, num_blocks=65, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64
)
DEVICES = ["cpu", "cpu-stepped", pytest.param("cuda", marks=pytest.mark.cuda)]
PROMPTS = [
    np.random.default_rng(index).integers(0, TINY.vocab_size, 3 + 4 * index) for index in range(8)
]
DRAWN = [SamplingParams(max_tokens=8, temperature=0.8, seed=index) for index in range(8)]


@pytest.fixture(scope="module")
def weights():
    """One set of weights on the CPU for every engine of this file."""
    return load_weights(TINY, open_device("cpu-stepped"))


@pytest.fixture
def engine_with(weights):
    """Make an engine of the common settings with some changed; closed after the test."""
    engines = []

    def make(device="cpu-stepped", **changes):
        on_cpu = device != "cuda"
        engine = LLMEngine(
            TINY, replace(CONFIG, **changes), device=device, weights=weights if on_cpu else None
        )
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()


def tokens_of(outputs):
    return [output.token_ids.tolist() for output in outputs]


def run(engine):
    """Step to the end; outputs by request id."""
    outputs = {}
    while engine.has_unfinished():
        output = engine.step()
        assert output is not None, "unfinished, but nothing to run"
        outputs.update((ended.request_id, ended) for ended in output.finished)
    assert engine.blocks.num_free == engine.blocks.num_usable
    engine.blocks.check_integrity()
    return outputs


def fork_outputs(engine, **fork):
    """A parent and three children of it, to their end; tokens by request id."""
    engine.add_request("parent", PROMPTS[2], replace(DRAWN[2], max_tokens=12))
    engine.step()
    engine.step()
    for index in range(3):
        assert engine.fork("parent", f"child{index}", DRAWN[index], **fork) is Verdict.OK
    return {name: output.token_ids.tolist() for name, output in run(engine).items()}


# -- the same tokens, whatever the choices ---------------------------------------------------------


@pytest.fixture(scope="module")
def expected(weights):
    """Tokens of every prompt run alone, and of a fork, under the defaults."""
    alone = []
    for prompt, sampling in zip(PROMPTS, DRAWN, strict=True):
        with LLMEngine(TINY, CONFIG, device="cpu-stepped", weights=weights) as engine:
            alone += tokens_of(engine.generate([prompt], sampling))
    with LLMEngine(TINY, CONFIG, device="cpu-stepped", weights=weights) as engine:
        return alone, fork_outputs(engine)


@pytest.mark.parametrize("device", DEVICES)
def test_tokens_do_not_depend_on_who_shares_the_batch(engine_with, expected, device):
    """Eight requests together get what each gets alone, drawn tokens included."""
    assert tokens_of(engine_with(device).generate(PROMPTS, DRAWN)) == expected[0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("release", RELEASE_POLICIES)
def test_every_policy_gives_the_same_tokens(engine_with, expected, device, release):
    """On one compute stream even `early` is right by luck; the safe ones by rule."""
    engine = engine_with(device, release=release, num_blocks=17)
    assert tokens_of(engine.generate(PROMPTS, DRAWN)) == expected[0]
    assert fork_outputs(engine_with(device, release=release)) == expected[1]


@pytest.mark.parametrize("free_order", FREE_ORDERS)
@pytest.mark.parametrize("discipline", DISCIPLINES)
@pytest.mark.parametrize("fence", FENCES)
def test_orders_and_fences_give_the_same_tokens(
    engine_with, expected, free_order, discipline, fence
):
    """Where a block comes from changes no answer."""
    choice = {"free_order": free_order, "discipline": discipline, "fence": fence}
    assert fork_outputs(engine_with(**choice)) == expected[1]


@pytest.mark.parametrize("budget", [8, 9, 13])
def test_a_chunked_prompt_equals_an_unchunked_one(engine_with, expected, budget):
    """Prompts computed in pieces continue as those computed at once."""
    engine = engine_with(max_num_batched_tokens=budget)
    assert tokens_of(engine.generate(PROMPTS, DRAWN)) == expected[0]


@pytest.mark.parametrize("preemption", ["newest", "most_blocks"])
def test_a_pool_too_small_preempts_and_changes_no_token(engine_with, expected, preemption):
    """Rows thrown away are recomputed to the same continuation."""
    engine = engine_with(num_blocks=14, preemption=preemption)
    outputs = engine.generate(PROMPTS, DRAWN)
    assert tokens_of(outputs) == expected[0]
    assert sum(output.num_preemptions for output in outputs) > 0
    assert [len(output.logprobs) for output in outputs] == [8] * 8


@pytest.mark.parametrize("tail", ["last", "partial"])
@pytest.mark.parametrize("num_tokens", [7, 8, 9])
def test_a_fork_to_decode_continues_as_its_parent_would(engine_with, tail, num_tokens):
    """Around a block boundary a greedy child repeats its greedy parent token for token."""
    engine = engine_with(fork_copy=tail)
    greedy = SamplingParams(max_tokens=9)
    engine.add_request("parent", PROMPTS[3][:num_tokens], greedy)
    first = engine.step().token_ids.tolist()
    engine.fork("parent", "child", replace(greedy, max_tokens=8))
    outputs = run(engine)
    assert first + outputs["child"].token_ids.tolist() == outputs["parent"].token_ids.tolist()


@pytest.mark.parametrize("num_shared", [5, 7, 8, 9, 11])
def test_a_fork_with_its_own_tokens_equals_the_whole_prompt(engine_with, num_shared):
    """The prompt path reads the shared rows as if the child had computed them itself."""
    engine = engine_with()
    greedy, own = SamplingParams(max_tokens=6), [3, 1, 4]
    engine.add_request("parent", PROMPTS[2], SamplingParams(max_tokens=10))
    engine.step()
    engine.fork("parent", "child", greedy, own_token_ids=own, num_shared_tokens=num_shared)
    forked = run(engine)["child"]
    prompt = [*PROMPTS[2][:num_shared].tolist(), *own]
    assert forked.prompt_token_ids.tolist() == prompt
    assert tokens_of([forked]) == tokens_of(engine.generate([prompt], greedy))


def test_weights_come_from_the_model_seed(engine_with):
    """The same seed gives the same model, another one a different model."""

    def tokens(seed):
        with LLMEngine(replace(TINY, seed=seed), CONFIG, device="cpu-stepped") as engine:
            return tokens_of(engine.generate(PROMPTS[:3], SamplingParams()))

    assert tokens(1) == tokens(1)
    assert tokens(1) != tokens(2)


# -- the moments of a step -------------------------------------------------------------------------


class Recorder:
    """Writes into one list what the host does and what the device has done by then."""

    def __init__(self, engine, monkeypatch):
        self.engine, self.log, self._num_seen = engine, [], len(engine.device.log)
        for owner, name, label in [
            (engine.scheduler, "schedule", "plan"),
            (engine.worker, "submit_copies", "copies queued"),
            (engine.release, "give_up", "sources given up"),
            (engine.worker, "submit_forward", "forward queued"),
            (engine.release, "release_point", "release point"),
            (engine.release, "collected", "collected"),
            (engine.scheduler, "commit", "commit"),
        ]:
            monkeypatch.setattr(owner, name, self._wrap(getattr(owner, name), label))
        record = engine.device.stream("copy").record
        monkeypatch.setattr(engine.device.stream("copy"), "record", self._wrap(record, "fence"))

    def _wrap(self, call, label):
        def wrapped(*args, **keys):
            self.note_device()
            self.log.append(label)
            result = call(*args, **keys)
            self.note_device()
            return result

        return wrapped

    def note_device(self):
        done = self.engine.device.log
        for stream, label in done[self._num_seen :]:
            self.log.append(f"[{stream}: {label.rsplit(' step')[0]}]")
        self._num_seen = len(done)


COPY, FORWARD = "[copy: copy_blocks]", "[compute: forward]"
HEAD = ["plan", "copies queued", "fence"]  # that fence is the one the forward waits for
TAIL = ["collected", "commit"]
EXPECTED_ORDER = {
    "early": [*HEAD, "sources given up", "forward queued", "release point", COPY, FORWARD, *TAIL],
    "blocking": [
        *HEAD,
        *("fence", "sources given up", COPY, "forward queued", "release point", FORWARD),
        *TAIL,
    ],
    "deferred": [
        *HEAD,
        *("fence", "sources given up", "forward queued", "release point", COPY, FORWARD),
        *TAIL,
    ],
}
EXPECTED_ORDER["step"] = EXPECTED_ORDER["early"]
EXPECTED_ORDER["polled"] = EXPECTED_ORDER["ordered"] = EXPECTED_ORDER["deferred"]


@pytest.mark.parametrize("release", RELEASE_POLICIES)
def test_the_order_of_a_fork_step(engine_with, monkeypatch, release):
    """Plan, copies, fence, sources, forward, release point, result, commit: under each policy,
    with the copies run by whoever waits first."""
    engine = engine_with(release=release)
    engine.add_request("parent", PROMPTS[2], SamplingParams(max_tokens=8))
    engine.step()
    engine.fork("parent", "child", SamplingParams(max_tokens=8))
    recorder = Recorder(engine, monkeypatch)
    free = engine.blocks.num_free
    engine.submit()
    withheld_after_submit = engine.blocks.num_withheld
    waited = engine.release.counters.num_waits
    engine.collect()
    recorder.note_device()
    assert recorder.log == EXPECTED_ORDER[release]
    assert waited == (release in ("blocking", "deferred"))
    assert withheld_after_submit == 0  # the parent still owns the source
    assert engine.blocks.num_free == free - 1


@pytest.mark.parametrize(
    ("release", "withheld"),
    [
        ("early", 0), ("blocking", 0), ("deferred", 0), ("polled", 1), ("step", 1), ("ordered", 0),
    ],
)  # fmt: skip
def test_a_source_without_another_owner_is_withheld_as_the_policy_says(
    engine_with, release, withheld
):
    """The parent is gone, so the tail's source is free when the policy lets it go."""
    engine = engine_with(release=release)
    engine.add_request("parent", PROMPTS[2][:10], SamplingParams(max_tokens=8))
    engine.step()
    engine.fork("parent", "child", SamplingParams(max_tokens=4))
    engine.abort("parent")
    engine.submit()
    assert engine.blocks.num_withheld == withheld
    engine.collect()
    assert engine.blocks.num_withheld == 0
    run(engine)


@pytest.mark.parametrize("fence", FENCES)
def test_one_event_per_step_or_per_block(engine_with, monkeypatch, fence):
    """Three children of one step share an event, or have one each."""
    engine = engine_with(release="polled", fence=fence)
    engine.add_request("parent", PROMPTS[2], SamplingParams(max_tokens=8))
    engine.step()
    for index in range(3):
        engine.fork("parent", f"child{index}", SamplingParams(max_tokens=2))
    recorder = Recorder(engine, monkeypatch)
    engine.step()
    assert recorder.log.count("fence") - 1 == {"step": 1, "block": 3}[fence]
    run(engine)


# -- aborts and idle -------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("release", RELEASE_POLICIES)
def test_an_abort_in_flight_leaves_the_others_their_tokens(engine_with, expected, device, release):
    """The step in flight goes on for everybody else, and nothing leaks."""
    engine = engine_with(device, release=release, num_blocks=33)
    for index in range(3):
        engine.add_request(f"r{index}", PROMPTS[index], DRAWN[index])
    engine.step()
    engine.submit()
    aborted = engine.abort("r1")
    assert (aborted.finish_reason, len(aborted.token_ids)) == ("abort", 1)
    engine.add_request("late", PROMPTS[3], DRAWN[3])
    assert "r1" not in engine.collect().request_ids
    outputs = run(engine)
    tokens = tokens_of([outputs[name] for name in ("r0", "r2", "late")])
    assert tokens == [expected[0][index] for index in (0, 2, 3)]


@pytest.mark.parametrize("release", RELEASE_POLICIES)
def test_the_last_abort_leaves_nothing_withheld(engine_with, release):
    """No step will come whose release point could lift the fences, so the abort does."""
    engine = engine_with(release=release)
    engine.add_request("a", PROMPTS[1], DRAWN[0])
    engine.add_request("b", PROMPTS[2], DRAWN[0])
    engine.submit()
    engine.abort("a")
    engine.collect()
    engine.abort("b")
    assert not engine.has_unfinished()
    assert engine.blocks.num_free == engine.blocks.num_usable


def test_aborting_all_in_flight_ends_the_work(engine_with):
    """The step in flight is still collected; afterwards the engine is idle and works."""
    engine = engine_with(release="deferred")
    engine.add_request("a", PROMPTS[1], DRAWN[0])
    engine.submit()
    engine.abort("a")
    assert engine.has_unfinished()
    assert engine.collect().request_ids == []
    assert not engine.has_unfinished()
    assert engine.step() is None
    assert engine.blocks.num_free == engine.blocks.num_usable


def test_an_output_does_not_change_with_later_steps(engine_with):
    """What a caller clones of step t reads the same after step t + 1, and what has ended too."""
    engine = engine_with()
    engine.add_request("short", PROMPTS[0], SamplingParams(max_tokens=1))
    engine.add_request("long", PROMPTS[1], SamplingParams(max_tokens=5))
    first = engine.step().clone()
    kept = (first.token_ids.tolist(), first.finished[0].token_ids.tolist())
    run(engine)
    assert (first.token_ids.tolist(), first.finished[0].token_ids.tolist()) == kept


# -- what a step reports ---------------------------------------------------------------------------


def test_stats_describe_the_step_when_it_was_submitted(engine_with):
    """Requests and blocks are counted while the step is in flight, not after its commit."""
    engine = engine_with(max_num_seqs=2)
    for index in range(3):
        engine.add_request(f"r{index}", PROMPTS[0], SamplingParams(max_tokens=1))
    output = engine.step()
    stats = output.stats
    assert output.started_ids == ["r0", "r1"]
    assert (stats.step, stats.num_seqs, stats.num_tokens) == (1, 2, 6)
    assert (stats.num_running, stats.num_waiting) == (2, 1)
    assert (stats.blocks_free, stats.blocks_held, stats.blocks_withheld) == (62, 2, 0)
    assert [ended.request_id for ended in output.finished] == ["r0", "r1"]


@pytest.mark.parametrize("release", ["blocking", "deferred", "polled"])
def test_times_of_a_step_are_never_negative(engine_with, release):
    """A wait is taken out of the phase in which it happened, the planning included."""
    engine = engine_with(release=release, num_blocks=5, max_model_len=16)
    engine.add_request("a", PROMPTS[2][:9], SamplingParams(max_tokens=4))
    engine.add_request("b", PROMPTS[2][:9], SamplingParams(max_tokens=4))
    engine.submit()
    engine.abort("a")  # withheld under `deferred`; "b" needs them, so planning waits
    stats = [engine.collect().stats]
    while engine.has_unfinished():
        stats.append(engine.step().stats)
    for step in stats:
        times = [step.schedule_ns, step.submit_ns, step.release_ns, step.collect_ns, step.commit_ns]
        assert min(times) > 0
        assert min(step.wait_ns, step.result_wait_ns, step.device_ms) >= 0
        assert step.start_ns < step.end_ns


# -- bad input -------------------------------------------------------------------------------------


def test_what_can_never_fit_is_refused_and_the_rest_runs(engine_with):
    """NEVER is a verdict, not an exception, and the queue goes on."""
    engine = engine_with(num_blocks=5)
    assert engine.add_request("never", PROMPTS[4], DRAWN[0]) is Verdict.NEVER
    assert engine.add_request("fits", PROMPTS[0], DRAWN[0]) is Verdict.OK
    assert run(engine).keys() == {"fits"}


@pytest.mark.parametrize(
    ("prompt", "match"),
    [
        ([], "empty prompt"),
        ([1, TINY.vocab_size], f"token id {TINY.vocab_size} is outside"),
        ([1, -1], "token id -1 is outside"),
        ([[1, 2]], "one-dimensional"),
        ([[1], [2, 3]], "one-dimensional"),
        ([0.5], "integers"),
        ([2**70], "integers"),
        ("text", "one-dimensional"),
    ],
)
def test_bad_prompts_are_user_errors(engine_with, prompt, match):
    """The message says what is wrong with the tokens; nothing is queued."""
    engine = engine_with()
    with pytest.raises(UserError, match=match):
        engine.add_request("a", prompt, DRAWN[0])
    assert not engine.has_unfinished()


@pytest.mark.parametrize(
    ("prompts", "sampling"),
    [
        ([[1, 2], []], SamplingParams()),
        ([[1, 2], [1] * 60], SamplingParams()),
        ([[1, 2], [3]], [SamplingParams()]),
        ([[1, 2], [3]], [SamplingParams(), SamplingParams(max_tokens=0)]),
    ],
)
def test_a_refused_generate_queues_nothing(engine_with, prompts, sampling):
    """One bad prompt among good ones leaves the engine as it was."""
    engine = engine_with()
    with pytest.raises(UserError):
        engine.generate(prompts, sampling)
    assert not engine.has_unfinished()
    assert engine.blocks.num_free == engine.blocks.num_usable
    assert len(engine.generate([[1, 2]], SamplingParams(max_tokens=2))) == 1


def test_generate_does_not_swallow_the_outputs_of_others(engine_with):
    """With requests of its own in flight the caller steps; generate refuses."""
    engine = engine_with()
    engine.add_request("mine", PROMPTS[0], DRAWN[0])
    with pytest.raises(UserError, match="other requests"):
        engine.generate([[1]], SamplingParams())
    assert run(engine).keys() == {"mine"}


def test_calls_out_of_turn_are_refused(engine_with):
    """One step in flight at most, and nothing to collect without one."""
    engine = engine_with()
    engine.add_request("a", PROMPTS[0], DRAWN[0])
    with pytest.raises(DeepInferError, match="no step is in flight"):
        engine.collect()
    engine.submit()
    with pytest.raises(DeepInferError, match="already in flight"):
        engine.submit()
    engine.collect()
    with pytest.raises(UnknownRequestError, match="'nobody'"):
        engine.abort("nobody")
    with pytest.raises(UnknownRequestError, match="'nobody'"):
        engine.fork("nobody", "child", DRAWN[0])


def test_an_engine_that_cannot_start_closes_its_device(tmp_path, monkeypatch):
    """A model that cannot be loaded leaves no open device behind."""
    opened = []

    def open_and_note(name):
        opened.append(open_device(name))
        return opened[0]

    monkeypatch.setattr("deepinfer.engine.open_device", open_and_note)
    with pytest.raises(UserError):
        LLMEngine(replace(TINY, path=tmp_path / "nothing"), CONFIG, device="cpu-stepped")
    with pytest.raises(DeepInferError, match="closed"):
        opened[0].stream("compute")


def test_an_unknown_fence_is_a_user_error():
    """The engine checks what only the engine uses."""
    with pytest.raises(UserError, match="fence: unknown name 'steps'"):
        LLMEngine(TINY, replace(CONFIG, fence="steps"), device="cpu-stepped")
