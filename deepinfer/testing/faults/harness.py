"""One scenario, one fault or none, all checkers: who found something, and at which step.

Knows nothing of what the faults do. Invariant: an engine with a fault is made, driven and watched
exactly as a clean one.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache

from deepinfer.device.cpu import SteppedCpuDevice
from deepinfer.engine import LLMEngine
from deepinfer.observer import Observer
from deepinfer.runners import Model, Weights, load_model
from deepinfer.testing.faults.ahead import LOOKS_AHEAD
from deepinfer.testing.faults.plant import Fault
from deepinfer.testing.faults.pool_rows import PoolRows
from deepinfer.testing.faults.scenario import (
    CONFIG,
    MODEL,
    MODEL_WITH_STATE,
    WITH_STORE,
    Scenario,
)
from deepinfer.testing.transfers import Transfers

MAX_STEPS = 100
FEW_TOKENS = 4  # the vocabulary where drafts are verified, so that some are right
ENGINE = "engine"  # the column of what the engine itself refused


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one run.

    Attributes:
        num_steps: steps it had, at most those it was allowed.
        first: by checker, and `engine` for an exception: the step at which it first found
            something.
        messages: the same, what it was.
        tokens: what each request that has finished said.
        told: by step, what its record showed when it could last be read.
    """

    num_steps: int
    first: dict[str, int]
    messages: dict[str, str]
    tokens: dict[str, list[int]] = field(default_factory=dict)
    told: dict[int, tuple[list[str], list[int]]] = field(default_factory=dict)


@cache
def _weights(model: Model) -> Weights:
    return load_model(model, SteppedCpuDevice())


def _model(has_state: bool, num_drafts: int) -> Model:
    """The scenario's network, with few tokens and long rings where it verifies drafts."""
    vocab_size = FEW_TOKENS if num_drafts else MODEL.vocab_size
    if has_state:
        return replace(MODEL_WITH_STATE, vocab_size=vocab_size, max_draft_tokens=num_drafts)
    return replace(MODEL, vocab_size=vocab_size)


def run_trial(
    fault: Fault | None,
    seed: int,
    *,
    release: str | None = None,
    transfers: bool = True,
    max_steps: int = MAX_STEPS,
    stop_at_first: bool = False,
    with_state: bool = False,
    ahead: bool = False,
    store: bool = False,
    observers: tuple[Observer, ...] = (),
) -> Outcome:
    """Run the scenario of `seed` until every checker found something, or `max_steps`.

    Args:
        release: the policy, instead of the fault's own.
        transfers: whether a client loads and saves blocks beside the engine.
        with_state: run a model whose requests have state; it is always run where a fault wants
            state slots.
        ahead: plan steps ahead, with drafts; so it is always where a fault wants it.
        store: let the engine keep rows beyond its pool, with no client beside it; so it is always
            where a fault wants a store.
        stop_at_first: stop as soon as one checker found something.
        observers: told of everything as well.
    """
    settings = dict(LOOKS_AHEAD if ahead else {}) | (WITH_STORE if store else {})
    settings |= fault.settings if fault else {}
    if release is not None:
        settings["release"] = release
    model = _model(with_state or "num_state_slots" in settings, settings.get("drafts", 0))
    device = SteppedCpuDevice()
    with LLMEngine(
        model,
        replace(CONFIG, **settings),
        device=device,
        weights=_weights(model),
        observers=observers,
    ) as engine:
        if fault is not None:
            fault.plant(engine)
        client = None
        if transfers and engine.store is None:
            client = Transfers(engine, PoolRows(engine))
        scenario = Scenario(engine, device, seed, client)
        return _drive(engine, scenario, client, max_steps, stop_at_first)


def _drive(
    engine: LLMEngine,
    scenario: Scenario,
    client: Transfers | None,
    max_steps: int,
    stop_at_first: bool,
) -> Outcome:
    num_checkers = 1 if stop_at_first else len(CONFIG.checks.split("+"))
    first, messages, num_steps, wrong_rows = dict[str, int](), dict[str, str](), 0, 0
    while num_steps < max_steps and len(engine.findings.counts) < num_checkers:
        num_steps += 1
        try:
            scenario.step()
        except Exception as error:  # whatever a fault leads to
            first[ENGINE] = engine.scheduler.num_steps
            messages[ENGINE] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            break
        if client is not None and client.wrong_rows > wrong_rows:
            count = client.wrong_rows - wrong_rows
            step, wrong_rows = engine.scheduler.num_steps, client.wrong_rows
            engine.findings.add("tags", step, f"a transfer read {count} rows of others", count)
    for finding in engine.findings.first:
        first.setdefault(finding.check, finding.step)
        messages.setdefault(finding.check, finding.message)
    return Outcome(num_steps, first, messages, scenario.tokens, scenario.told)
