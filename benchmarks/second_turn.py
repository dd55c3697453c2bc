"""The first token of a conversation's second turn: with its prefix in a store, and without one.

    python benchmarks/second_turn.py [--profile cpu-small] [--tokens 2048] [--rounds 5]

The first turn has a prompt of `--tokens` tokens and an answer of 16. The second has both and 32
tokens more, and comes when all else has ended. Two engines take turns, one with a store in host
memory and one without; both have the profile's settings otherwise. Every answer of the one with a
store must be that of the other. The ratio is the median of the rounds' ratios.

The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.catalog import find_profile  # noqa: E402 -- after the path is set
from bench.spec import load_profile, model_config  # noqa: E402
from deepinfer.config import EngineConfig  # noqa: E402
from deepinfer.device import open_device  # noqa: E402
from deepinfer.engine import LLMEngine  # noqa: E402
from deepinfer.runners import load_model  # noqa: E402
from deepinfer.sequence import SamplingParams  # noqa: E402

ANSWER, QUESTION = 16, 32  # tokens
STORE_BYTES = 1 << 30


def first_token_s(engine: LLMEngine, name: str, prompt: np.ndarray) -> tuple[float, list[int]]:
    """Seconds from the arrival of a request to its first token, and its answer."""
    start = time.perf_counter()
    engine.add_request(name, prompt, SamplingParams(ANSWER))
    first = None
    while engine.has_unfinished():
        output = engine.step()
        if output is None:
            continue
        if first is None and len(output.token_ids):
            first = time.perf_counter() - start
        for ended in output.finished:
            answer = ended.token_ids.tolist()
    assert first is not None
    return first, answer


def main() -> int:
    """Exit code 1 if an answer differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--profile", default="cpu-small")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    profile = load_profile(find_profile(arguments.profile))
    model = model_config(profile)
    longest = arguments.tokens + 2 * ANSWER + QUESTION
    given = EngineConfig(**profile.engine.given())
    blocks = -(-longest // given.block_size) + 1
    config = replace(
        given,
        max_model_len=max(longest, given.max_model_len),
        num_blocks=max(blocks, given.num_blocks),
    )
    device = open_device(profile.device)
    weights = device.run(lambda: load_model(model, device))
    engines = {
        "recomputed": LLMEngine(model, config, device=device, weights=weights),
        "restored": LLMEngine(
            model, replace(config, store_bytes=STORE_BYTES), device=device, weights=weights
        ),
    }
    rng = np.random.default_rng(0)
    times: dict[str, list[float]] = {name: [] for name in engines}
    wrong = 0
    for number in range(arguments.rounds + 1):  # the first is a warm-up
        prompt = rng.integers(0, model.vocab_size, arguments.tokens).astype(np.int32)
        question = rng.integers(0, model.vocab_size, QUESTION).astype(np.int32)
        answers = []
        for name, engine in engines.items():
            _, answer = first_token_s(engine, f"first-{number}", prompt)
            turn = np.concatenate((prompt, answer, question)).astype(np.int32)
            seconds, second = first_token_s(engine, f"second-{number}", turn)
            answers.append((answer, second))
            if number:
                times[name].append(seconds)
        wrong += answers[0] != answers[1]
    ratios = [a / b for a, b in zip(times["recomputed"], times["restored"], strict=True)]
    store = engines["restored"].scheduler.store
    assert store is not None
    for name, seconds in times.items():
        print(f"{name:12} TTFT of the second turn  {statistics.median(seconds) * 1e3:8.1f} ms")
    low, high = min(ratios), max(ratios)
    print(f"sooner by    {statistics.median(ratios):.1f} [{low:.1f}, {high:.1f}]")
    print(f"loaded       {store.counters.num_loaded_tokens} tokens; different answers: {wrong}")
    print(json.dumps({"profile": arguments.profile, "ratios": ratios, "different": wrong}))
    for engine in engines.values():
        engine.close()
    device.close()
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
