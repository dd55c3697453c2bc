"""`num_blocks: auto` from the command line: measured once, written down, kept when carried on."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from bench.catalog import find_profile
from bench.commands import main
from bench.probes.sizing import MeasuredSizing
from bench.samples import read_samples, samples_path
from bench.spec import PoolQuestion
from deepinfer.sizing import Needs, Sizing

WORK = "description: w\nrequests:\n  - {count: 3, prompt_tokens: 20, output_tokens: 6}\n"


@dataclass
class Memory:
    """A machine with room for `tokens` tokens, which counts how often it is asked."""

    tokens: int
    asked: list[PoolQuestion] = field(default_factory=list)

    def measure(self, question: PoolQuestion) -> MeasuredSizing:
        self.asked.append(question)
        num_blocks = self.tokens // question.engine.block_size
        lines = (("free at the start", self.tokens), ("weights", 0))
        needs = Needs(0, 0, 0, 0, question.engine.block_size)
        return MeasuredSizing(Sizing(num_blocks, lines, self.tokens), needs, ((3,),), ())


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    """Answers at once what takes a process and seconds to measure."""
    memory = Memory(4096)
    monkeypatch.setattr("bench.probes.sizing.measure_apart", memory.measure)
    return memory


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with a workload and a profile that asks for as much as there is."""
    monkeypatch.chdir(tmp_path)
    tiny = find_profile("cpu-tiny").read_text(encoding="utf-8")
    own = tiny.replace("num_blocks: 257", "num_blocks: auto") + "memory_bytes: 134217728\n"
    Path("mine.yaml").write_text(own, encoding="utf-8")
    Path("w.yaml").write_text(WORK, encoding="utf-8")


def run(*args: str) -> int:
    """A comparison of one round on that profile."""
    return main(["compare", "w.yaml", "--profile", "mine.yaml", "-r", "1", *args])


def test_cells_that_ask_alike_are_measured_once(
    memory: Memory, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two policies on two block sizes: two measurements, four pools, one note in the table."""
    axes = ("--release", "deferred,polled", "-a", "block_size=16,32")
    assert run(*axes, "-o", "out") == 0
    assert [question.engine.block_size for question in memory.asked] == [16, 32]
    header = read_samples(Path("out")).run
    assert header.num_blocks == (256, 128, 256, 128)
    assert [sizing["cells"] for sizing in header.sizings] == [[0, 2], [1, 3]]
    assert [sizing["num_blocks"] for sizing in header.sizings] == [256, 128]
    assert header.sizings[0]["lines"][0] == {"name": "free at the start", "bytes": 4096}
    assert header.config["engine"]["num_blocks"] == 256
    note = "num_blocks=auto: 256 (block_size=16), 128 (block_size=32), by the memory there was"
    assert note in " ".join(capsys.readouterr().out.split())


def test_pools_have_the_size_that_was_measured(memory: Memory) -> None:
    """The blocks of every step of a cell add up to its number."""
    assert run("-a", "num_blocks=auto,40", "-o", "out") == 0
    samples = read_samples(Path("out"))
    assert samples.run.num_blocks == (256, 40)
    for cell, num_blocks in enumerate(samples.run.num_blocks):
        steps = [step for step in samples.steps if step.cell == cell]
        assert {s.blocks_free + s.blocks_held + s.blocks_withheld + 1 for s in steps} == {
            num_blocks
        }


def test_numbers_that_are_given_are_not_measured(memory: Memory) -> None:
    """A run as before: nothing of it in the file."""
    assert run("-s", "num_blocks=40", "-o", "out") == 0
    assert memory.asked == []
    header = read_samples(Path("out")).run
    assert (header.num_blocks, header.sizings) == ((), ())
    assert not any("auto" in note for note in header.notes)


def test_a_run_that_is_carried_on_keeps_its_pools(memory: Memory) -> None:
    """The memory of another day does not change the rounds that are left."""
    args = ("--release", "deferred,polled", "-o", "out", "-r", "2")
    assert run(*args) == 0
    path = samples_path(Path("out"))
    lines = path.read_bytes().splitlines(keepends=True)
    rounds = [
        i for i, line in enumerate(lines) if b'"round": 0' in line and b'"kind": "round"' in line
    ]
    path.write_bytes(b"".join(lines[: rounds[-1] + 1]))
    memory.tokens = 1600
    assert run(*args, "--resume") == 0
    samples = read_samples(Path("out"))
    assert len(memory.asked) == 1
    assert samples.run.num_blocks == (256, 256)
    last = [step for step in samples.steps if step.round == 1]
    assert {s.blocks_free + s.blocks_held + s.blocks_withheld for s in last} == {255}
    assert {step.cell for step in last} == {0, 1}


def test_a_run_with_a_number_is_not_carried_on_with_auto(
    memory: Memory, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are two configurations; nothing is measured to find that out."""
    assert run("-s", "num_blocks=40", "-o", "out") == 0
    capsys.readouterr()
    assert run("-o", "out", "--resume") == 2
    assert "configuration" in capsys.readouterr().err
    assert memory.asked == []


def test_a_dry_run_says_that_it_would_measure(
    memory: Memory, capsys: pytest.CaptureFixture[str]
) -> None:
    """And does not."""
    assert run("-a", "block_size=16,32", "--dry-run") == 0
    assert "num_blocks=auto: will be measured at the start, 2 times" in capsys.readouterr().out
    assert run("-s", "num_blocks=40", "--dry-run") == 0
    assert "auto" not in capsys.readouterr().out
    assert memory.asked == []


def test_a_profile_of_a_workload_measures_too(memory: Memory) -> None:
    """`profile step` makes engines of the same configuration."""
    assert main(["profile", "step", "w.yaml", "--profile", "mine.yaml", "-r", "1"]) == 0
    assert len(memory.asked) == 1


def test_what_is_measured_fits(capsys: pytest.CaptureFixture[str]) -> None:
    """With nothing in its place: a budget of 128 MiB becomes blocks, and the run is right."""
    assert run("-o", "out") == 0
    header = read_samples(Path("out")).run
    (sizing,) = header.sizings
    assert header.num_blocks == (sizing["num_blocks"],)
    assert 4000 < sizing["num_blocks"] < 134217728 // 8320
    assert sum(line["bytes"] for line in sizing["lines"]) == sizing["bytes_for_blocks"]
    said = f"num_blocks=auto: {sizing['num_blocks']:,} of 16 tokens, measured"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("-s", "num_blocks=lots"), "num_blocks: not valid (got 'lots'); expected a whole number"),
        (("-s", "num_blocks=1"), "num_blocks: out of range (got 1); expected at least 2"),
        (("-a", "num_blocks=auto,auto"), "auto is given twice"),
        (
            ("--profile", "cpu-tiny", "-s", "num_blocks=auto"),
            "num_blocks: auto on device cpu, but profile cpu-tiny has no memory_bytes",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    args: tuple[str, ...], message: str, memory: Memory, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is measured."""
    assert run(*args) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("error:") == 1
    assert memory.asked == []


def test_a_log_has_no_memory_to_measure(capsys: pytest.CaptureFixture[str]) -> None:
    """`replay` has no model; it takes numbers."""
    args = ["run", "w.yaml", "--profile", "cpu-tiny", "--record", "ops.jsonl"]
    assert main(args) == 0
    capsys.readouterr()
    assert main(["replay", "ops.jsonl", "-a", "num_blocks=auto,9"]) == 2
    assert "axis num_blocks: auto, and a log has no model" in capsys.readouterr().err
