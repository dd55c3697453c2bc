"""`env --sizing`: what is run, what is counted, and that it adds up."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

import pytest
import torch

from bench.catalog import find_profile
from bench.commands.geometry import render_sizing
from bench.probes.sizing import (
    _GpuGauge,
    largest_steps,
    measure_apart,
    measure_sizing,
    weight_bytes,
)
from bench.schema import EngineSettings, Profile
from bench.spec import PoolQuestion, engine_config, load_profile, model_config
from deepinfer.config import EngineConfig
from deepinfer.device.base import DeviceMemory
from deepinfer.errors import UserError

MIB = 2**20


def tiny(memory_bytes: int, **engine: int | str) -> Profile:
    """The tiny profile with a budget."""
    profile = load_profile(find_profile("cpu-tiny"))
    settings = EngineSettings(**{**profile.engine.given(), **engine})
    return profile.model_copy(update={"memory_bytes": memory_bytes, "engine": settings})


def question(profile: Profile) -> PoolQuestion:
    """What there is memory for on this profile."""
    engine = engine_config(profile.engine)
    return PoolQuestion(model_config(profile), engine, profile.device, profile.memory_bytes)


@pytest.mark.parametrize(
    ("budget", "longest", "seqs", "drafts", "expected"),
    [
        (8, 100, 3, 0, ((8,), (3, 3, 2))),
        (8, 5, 3, 0, ((4, 4), (3, 3, 2))),
        (8, 3, 3, 0, ((2, 2, 2),)),  # no prompt is longer than 2: a step cannot be full
        (8, 100, 1, 0, ((8,),)),
        (8, 100, 8, 0, ((8,), (1,) * 8)),
        (8, 100, 2, 1, ((8,), (2,) * 4)),  # logits of two requests with a draft each
        (8, 100, 3, 4, ((8,), (1,) * 8)),  # of fifteen rows the budget lets eight run
    ],
)
def test_the_largest_steps(budget, longest, seqs, drafts, expected):
    """All tokens a step may have in the fewest and the most prompts, none above its limit."""
    config = EngineConfig(
        max_num_batched_tokens=budget, max_model_len=longest, max_num_seqs=seqs, drafts=drafts
    )
    assert largest_steps(config) == expected


def test_shared_storage_counts_once():
    """A tied head is no second matrix; a view is the tensor it is of."""

    @dataclass
    class Tree:
        embed: torch.Tensor
        layers: tuple[torch.Tensor, ...]
        head: torch.Tensor
        none: None = None

    embed = torch.zeros(10, 4)
    part = torch.zeros(6, dtype=torch.bfloat16)
    assert weight_bytes(Tree(embed, (part, part[2:]), embed)) == 160 + 12


def test_a_budget_is_divided():
    """Lines add up to what the blocks get; nobody else is counted."""
    measured = measure_sizing(question(tiny(500 * MIB)))
    lines = dict(measured.sizing.lines)
    assert lines["free at the start"] == 500 * MIB
    assert lines["weights"] == -measured.needs.weights < 0
    assert lines["taken by others since"] == 0
    assert lines["peak activation"] == -measured.needs.peak_activation
    assert sum(lines.values()) == measured.sizing.bytes_for_blocks
    num_blocks = measured.sizing.num_blocks
    assert num_blocks == measured.sizing.bytes_for_blocks // (8192 + 16 * 8)  # rows and their tags
    text = render_sizing(tiny(500 * MIB), measured, "text")
    assert f"{num_blocks:,} blocks of 8,320 bytes fit" in text
    assert "steps run: 256 tokens in 1 prompt and 256 tokens in 64 prompts" in text
    for asked, said in (
        (num_blocks, f"the profile has {num_blocks:,}: fits\n"),
        (num_blocks + 5, f"the profile has {num_blocks + 5:,}: does NOT fit, 5 too many\n"),
        ("auto", "the profile has auto: a run gets what fits\n"),
    ):
        assert said in render_sizing(tiny(500 * MIB, num_blocks=asked), measured, "text")


def test_a_budget_that_is_too_small_is_refused():
    """Both numbers, and what takes the most."""
    with pytest.raises(UserError, match=r"too little memory: .* 16640 are needed"):
        measure_sizing(question(tiny(MIB // 64)))  # less than the weights


def test_a_process_of_its_own_answers_and_refuses():
    """What it raises arrives with its hint; nothing of it stays in this process."""
    with pytest.raises(UserError, match="too little memory") as caught:
        measure_apart(question(tiny(MIB // 64)))
    assert caught.value.hint.startswith("of 16384 bytes")


def test_a_process_that_is_ended_is_one_line(monkeypatch):
    """As the system ends it when memory runs out."""
    monkeypatch.setattr("bench.probes.sizing.measure_sizing", os._exit)  # exits with the question
    with pytest.raises(UserError, match=r"num_blocks: auto: .* ended from outside"):
        measure_apart(1)


def test_a_gpu_that_does_not_tell_processes_apart(monkeypatch):
    """In a container: what all processes hold stands for ours, and a note says so."""
    monkeypatch.setitem(sys.modules, "pynvml", None)

    class Gpu:
        def memory(self) -> DeviceMemory:
            return DeviceMemory(1000, 600, reserved_bytes=300, allocated_bytes=250)

    gauge = _GpuGauge(Gpu(), kept=100)
    reading = gauge.read(0)
    assert (reading.free, reading.own, reading.torch, reading.torch_unused) == (500, 400, 300, 50)
    assert "all that was taken since the start counts as its own" in gauge.notes[0]
