"""Files, flags and axes give one resolved configuration, or one line that says what is wrong."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.model_schema import GEOMETRY
from bench.schema import EngineSettings
from bench.spec import (
    AXES,
    POOL_KEYS,
    UNMEASURED,
    Flags,
    load_profile,
    load_workload,
    parse_axes,
    resolve,
    resolve_cells,
)
from deepinfer import names
from deepinfer.config import EngineConfig, ModelConfig
from deepinfer.errors import UserError

ROOT = Path(__file__).resolve().parents[2]

PROFILE = """\
description: test
model: {num_hidden_layers: 1, hidden_size: 8, num_attention_heads: 4, num_key_value_heads: 2,
        head_dim: 4, intermediate_size: 16, vocab_size: 32}
"""
WORKLOAD = """\
description: test
requests:
  - {count: 1, prompt_tokens: 8, output_tokens: 4}
"""


@pytest.fixture
def write(tmp_path):
    def write(text: str, name: str = "mine.yaml") -> Path:
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return write


@pytest.fixture
def profile(write):
    return lambda more="": load_profile(write(PROFILE + more, "profile.yaml"))


@pytest.fixture
def workload(write):
    return lambda more="", base=WORKLOAD: load_workload(write(base + more, "workload.yaml"))


def test_engine_keys_and_defaults_are_those_of_the_engine():
    """The schema offers the keys of EngineConfig, with its defaults, but for the directory of a
    store: a round begins with nothing kept."""
    defaults = dataclasses.asdict(EngineConfig())
    assert defaults.pop("store_directory") is None
    assert defaults.pop("store_directory_bytes") == 0
    assert EngineSettings().model_dump() == defaults
    assert EngineSettings().given() == {}


def test_geometry_is_what_model_config_requires():
    """Every field of ModelConfig without a default must be given, and no other."""
    required = [f.name for f in dataclasses.fields(ModelConfig) if f.default is dataclasses.MISSING]
    assert list(GEOMETRY) == required


@pytest.mark.parametrize(
    ("in_profile", "in_workload", "flag", "expected"),
    [
        (None, None, None, EngineConfig().num_blocks),
        (11, None, None, 11),
        (None, 12, None, 12),
        (None, None, 13, 13),
        (11, 12, None, 12),
        (11, None, 13, 13),
        (None, 12, 13, 13),
        (11, 12, 13, 13),
        # Written out, a default is a choice like any other.
        (11, EngineConfig().num_blocks, None, EngineConfig().num_blocks),
    ],
)
def test_merge_order(profile, workload, in_profile, in_workload, flag, expected):
    """defaults < profile < workload < flags, for every pair of layers."""

    def engine(value):
        return f"engine: {{num_blocks: {value}}}\n" if value else ""

    resolved = resolve(
        profile(engine(in_profile)),
        workload(engine(in_workload)),
        Flags(engine={"num_blocks": flag} if flag else {}),
    )
    assert resolved.engine == EngineConfig(num_blocks=expected)


def test_layers_merge_key_by_key(profile, workload):
    """A layer that sets one key leaves the others of the layer below."""
    resolved = resolve(
        profile("engine: {num_blocks: 11, release: polled}\n"),
        workload("engine: {num_blocks: 12}\n"),
        Flags(engine={"free_order": "forward"}, seed=7),
    )
    expected = EngineConfig(num_blocks=12, release="polled", free_order="forward", seed=7)
    assert resolved.engine == expected
    assert resolved.seed == 7


def test_device_comes_from_profile_or_flag(profile, workload):
    """The flag wins over the profile, the profile over the default."""
    assert resolve(profile(), workload()).device == "cpu"
    cuda = profile("device: cuda\n")
    assert resolve(cuda, workload()).device == "cuda"
    assert resolve(cuda, workload(), Flags(device="cpu-stepped")).device == "cpu-stepped"


def test_trace_flags_override_the_workload(profile, workload):
    """Path, limit, scale and speed of the flags win over those of the trace, and are noted."""
    replay = workload(base="description: x\ntrace: {format: mooncake, limit: 5, speed: 2.0}\n")
    flags = Flags(trace_path="t.jsonl", limit=9, scale_lengths=0.1)
    resolved = resolve(profile(), replay, flags)
    trace = resolved.workload.trace
    assert (trace.path, trace.limit, trace.scale_lengths, trace.speed) == ("t.jsonl", 9, 0.1, 2.0)
    assert resolved.notes == (
        "lengths scaled by 0.1",
        "arrivals sped up by 2",
        "at most the first 9 requests of the trace",
    )


def test_scale_lengths_applies_to_groups_too(profile, workload):
    """The same flag scales request groups; unscaled runs have no note."""
    assert resolve(profile(), workload()).notes == ()
    resolved = resolve(profile(), workload(), Flags(scale_lengths=0.5))
    assert resolved.workload.length_scale == 0.5
    assert resolved.notes == ("lengths scaled by 0.5",)


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (Flags(trace_path="x.csv"), "--trace-file: workload workload replays no trace"),
        (Flags(limit=3), "--limit: workload workload replays no trace (got 3)"),
        (Flags(speed=2.0), "--speed: workload workload replays no trace"),
        (Flags(scale_lengths=0.0), "scale_lengths: out of range (got 0.0); expected more than 0"),
        (Flags(engine={"num_blocks": 1}), "num_blocks: out of range (got 1); expected at least 2"),
        (
            Flags(engine={"release": "defered"}),
            "release: unknown name (got 'defered'); expected 'd",
        ),
        (
            Flags(engine={"relese": "step"}),
            "relese: unknown key (got 'relese'); expected 'release'",
        ),
        (Flags(seed=-1), "seed: out of range (got -1)"),
        (Flags(device="cude"), "device: unknown name (got 'cude'); expected 'cuda'"),
    ],
)
def test_bad_flags(profile, workload, flags, part):
    """A flag that is not valid or changes nothing is an error that names it and what is valid."""
    with pytest.raises(UserError) as caught:
        resolve(profile(), workload(), flags)
    assert str(caught.value).startswith(part)


def test_paths_in_files_are_beside_the_file(write):
    """A relative path in a file does not depend on where the program is started."""
    path = write("description: x\ntrace: {format: azure, path: data/t.csv}\n")
    assert load_workload(path).trace.path == str(path.parent / "data/t.csv")
    path = write("description: x\nmodel: {path: weights}\n")
    assert load_profile(path).model.path == str(path.parent / "weights")


def test_a_model_folder_gives_the_geometry(write, workload, tmp_path):
    """With `model.path` the geometry is that of its config.json; dtype may be set beside it."""
    config = {"model_type": "qwen3", "rms_norm_eps": 1e-6, "rope_theta": 1e6}
    config |= dict.fromkeys(GEOMETRY, 2) | {"torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = load_profile(write("description: x\nmodel: {path: .}\n"))
    model = resolve(loaded, workload()).model
    assert (model.num_hidden_layers, model.dtype, model.path) == (2, "bfloat16", tmp_path)
    loaded = load_profile(write("description: x\nmodel: {path: ., dtype: float32}\n"))
    assert resolve(loaded, workload()).model.dtype == "float32"


def test_to_dict_is_strict_json_and_hash_follows_it(profile, workload):
    """Equal configurations have equal hashes; any change that matters changes the hash."""
    base = resolve(profile(), workload())
    text = json.dumps(base.to_dict(), allow_nan=False)
    assert json.loads(text)["engine"]["release"] == "deferred"
    assert json.loads(text)["workload"]["name"] == "workload"
    assert base.config_hash == resolve(profile(), workload(), Flags()).config_hash
    others = [
        resolve(profile(), workload(), Flags(seed=1)),
        resolve(profile(), workload(), Flags(scale_lengths=0.5)),
        resolve(profile(), workload(), Flags(device="cuda")),
        resolve(profile("verify: {logprob_tolerance: 0.5}\n"), workload()),
        resolve(profile(), workload("  - {count: 2, prompt_tokens: 8, output_tokens: 4}\n")),
    ]
    assert len({base.config_hash, *(other.config_hash for other in others)}) == 6


def test_unsafe_is_known_from_the_policy(profile, workload):
    """Only `early` marks a cell as unsafe."""
    unsafe = {
        policy: resolve(profile(), workload(), Flags(engine={"release": policy})).unsafe
        for policy in names.RELEASE_POLICIES
    }
    assert [policy for policy, value in unsafe.items() if value] == ["early"]


def test_axes_are_typed_and_keep_their_order():
    """Whole numbers become int, names stay text, dashes become underscores."""
    axes = parse_axes(["free-order=reverse,forward", "block_size=64, 128", "device=cpu"])
    assert list(axes.items()) == [
        ("free_order", ("reverse", "forward")),
        ("block_size", (64, 128)),
        ("device", ("cpu",)),
    ]
    assert "seed" not in AXES


@pytest.mark.parametrize(
    ("items", "part"),
    [
        (["relase=step"], "axis relase: unknown name; expected 'release'"),
        (["release=step,pulled"], "axis release: unknown name (got 'pulled'); expected 'polled'"),
        (["block_size=16,x"], "axis block_size: wrong type (got 'x'); expected a whole number"),
        (["block_size=016"], "axis block_size: wrong type (got '016')"),
        (["block_size=0"], "axis block_size: out of range (got 0); expected at least 1"),
        (["block_size=16,,32"], "axis block_size: an empty value"),
        (["block_size=16,16"], "axis block_size: 16 is given twice"),
        (["fence=step", "fence=block"], "axis fence: given twice"),
        (["release"], "axis 'release': no values; expected NAME=VALUE,VALUE"),
        (["seed=1,2"], "axis seed: not an axis"),
        (["device=cpu,tpu"], "axis device: unknown name (got 'tpu')"),
    ],
)
def test_bad_axes(items, part):
    """A wrong axis is answered with the nearest name or the valid range."""
    with pytest.raises(UserError) as caught:
        parse_axes(items)
    assert str(caught.value).startswith(part)


def test_cells_are_all_combinations(profile, workload):
    """The last axis varies fastest, and each cell has its own values over the flags."""
    axes = parse_axes(["release=deferred,step", "block_size=16,32", "device=cpu-stepped"])
    cells = resolve_cells(profile(), workload(), Flags(engine={"num_blocks": 9}), axes)
    assert [(cell["release"], cell["block_size"]) for cell, _ in cells] == [
        ("deferred", 16),
        ("deferred", 32),
        ("step", 16),
        ("step", 32),
    ]
    for cell, resolved in cells:
        expected = EngineConfig(
            num_blocks=9, release=cell["release"], block_size=cell["block_size"]
        )
        assert (resolved.engine, resolved.device) == (expected, "cpu-stepped")
    assert len(resolve_cells(profile(), workload(), Flags(), {})) == 1


def test_a_key_is_a_flag_or_an_axis(profile, workload):
    """Setting one key both ways is an error, since one of the two would be ignored."""
    with pytest.raises(UserError, match="axis release: also set by a flag"):
        resolve_cells(
            profile(), workload(), Flags(engine={"release": "step"}), parse_axes(["release=polled"])
        )


BUDGET = "memory_bytes: 1000000\n"


@pytest.mark.parametrize(
    ("in_profile", "in_workload", "flag", "is_measured"),
    [
        ("auto", None, None, True),
        (None, "auto", None, True),
        (None, None, "auto", True),
        ("auto", 12, None, False),
        (11, "auto", None, True),
        ("auto", "auto", 13, False),
    ],
)
def test_auto_is_a_number_of_blocks_like_any_other(
    profile, workload, in_profile, in_workload, flag, is_measured
):
    """It overrides and is overridden; what is left is to be measured, or is not."""

    def engine(value):
        return f"engine: {{num_blocks: {value}}}\n" if value else ""

    resolved = resolve(
        profile(BUDGET + engine(in_profile)),
        workload(engine(in_workload)),
        Flags(engine={"num_blocks": flag} if flag else {}),
    )
    assert (resolved.pool_question is not None) == is_measured
    assert (resolved.engine.num_blocks == UNMEASURED) == is_measured


def test_a_pool_not_yet_measured_makes_no_engine(profile, workload):
    """Whoever forgets to measure is told so."""
    resolved = resolve(profile(BUDGET), workload(), Flags(engine={"num_blocks": "auto"}))
    with pytest.raises(UserError, match="num_blocks: 0; at least 2"):
        resolved.engine.check()


def test_a_measured_number_is_as_good_as_a_given_one(profile, workload):
    """The same work has the same hash, wherever its number is from."""
    given = resolve(profile(BUDGET), workload(), Flags(engine={"num_blocks": 77}))
    asked = resolve(profile(BUDGET), workload(), Flags(engine={"num_blocks": "auto"}))
    measured = asked.with_engine(num_blocks=77)
    assert measured == given
    assert measured.pool_question is None
    assert measured.config_hash == given.config_hash != asked.config_hash


def test_one_question_for_all_that_have_one_answer(profile, workload):
    """Policies share a pool size; geometry, budgets of a step, device and memory do not."""

    def question(engine, **flags):
        flags = Flags(engine={"num_blocks": "auto", **engine}, **flags)
        return resolve(profile(BUDGET), workload(), flags).pool_question

    plain = question({})
    for same in (
        *({"release": "polled"}, {"free_order": "forward"}, {"admission": "lifetime"}),
        *({"checks": "all"}, {"timeout_s": 1.0}),
    ):
        assert question(same) == plain
        assert not same.keys() & set(POOL_KEYS)
    assert question({}, seed=7) == plain
    others = [
        question({"block_size": 64}),
        question({"max_num_seqs": 8}),
        question({"max_num_batched_tokens": 512}),
        question({"max_model_len": 512}),
        question({"num_state_slots": 9}),
        question({}, device="cpu-stepped"),
    ]
    assert len({plain, *others}) == 7


@pytest.mark.parametrize("device", ["cpu", "cpu-stepped"])
def test_auto_on_a_cpu_needs_a_budget(profile, workload, device):
    """One line that names the key, the device and the profile; a GPU needs none."""
    auto = {"num_blocks": "auto"}
    with pytest.raises(UserError, match="has no memory_bytes") as caught:
        resolve(profile(), workload(), Flags(engine=auto, device=device))
    assert f"num_blocks: auto on device {device}, but profile profile" in str(caught.value)
    on_gpu = resolve(profile(), workload(), Flags(engine=auto, device="cuda"))
    assert on_gpu.pool_question.memory_bytes is None


def test_shipped_files_are_valid_and_resolve_with_each_other():
    """Every workload runs on every profile as far as configuration goes."""
    workloads = [load_workload(path) for path in sorted((ROOT / "workloads").glob("*.yaml"))]
    profiles = [load_profile(path) for path in sorted((ROOT / "profiles").glob("*.yaml"))]
    assert {"fork-batch", "preemption-pressure", "azure-code"} <= {one.name for one in workloads}
    for profile in profiles:
        for workload in workloads:
            assert resolve(profile, workload).profile_name == profile.name


def test_cpu_small_is_the_agreed_model():
    """The profile that results are quoted for has the geometry of 29.4 M parameters."""
    profile = load_profile(ROOT / "profiles" / "cpu-small.yaml")
    workload = load_workload(ROOT / "workloads" / "fork-batch.yaml")
    expected = ModelConfig(
        num_hidden_layers=8,
        hidden_size=512,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        intermediate_size=1536,
        vocab_size=8192,
    )
    assert resolve(profile, workload).model == expected


def test_preemption_pressure_sets_its_own_pool():
    """The pool is smaller than what its requests hold together at their shortest."""
    workload = load_workload(ROOT / "workloads" / "preemption-pressure.yaml")
    engine = workload.engine
    (group,) = workload.requests
    shortest = group.prompt_tokens.uniform[0] + group.output_tokens.uniform[0]
    assert group.count * -(-shortest // engine.block_size) > 2 * (engine.num_blocks - 1)


def test_devices_are_those_of_the_device_layer():
    """The names offered for `device` are those that can be opened."""
    devices = pytest.importorskip("deepinfer.device")
    assert set(devices.DEVICES) == set(names.DEVICES)


def test_spec_never_loads_torch():
    """Resolving a configuration works on a machine without torch."""
    code = "import bench.spec, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.mark.parametrize(
    ("written", "overlap"),
    [
        *(("off", "off"), ("on", "on"), ("Off", "off"), ('"on"', "on"), ("2", "2")),
        *(("false", "off"), ("true", "on"), ('"2"', "2")),
    ],
)
def test_overlap_is_a_name_however_yaml_reads_it(profile, workload, written, overlap):
    """`off` is no boolean here, and 2 is a name."""
    made = workload(f"engine: {{overlap: {written}}}\n")
    assert resolve(profile(), made).engine.overlap == overlap


def test_a_replayed_draft_needs_to_know_how_often_it_is_right(profile, workload):
    """From the workload or a flag, the flag on top; a cell without drafts asks for nothing."""
    replay = Flags(engine={"drafter": "replay", "drafts": 2})
    with pytest.raises(
        UserError, match=r"drafter: replay, but workload workload has no acceptance"
    ):
        resolve(profile(), workload(), replay)
    resolve(profile(), workload(), Flags(engine={"drafter": "replay"}))
    own = workload("acceptance: [0.9, 0.1]\n")
    assert resolve(profile(), own, replay).workload.acceptance == [0.9, 0.1]
    flagged = dataclasses.replace(replay, acceptance="all-reject")
    for work in (own, workload()):
        assert resolve(profile(), work, flagged).workload.acceptance == "all-reject"


def test_acceptance_is_an_axis(profile, workload):
    """Numbers and names; each cell's is in its configuration, none is the engine's."""
    axes = parse_axes(["acceptance=0,0.7,bursts", "drafts=0,3"])
    assert axes == {"acceptance": (0, 0.7, "bursts"), "drafts": (0, 3)}
    flags = Flags(engine={"drafter": "replay"})
    cells = resolve_cells(profile(), workload(), flags, axes)
    assert [made.workload.acceptance for _, made in cells] == [0, 0, 0.7, 0.7, "bursts", "bursts"]
    assert len({made.config_hash for _, made in cells}) == 6
    with pytest.raises(UserError, match=r"axis acceptance: also set by a flag"):
        resolve_cells(profile(), workload(), Flags(acceptance=0.5), axes)


@pytest.mark.parametrize(
    ("item", "part"),
    [
        ("acceptance=1.5", "acceptance: 1.5; expected a probability, 0 to 1"),
        ("acceptance=burst", "did you mean 'bursts'"),
        ("drafts=6", "drafts: out of range (got 6); expected at most 5"),
        ("drafter=ngrams", "drafter: unknown name (got 'ngrams'); expected 'ngram'"),
        ("overlap=3", "overlap: unknown name (got '3'); expected"),
    ],
)
def test_bad_choices_of_drafts_and_overlap(item, part):
    """One line with the key, the value and what is valid, or its hint."""
    with pytest.raises(UserError) as error:
        parse_axes([item])
    assert part in f"{error.value} {error.value.hint}"


def test_delay_is_an_axis_a_flag_and_a_key(profile, workload):
    """The flag is on top of the workload's; each cell's is in its configuration."""
    own = workload("delay: copy=1ms\n")
    assert resolve(profile(), workload()).workload.delay == "none"
    assert resolve(profile(), own).workload.delay == "copy=1ms"
    assert resolve(profile(), own, Flags(delay="none")).workload.delay == "none"
    axes = parse_axes(["delay=none,copy=2ms+load=500us"])
    cells = resolve_cells(profile(), own, Flags(), axes)
    assert [made.workload.delay for _, made in cells] == ["none", "copy=2ms+load=500us"]
    assert len({made.config_hash for _, made in cells}) == 2
    with pytest.raises(UserError, match=r"axis delay: also set by a flag"):
        resolve_cells(profile(), own, Flags(delay="copy=1ms"), axes)


def test_times_with_planted_delays_say_so(profile, workload):
    """A note of every table, and none without."""
    note = "delays planted before every operation: copy=2ms"
    assert note in resolve(profile(), workload(), Flags(delay="copy=2ms")).notes
    assert resolve(profile(), workload()).notes == ()


def test_a_delay_that_would_change_no_order_is_refused(profile, workload):
    """The streams of cpu-stepped do not run side by side."""
    flags = Flags(delay="copy=2ms", device="cpu-stepped")
    with pytest.raises(UserError, match=r"delay: copy=2ms, .* expected device cpu or cuda"):
        resolve(profile(), workload(), flags)
    resolve(profile(), workload(), dataclasses.replace(flags, delay="none"))
