"""What entries are called: segments of a chain, and fingerprints of models."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest

from deepinfer.config import ModelConfig
from deepinfer.errors import UserError
from deepinfer.models.hybrid.layer_plan import v41_config
from deepinfer.store.keys import Segment, fingerprint, segments
from tests.hybrid_configs import v41_raw

V41 = v41_raw([0, 2, 1, 1], sources=[1, 2], selectors=[1, 2], publisher=2, engram=[1])
MODEL = ModelConfig(2, 64, 4, 2, 16, 128, 256)


def other(value):
    """A value of the same type that is not `value`."""
    if isinstance(value, bool):
        return not value
    return value + "x" if isinstance(value, str) else value + 1


def test_a_chain_is_cut_where_state_is_kept():
    """Every 128 tokens, whole segments only, each called by its last block."""
    assert segments([11, 12, 13, 14, 15], 64) == [
        Segment(12, None, 0, 2),
        Segment(14, 12, 2, 4),
    ]
    assert segments([7, 8], 256) == [Segment(7, None, 0, 1), Segment(8, 7, 1, 2)]
    assert segments([1, 2], 128) == [Segment(1, None, 0, 1), Segment(2, 1, 1, 2)]
    assert segments(list(range(7)), 16) == []


def test_blocks_that_do_not_divide_128_make_the_next_longer_segment():
    """A segment is whole blocks."""
    assert segments([1, 2, 3, 4], 48) == [Segment(3, None, 0, 3)]


@pytest.mark.parametrize(
    "field", [field.name for field in fields(ModelConfig) if field.name != "path"]
)
def test_every_field_of_a_model_counts(field):
    """Another size, another number in its arithmetic or another seed: other rows."""
    changed = replace(MODEL, **{field: other(getattr(MODEL, field))})
    assert fingerprint(changed, 16) != fingerprint(MODEL, 16)


@pytest.mark.parametrize("field", ["cache", "seed", "qat", "num_stored_layers", "rms_norm_eps"])
def test_nested_configurations_count_to_the_bottom(field):
    """A hybrid model's row format, its seed, and what is in its layers."""
    config = v41_config(V41)
    plain = fingerprint(config)
    assert fingerprint(v41_config(V41)) == plain
    assert fingerprint(replace(config, **{field: other(getattr(config, field))})) != plain
    assert fingerprint(replace(config, layers=config.layers[::-1])) != plain


def test_other_parts_count_and_so_does_where_they_stand():
    """Block size and device beside the model; types are told apart."""
    found = [
        *([], [1], [1.0], ["1"], [True], [None], [[1]], [{"1": 1}], [[]], [1, 2], [2, 1], [[1, 2]]),
        *([float("nan")], [-0.0], [0.0], [MODEL], [MODEL, 16], [MODEL, 128]),
    ]
    assert len({fingerprint(*parts) for parts in found}) == len(found)


def test_a_fingerprint_is_the_same_in_every_process():
    """A directory is read by later processes: no hash seed, no order of a set in it."""
    code = (
        "from deepinfer.config import ModelConfig\n"
        "from deepinfer.store.keys import fingerprint\n"
        "print(fingerprint(ModelConfig(2, 64, 4, 2, 16, 128, 256), {'b': 1, 'a': 2}).hex())"
    )
    env = {**os.environ, "PYTHONHASHSEED": "123"}
    root = Path(__file__).parents[3]
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env, cwd=root
    )
    assert run.stdout.strip() == fingerprint(MODEL, {"a": 2, "b": 1}).hex()


def test_a_folder_of_weights_is_told_by_its_files(tmp_path):
    """Other weights under the same name, even of the same size, make another fingerprint."""
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"one")
    os.utime(weights, ns=(1, 1))
    model = replace(MODEL, path=tmp_path)
    first = fingerprint(model)
    (tmp_path / "README.md").write_text("not a weight")
    assert fingerprint(model) == first
    weights.write_bytes(b"two")
    os.utime(weights, ns=(2, 2))
    second = fingerprint(model)
    (tmp_path / "config.json").write_text("{}")
    assert len({fingerprint(MODEL), first, second, fingerprint(model)}) == 4


def test_what_has_no_fingerprint_is_refused(tmp_path):
    """An object whose text has an address in it, and a folder that is not there."""
    with pytest.raises(UserError, match="fingerprint: <object"):
        fingerprint(object())
    with pytest.raises(UserError, match="missing: cannot read the weights: No such file"):
        fingerprint(tmp_path / "missing")
