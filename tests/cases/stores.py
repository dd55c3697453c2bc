"""What the cases of the store share: engines with one, run by hand, and prompts that are kept."""

from __future__ import annotations

from dataclasses import replace

from deepinfer.device.cpu import SteppedCpuDevice
from tests.deepinfer.ahead.scenes import CONFIG, Stage, prompt_of, sampled

SEGMENT = 8  # tokens
KEPT = replace(CONFIG, store_bytes=1 << 20)


def stage(family="qwen3", acceptance=1.0, **changes):
    """An engine with a store, and its device to be run by hand."""
    return Stage(family, replace(KEPT, **changes), acceptance, device=SteppedCpuDevice())


def run(s):
    """All requests to their end, and all copies and files."""
    while s.engine.has_unfinished():
        s.step()
    s.engine.store.drain()


def keep(s, seed, size):
    """Run a prompt to its end, so that its segments are kept."""
    s.add(f"kept {len(s.requests)}", prompt_of(seed, size), sampled(0, 1))
    run(s)


def segment_bytes(s):
    """What the rows of one segment take."""
    blocks, _ = s.engine.worker.runner.entry_bytes()
    return blocks.bytes_per_item * SEGMENT // s.config.block_size


def num_loaded(s):
    """Tokens whose rows were loaded so far."""
    return s.engine.scheduler.store_reuse.counters.num_loaded_tokens


def findings(s):
    """Which checkers found something."""
    return {finding.check for finding in s.engine.findings.first}
