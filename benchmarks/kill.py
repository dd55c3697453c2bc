"""Kill a run at random moments; what it measured must be readable, and the run must be completable.

    python benchmarks/kill.py [--times 200] [--jobs 2] [--seed 0]

Each time `compare` runs a small workload on profile cpu-tiny (two cells, ten rounds), and its
process group gets SIGKILL at a moment drawn evenly from the length of a whole run. Every other file
then loses a random part of its last line too, as it may when the machine goes down. Then:

    1. `export` prints what there is, or says that nothing was measured
    2. no cell, round, request, step or verdict is in the file twice
    3. the same command with `--resume` (without it, where no file was made yet) completes the run
    4. whole rounds are still there byte for byte, each of the others ran once, and the exported
       table has the rows, columns and verdicts of a run that nobody killed

Prints one line a kill on stderr, then how often each phase was struck; exit code 1 on any problem.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.resume import cut_to_whole_rounds  # noqa: E402 -- after the path is set
from bench.samples import SAMPLES_FILE, Samples, read_samples  # noqa: E402

ROUNDS = 10
WORKLOAD = """\
description: a parent and its children, and two who chat
requests:
  - count: 1
    prompt_tokens: 20
    output_tokens: 5
    fork: {children: 2, output_tokens: 6}
  - {count: 2, prompt_tokens: 12, output_tokens: 6}
"""
TIMEOUT_S = 300
# Columns that say what was run and whether it was right, not how fast it was.
SETTLED_COLUMNS = (
    *("release", "free_order", "unsafe", "baseline"),
    *("wrong_requests", "block_copies", "later", "preemptions"),
)


class Trials:
    """Runs in a scratch folder, all of the same command."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        (scratch / "work.yaml").write_text(WORKLOAD, encoding="utf-8")
        start = time.monotonic()
        whole = self._command("compare", "whole")
        self.length_s = time.monotonic() - start
        assert whole.returncode == 0, whole.stderr
        self._whole = read_samples(scratch / "whole")
        self._whole_table = self._table("whole")

    def kill(self, number: int, delay_s: float, torn: float | None) -> tuple[str, list[str]]:
        """Kill a run after `delay_s`; the phase it was in, and what is wrong afterwards.

        `torn` is the share of the last line that is lost as well.
        """
        name = f"killed-{number}"
        file = self._scratch / name / SAMPLES_FILE
        with subprocess.Popen(
            self._argv("compare", name),
            cwd=self._scratch,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ) as process:
            time.sleep(delay_s)
            os.killpg(process.pid, signal.SIGKILL)  # not reaped yet: the group is still its own
        content = file.read_bytes() if file.exists() else None
        if content and torn is not None:
            last_line = len(content) - (content.rfind(b"\n", 0, -1) + 1)
            content = content[: len(content) - max(round(torn * last_line), 1)]
            file.write_bytes(content)
        problems = [*self._problems_of_killed(name, content), *self._problems_of_resumed(name)]
        if not problems:
            shutil.rmtree(self._scratch / name)
        return phase_of(content), problems

    def _problems_of_killed(self, name: str, content: bytes | None) -> Iterable[str]:
        if content is None:
            return
        shown = self._command("export", name)
        if content.count(b"\n"):
            if shown.returncode:
                yield f"export: {shown.stderr.strip()}"
            else:
                yield from repeated(read_samples(self._scratch / name))
        elif shown.returncode != 2 or "nothing was measured" not in shown.stderr:
            yield f"export of a file without a whole line: {shown.stderr.strip()}"

    def _problems_of_resumed(self, name: str) -> Iterable[str]:
        folder = self._scratch / name
        kept = b""
        options: tuple[str, ...] = ()
        if (folder / SAMPLES_FILE).exists():
            options = ("--resume",)
            copy = self._scratch / f"{name}-kept"
            shutil.copytree(folder, copy)
            cut_to_whole_rounds(copy)
            kept = (copy / SAMPLES_FILE).read_bytes()
            shutil.rmtree(copy)
        resumed = self._command("compare", name, *options)
        if resumed.returncode:
            yield f"{' '.join(options) or 'the command again'}: {resumed.stderr.strip()[-400:]}"
            return
        if not (folder / SAMPLES_FILE).read_bytes().startswith(kept):
            yield "resuming changed what was measured before"
        samples = read_samples(folder)
        yield from repeated(samples)
        for what, whole, found in (
            ("rounds", measured(self._whole), measured(samples)),
            ("requests", requests(self._whole), requests(samples)),
            ("cells", self._whole.cells, samples.cells),
            ("end", self._whole.end, samples.end),
            ("table", self._whole_table, self._table(name)),
        ):
            if whole != found:
                yield f"{what} of the resumed run: {found!s:.300} instead of {whole!s:.300}"

    def _table(self, name: str) -> dict[str, Any]:
        """The exported table without its times."""
        table = json.loads(self._command("export", name, "--format", "json").stdout)
        rows = [{key: row[key] for key in SETTLED_COLUMNS} for row in table["rows"]]
        columns = [sorted(row) for row in table["rows"]]
        return {"rows": rows, "columns": columns}

    def _command(self, command: str, name: str, *more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self._argv(command, name, *more),
            cwd=self._scratch,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )

    def _argv(self, command: str, name: str, *more: str) -> list[str]:
        program = [sys.executable, str(ROOT / "cli.py"), command]
        if command == "export":
            return [*program, name, *more]
        work = ["work.yaml", "--profile", "cpu-tiny", "--release", "deferred,step"]
        return [*program, *work, "-r", str(ROUNDS), "-o", name, *more]


