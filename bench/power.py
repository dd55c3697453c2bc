"""Can the check fail? Plant faults in live requests and count how many the verification flags.

A verification that passes everything proves nothing. Each trial is one request of a running batch;
once, at a random moment of its decoding, one of these happens to it:

    swap_blocks      two blocks of its table change places
    overwrite        one of its blocks gets the rows of a block of another request
    lose_row         what the newest committed token left in all layers is zeroed
    overwrite_state  its state slot gets what another request's holds

and then it runs to its end. Where requests have state the last fault takes the place of the first:
compressed rows carry their rotation, so that attention over them has no order to get wrong.

Requests share nothing, so a fault touches its own trial only. The
engine under test is the real one; nothing here is imported by it. Invariant: a clean trial runs
through the same code and differs only in that nothing is planted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from bench.runner import Target
from bench.spec import Resolved
from bench.verify import Emission, RequestVerdict
from deepinfer.engine import LLMEngine
from deepinfer.models.hybrid.layer_plan import HybridConfig
from deepinfer.outputs import RequestOutput
from deepinfer.sequence import SamplingParams, blocks_for
from deepinfer.sequence import Sequence as Request

CLEAN = "clean"
NUM_OUTPUTS = 32
BATCH = 16


@dataclass(frozen=True, slots=True)
class PowerRow:
    """One kind of fault.

    Attributes:
        fault: its name, or `clean`.
        trials, flagged: requests, and those the verification called wrong.
        smallest_diff, largest_diff: of the trials' largest log-probability differences, in nats.
    """

    fault: str
    trials: int
    flagged: int
    smallest_diff: float
    largest_diff: float


def swap_blocks(engine: LLMEngine, victim: Request, rng: np.random.Generator) -> None:
    """Two blocks with committed rows change places in the victim's table."""
    seqs, row = engine.scheduler.seqs, victim.row
    first, second = rng.choice(_num_used_blocks(engine, row), 2, replace=False).tolist()
    table = seqs.table(row)
    seqs.replace_block(row, first, int(table[second]))
    seqs.replace_block(row, second, int(table[first]))


def overwrite(engine: LLMEngine, victim: Request, rng: np.random.Generator) -> None:
    """One block of the victim gets the rows of a complete block of another request."""
    seqs = engine.scheduler.seqs
    others = [seq.row for seq in engine.scheduler.running if seq is not victim]
    source = seqs.table(int(rng.choice(others)))[0]
    destination = seqs.table(victim.row)[rng.integers(_num_used_blocks(engine, victim.row))]
    pairs = np.array([[source, destination]], np.int32)
    device, cache = engine.device, engine.cache
    device.stream("compute").submit(lambda: cache.copy_blocks(device.upload(pairs)))


def overwrite_state(engine: LLMEngine, victim: Request, rng: np.random.Generator) -> None:
    """The victim's state slot gets what another request's holds."""
    states = engine.scheduler.seqs.state_ids
    others = [seq.row for seq in engine.scheduler.running if seq is not victim]
    pairs = np.array([[states[int(rng.choice(others))], states[victim.row]]], np.int32)
    runner = engine.worker.runner
    engine.device.stream("compute").submit(lambda: runner.copy_states(pairs))


