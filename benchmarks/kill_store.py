"""Kill a process while it saves to a directory; the next one must read what is whole, only that.

    python benchmarks/kill_store.py [--times 200] [--seed 0]

Each time a process saves entries of 1 KiB to 1 MiB, in chains of eight, to a new directory, and
gets SIGKILL at a moment drawn evenly from its first 60 ms. Every third directory has a small
budget, so that files are removed meanwhile. Of every other one the newest entry then loses a random
part of its file, as it may when the machine goes down. Then the next process starts, and:

    1. nothing is left of the file that was being written
    2. every file gives the rows of its key; the torn one is a miss and the one warning
    3. every entry whose `save` had returned is there, unless the budget is small
    4. files are within the budget, and what was lost can be saved again

Prints how often each phase was struck; exit code 1 on any problem.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from deepinfer.store.directory import (  # noqa: E402 -- after the path is set
    ENTRY_NAME,
    TEMPORARY_NAME,
    DirectoryStore,
)
from deepinfer.store.segment import HEADER_BYTES, Bytes  # noqa: E402

LONGEST_S = 0.06
SEED_OF_MODEL = b"model of kill.py"
LARGE, SMALL = 1 << 30, 3 << 20
LARGEST = 1 << 20
CHAIN = 8


def rows(key: int) -> Bytes:
    """What the entry of a key holds."""
    draw = np.random.default_rng(key)
    return draw.integers(0, 256, 1 << draw.integers(10, 21), np.uint8)


def parent_of(key: int) -> int | None:
    """Keys count from 1; every eighth begins a chain."""
    return key - 1 if (key - 1) % CHAIN else None


def save_until_killed(path: Path, budget: int, acks: int) -> None:
    """Save one entry after the other, and write a byte when it begins and after each."""
    store = DirectoryStore(path, SEED_OF_MODEL, budget)
    os.write(acks, b"+")
    for key in count(1):
        if not store.save(key, parent_of(key), rows(key)):
            os._exit(1)
        os.write(acks, b"+")


def kill_one(path: Path, budget: int, delay_s: float) -> int:
    """Run and kill a saving process; how many of its saves had returned."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            save_until_killed(path, budget, writing)
        finally:
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading, "rb") as acks:
        acks.read(1)
        time.sleep(delay_s)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), "the saving process ended by itself"
        return len(acks.read())


def phase_of(path: Path, num_saved: int) -> str:
    """What the process was at."""
    sizes = [file.stat().st_size for file in path.iterdir() if TEMPORARY_NAME.fullmatch(file.name)]
    if not sizes:
        return "between two files"
    whole = HEADER_BYTES + len(rows(num_saved + 1))
    if sizes[0] == whole:
        return "a file written and not renamed"
    return "within a file" if sizes[0] else "a file made"


class Warnings(logging.Handler):
    """Keeps what the store warns of."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """As the base's."""
        self.messages.append(record.getMessage())


def entries_of(path: Path) -> dict[int, Path]:
    """The file of every key."""
    found = {file: ENTRY_NAME.fullmatch(file.name) for file in path.iterdir()}
    return {int(match[2], 16): file for file, match in found.items() if match}


def problems_of(path: Path, budget: int, num_saved: int, torn: int | None) -> Iterator[str]:
    """What is wrong with a killed process's directory, as the next process sees it."""
    warnings = Warnings()
    log = logging.getLogger("deepinfer.store.directory")
    log.addHandler(warnings)
    log.propagate = False
    store = DirectoryStore(path, SEED_OF_MODEL, budget)
    log.removeHandler(warnings)
    entries = entries_of(path)
    if others := [file.name for file in path.iterdir() if file not in entries.values()]:
        yield f"left behind: {others}"
    log.addHandler(warnings)
    for key in sorted(entries):
        found = loaded(store, key)
        if (found is None) != (key == torn):
            yield f"key {key} is {'lost' if found is None else 'found, though it is torn'}"
        elif found is not None and found.tobytes() != rows(key).tobytes():
            yield f"key {key} has wrong rows"
    log.removeHandler(warnings)
    if len(warnings.messages) != (torn is not None):
        yield f"warnings: {warnings.messages}"
    if budget == LARGE and (lost := set(range(1, num_saved + 1)) - entries.keys()):
        yield f"saved and not there: {sorted(lost)}"
    num_bytes = sum(file.stat().st_size for file in entries.values())
    if num_bytes > budget:
        yield f"{num_bytes} bytes of files within {budget}"
    again = (
        1 + CHAIN * (num_saved + 1) if torn is None else torn
    )  # a first one: its parent may be gone
    if not store.save(again, parent_of(again), rows(again)) or loaded(store, again) is None:
        yield f"key {again} cannot be saved"


def loaded(store: DirectoryStore, key: int) -> Bytes | None:
    """An entry, as a user of the store gets it."""
    num_bytes = store.find(key, parent_of(key))
    if num_bytes is None:
        return None
    into = np.empty(num_bytes, np.uint8)
    return into if store.read(key, parent_of(key), into) else None


def tear_newest(path: Path, share: float) -> int | None:
    """Cut the newest entry to a share of its bytes; its key, None if there is no entry."""
    entries = entries_of(path)
    if not entries:
        return None
    newest = max(entries)
    os.truncate(entries[newest], int(share * entries[newest].stat().st_size))
    return newest


def main(argv: Sequence[str] | None = None) -> int:
    """Kill and look as often as asked; the exit code."""
    parser = argparse.ArgumentParser(description="Kill a process while it saves to a directory.")
    parser.add_argument("--times", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    options = parser.parse_args(argv)
    draw = random.Random(options.seed)
    phases: Counter[str] = Counter()
    num_problems = num_saved_in_all = 0
    for number in range(options.times):
        budget = LARGE if number % 3 else SMALL
        delay_s, share = draw.uniform(0, LONGEST_S), draw.random()
        with tempfile.TemporaryDirectory(prefix="deepinfer-kill-") as name:
            path = Path(name)
            num_saved = kill_one(path, budget, delay_s)
            num_saved_in_all += num_saved
            phases[phase_of(path, num_saved)] += 1
            torn = tear_newest(path, share) if number % 2 else None
            for problem in problems_of(path, budget, num_saved, torn):
                num_problems += 1
                print(f"PROBLEM in kill {number} after {delay_s:.4f} s: {problem}")
    for phase, times in phases.most_common():
        print(f"{times:5}  {phase}")
    print(f"{options.times} kills, {num_saved_in_all} entries saved: {num_problems} problems")
    return int(num_problems > 0)


if __name__ == "__main__":
    sys.exit(main())