def phase_of(content: bytes | None) -> str:
    """What the run was at when this was all there was of its file."""
    if content is None:
        return "before the file"
    if not content.endswith(b"\n"):
        return "within a line" if b"\n" in content else "within the first line"
    kind = json.loads(content.splitlines()[-1])["kind"]
    if kind == "end":
        return "after the end"
    return "before the first round" if kind in ("run", "cell") else f"behind a {kind}"


def measured(samples: Samples) -> list[tuple[int, int, int]]:
    """(round, cell, output tokens) of the rounds that count, by round."""
    return sorted((r.round, r.cell, r.num_output_tokens) for r in samples.rounds if not r.warmup)


def requests(samples: Samples) -> list[tuple[int, int, str, int, str]]:
    """What each request of the rounds that count came to, by round."""
    return sorted(
        (r.round, r.cell, r.request_id, r.num_output_tokens, r.finish_reason)
        for r in samples.requests
        if r.round >= 0
    )


def repeated(samples: Samples) -> list[str]:
    """A line for each kind of record of which one is there twice."""
    keys: dict[str, list[tuple[Any, ...]]] = {
        "cell": [(r.cell,) for r in samples.cells],
        "round": [(r.cell, r.round) for r in samples.rounds],
        "request": [(r.cell, r.round, r.request_id) for r in samples.requests],
        "step": [(r.cell, r.round, r.step) for r in samples.steps],
        "verification": [(r.cell, r.round) for r in samples.verifications],
    }
    return [
        f"{kind} {key}: {count} records"
        for kind, found in keys.items()
        for key, count in Counter(found).most_common(1)
        if count > 1
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Kill and resume as often as asked; the exit code."""
    parser = argparse.ArgumentParser(description="Kill a run at random moments and carry it on.")
    parser.add_argument("--times", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=2, help="runs at once")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    options = parser.parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    scratch = Path(tempfile.mkdtemp(prefix="deepinfer-kill-"))
    trials = Trials(scratch)
    draw = random.Random(options.seed)
    # With several at once each is slower than the whole run was alone.
    longest_s = trials.length_s * (1.0 + 0.2 * (options.jobs > 1))
    drawn = [(draw.uniform(0, longest_s), draw.random()) for _ in range(options.times)]
    phases: Counter[str] = Counter()
    num_problems = 0
    with ThreadPoolExecutor(options.jobs) as pool:
        results = [
            pool.submit(trials.kill, number, delay_s, torn if number % 2 else None)
            for number, (delay_s, torn) in enumerate(drawn)
        ]
        for number, ((delay_s, _), result) in enumerate(zip(drawn, results, strict=True)):
            phase, problems = result.result()
            phases[phase] += 1
            num_problems += len(problems)
            print(f"{number:4} {delay_s:6.2f} s  {phase}", file=sys.stderr)
            for problem in problems:
                print(f"     PROBLEM in {scratch}/killed-{number}: {problem}", file=sys.stderr)
    for phase, count in phases.most_common():
        print(f"{count:5}  {phase}")
    print(f"{options.times} kills in a run of {trials.length_s:.1f} s: {num_problems} problems")
    if not num_problems:
        shutil.rmtree(scratch)
    return int(num_problems > 0)


if __name__ == "__main__":
    sys.exit(main())