def lose_row(engine: LLMEngine, victim: Request, rng: np.random.Generator) -> None:
    """What the victim's newest committed token left is zeroed: its rows in all layers."""
    seqs, row = engine.scheduler.seqs, victim.row
    position = int(seqs.num_computed_tokens[row]) - 1
    block_id = int(seqs.table(row)[position // seqs.block_size])
    cache, slot = engine.cache, int(seqs.state_ids[row])
    engine.device.stream("compute").submit(lambda: cache.erase(position, block_id, slot))


Fault = Callable[[LLMEngine, Request, np.random.Generator], None]
FAULTS: dict[str, Fault] = {
    "swap_blocks": swap_blocks,
    "overwrite": overwrite,
    "lose_row": lose_row,
}
FAULTS_WITH_STATE: dict[str, Fault] = {
    "overwrite": overwrite,
    "lose_row": lose_row,
    "overwrite_state": overwrite_state,
}


def measure_power(
    resolved: Resolved, target: Target, trials: int, progress: Callable[[str], None]
) -> Iterator[PowerRow]:
    """`trials` requests of each fault, and as many clean ones; one row each, clean first."""
    faults = FAULTS_WITH_STATE if isinstance(resolved.model, HybridConfig) else FAULTS
    for kind, name in enumerate((CLEAN, *faults)):
        verdicts: list[RequestVerdict] = []
        while len(verdicts) < trials:
            rng = np.random.default_rng((resolved.seed, kind, len(verdicts)))
            size = min(BATCH, max(trials - len(verdicts), 2))  # a fault may need another request
            outputs = _run_batch(resolved, target, faults.get(name), size, rng)
            verdicts += target.verify(_emissions(outputs), resolved.verify)
            progress(f"{name}: {min(len(verdicts), trials)} of {trials}")
        verdicts = verdicts[:trials]
        diffs = [verdict.max_logprob_diff for verdict in verdicts]
        flagged = sum(verdict.wrong for verdict in verdicts)
        yield PowerRow(name, trials, flagged, min(diffs), max(diffs))


def _run_batch(
    resolved: Resolved, target: Target, fault: Fault | None, size: int, rng: np.random.Generator
) -> list[tuple[SamplingParams, RequestOutput]]:
    """Requests of 3 to 4 blocks, half of them greedy, each hit once while it decodes.

    The budget lets all start in one step, so all run until the last has been hit.
    """
    block_size = resolved.engine.block_size
    longest = 4 * block_size + NUM_OUTPUTS
    config = replace(
        resolved.engine,
        num_blocks=1 + size * blocks_for(longest, block_size),
        max_num_seqs=size,
        max_num_batched_tokens=size * 4 * block_size,
        max_model_len=longest,
        overlap="off",  # a fault hits between two steps
        drafts=0,
    )
    samplings, hit_after = {}, {}
    outputs: dict[str, RequestOutput] = {}
    with LLMEngine(resolved.model, config, device=target.device, weights=target.weights) as engine:
        for index in range(size):
            length = int(rng.integers(2 * block_size + 2, 4 * block_size))
            prompt = rng.integers(0, resolved.model.vocab_size, length)
            temperature = float(index % 2)
            sampling = SamplingParams(NUM_OUTPUTS, temperature, int(rng.integers(2**62)))
            engine.add_request(str(index), prompt, sampling)
            samplings[str(index)] = sampling
            hit_after[str(index)] = int(rng.integers(1, NUM_OUTPUTS))
        counts = dict.fromkeys(samplings, 0)
        while engine.has_unfinished():
            output = engine.step()
            assert output is not None, "the pool holds all requests"
            outputs.update((ended.request_id, ended) for ended in output.finished)
            for request_id in output.request_ids:
                counts[request_id] += 1
                if fault is not None and counts[request_id] == hit_after[request_id]:
                    fault(engine, engine.scheduler.find(request_id), rng)
    return [(samplings[request_id], outputs[request_id]) for request_id in samplings]


def _emissions(outputs: list[tuple[SamplingParams, RequestOutput]]) -> list[Emission]:
    return [
        Emission(
            [*output.prompt_token_ids.tolist(), *output.token_ids.tolist()],
            len(output.prompt_token_ids),
            sampling.temperature,
            sampling.seed,
            output.logprobs.tolist(),
        )
        for sampling, output in outputs
    ]


def _num_used_blocks(engine: LLMEngine, row: int) -> int:
    """Blocks of a row that hold committed rows."""
    seqs = engine.scheduler.seqs
    return blocks_for(int(seqs.num_computed_tokens[row]), seqs.block_size)
