"""A round checks the engine's account of each request against what was asked, and the pool's end.

Each test plants a fault that leaves every token right for the prompt the engine says it had.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.samples import Samples
from deepinfer.release import ReleaseQueue
from deepinfer.scheduler import Scheduler
from deepinfer.sequence import SamplingParams
from deepinfer.slots import Slots
from tests.bench.tiny import cells_of, run_matrix, workload

PLAIN = {"count": 3, "prompt_tokens": 20, "output_tokens": 6}
FORKED = {
    "count": 1,
    "prompt_tokens": 40,
    "output_tokens": 2,
    "fork": {"children": 3, "output_tokens": 6},
}


def wrong_ids(folder: Path) -> tuple[str, ...]:
    """Run one round and say which requests count as wrong."""
    samples = run_matrix(folder, cells_of(workload(PLAIN, FORKED)))[1]
    assert samples.verifications[0].wrong_requests == len(samples.verifications[0].wrong_ids)
    return samples.verifications[0].wrong_ids


def test_a_clean_round_has_no_problem(tmp_path: Path) -> None:
    """Without a fault nothing is wrong: the tests below are not about a check that cries wolf."""
    assert wrong_ids(tmp_path / "run") == ()


def test_another_prompt_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right answers to prompts that nobody asked are wrong answers."""
    add = Scheduler.add

    def shifted(self: Scheduler, request_id: str, prompt: Any, sampling: SamplingParams) -> Any:
        return add(self, request_id, (prompt + 1) % 256, sampling)

    monkeypatch.setattr(Scheduler, "add", shifted)
    assert {"r0-0-0", "r0-0-1", "r0-0-2"} <= set(wrong_ids(tmp_path / "run"))


def test_a_fork_that_loses_history_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child that continues from an earlier point of its parent is wrong."""
    fork = Scheduler.fork

    def forgetful(self: Scheduler, parent_id: str, *args: Any, **options: Any) -> Any:
        row = self.find(parent_id).row
        options["num_shared_tokens"] = int(self.seqs.num_tokens[row]) - 3
        return fork(self, parent_id, *args, **options)

    monkeypatch.setattr(Scheduler, "fork", forgetful)
    assert wrong_ids(tmp_path / "run") == ("r0-1-0.0", "r0-1-0.1", "r0-1-0.2")


def test_an_answer_cut_short_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that ends by length before its length is wrong, however right its tokens."""
    add = Scheduler.add

    def hasty(self: Scheduler, request_id: str, prompt: Any, sampling: SamplingParams) -> Any:
        short = SamplingParams(max(sampling.max_tokens // 2, 2), sampling.temperature)
        return add(self, request_id, prompt, short)

    monkeypatch.setattr(Scheduler, "add", hasty)
    assert set(wrong_ids(tmp_path / "run")) == {"r0-0-0", "r0-0-1", "r0-0-2"}


def test_a_leaked_block_fails_the_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that never come back are no result: the cell fails and says how many are missing."""
    give_up = ReleaseQueue.give_up

    def leaky(self: ReleaseQueue, table: Any, fence: Any = None, **why: str) -> None:
        give_up(self, table[:-1] if why.get("path") == "finish" else table, fence, **why)

    monkeypatch.setattr(ReleaseQueue, "give_up", leaky)
    samples = run_matrix(tmp_path / "run", cells_of(workload(PLAIN)))[1]
    failure = samples.failure_of(0)
    assert failure is not None
    assert "3 blocks were not given back" in failure.reason
    assert not [record for record in samples.rounds if not record.warmup]


def test_a_leaked_draft_slot_fails_the_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots are missed like blocks: here each request keeps its own."""
    monkeypatch.setattr(Slots, "give_up", lambda self, seq, fence, path: None)
    samples = run_matrix(tmp_path / "run", cells_of(workload(PLAIN), "overlap=on"))[1]
    failure = samples.failure_of(0)
    assert failure is not None
    assert "draft slots were not given back" in failure.reason


def waits_of(samples: Samples, cell: int) -> tuple[float, float]:
    """Microseconds the policy waited: by the steps' records, and by the counter of the round."""
    steps = sum(step.wait_us for step in samples.steps if step.cell == cell and step.round == 0)
    rounds = [record for record in samples.rounds if record.cell == cell and not record.warmup]
    return steps, float(rounds[0].counters["release_wait_us"] or 0)


def test_waits_of_aborts_in_mid_step_are_in_the_steps(tmp_path: Path) -> None:
    """What `blocking` waits for when clients leave during a step is in that step's wait."""
    leaving = {**PLAIN, "count": 8, "abort": {"fraction": 1.0, "after_tokens": 2}}
    cells = cells_of(workload(leaving, PLAIN), "release=blocking,step")
    samples = run_matrix(tmp_path / "run", cells)[1]
    in_steps, counted = waits_of(samples, 0)
    assert counted > 0
    assert in_steps == pytest.approx(counted)
    assert waits_of(samples, 1) == (0, 0)
