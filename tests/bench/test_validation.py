"""Every key of the user's files is checked, and each complaint is one line that helps."""

from pathlib import Path

import pytest

from bench.schema import Profile, Workload
from bench.spec import check_file, load_profile, load_workload
from bench.yaml_source import SourceError

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
TRACE = "description: test\ntrace: {format: azure}\n"


@pytest.fixture
def write(tmp_path):
    def write(text: str, name: str = "mine.yaml") -> Path:
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return write


@pytest.mark.parametrize(
    ("text", "line", "part"),
    [
        (WORKLOAD + "engin: {}\n", 4, "engin: unknown key (got 'engin'); expected 'engine'"),
        (WORKLOAD + "name: x\n", 4, "name: unknown key"),
        (WORKLOAD + "engine: {fense: step}\n", 4, "engine.fense: unknown key (got 'fense'); expec"),
        (
            WORKLOAD + "engine: {fence: stop}\n",
            4,
            "engine.fence: unknown name (got 'stop'); expect",
        ),
        (WORKLOAD + "engine: {block_size: 0}\n", 4, "engine.block_size: out of range (got 0)"),
        (WORKLOAD + "engine: {block_size: -16}\n", 4, "engine.block_size: out of range (got -16)"),
        (WORKLOAD + "engine: {block_size: 16.0}\n", 4, "wrong type (got 16.0); expected a whole"),
        (WORKLOAD + "engine: {block_size: true}\n", 4, "wrong type (got true); expected a whole"),
        (WORKLOAD + "scale_lengths: 1e-3\n", 4, "wrong type (got '1e-3'); expected a number"),
        (WORKLOAD + "engine: [1]\n", 4, "engine: wrong type (got [1]); expected a mapping"),
        (WORKLOAD + "trace: {format: azure}\n", 1, "several forms (got requests and trace)"),
        ("description: x\n", 1, "no form given; expected one of requests, trace"),
        ("requests: []\n", 1, "description: missing key"),
        ("description: x\nrequests: []\n", 1, "requests is empty"),
        (
            WORKLOAD + "delay: copi=2ms\n",
            4,
            "delay: unknown stream 'copi'; expected one of copy, com",
        ),
        (WORKLOAD + "delay: 2\n", 4, "delay: wrong type (got 2); expected text"),
        ("description: x\ntrace: {format: azur}\n", 2, "trace.format: unknown name (got 'azur')"),
        (TRACE + "scale_lengths: 0.1\n", 1, "scale_lengths beside trace"),
    ],
)
def test_bad_workload_files(write, text, line, part):
    """One line with file, line, key path, value and what is valid."""
    path = write(text)
    with pytest.raises(SourceError) as caught:
        load_workload(path)
    assert str(caught.value).startswith(f"{path}:{line}: ")
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("group", "part"),
    [
        ("prompt_tokens: 0", "prompt_tokens: out of range (got 0); expected at least 1"),
        ("prompt_tokens: x", "expected a whole number, or {uniform: [low, high]}"),
        ("prompt_tokens: {uniform: [9, 2]}", "uniform runs backwards (got [9, 2])"),
        ("prompt_tokens: {uniform: [0, 2]}", "prompt_tokens.uniform[0]: out of range (got 0)"),
        ("prompt_tokens: {uniform: [1, 2], fixed: 3}", "several forms (got fixed and uniform)"),
        ("prompt_tokens: {lognormal: {median: 5, sigma: 1.0}}", "lognormal.max: missing key"),
        ("arrival: {at_s: 1, every_s: 2}", "arrival: several forms (got at_s and every_s)"),
        ("arrival: {at_s: 1, start_s: 2}", "arrival: start_s beside at_s"),
        ("arrival: {poisson_per_s: 0}", "poisson_per_s: out of range (got 0); expected more than"),
        ("temperature: -0.5", "temperature: out of range (got -0.5); expected at least 0"),
        ("abort: {fraction: 1.5, after_tokens: 1}", "abort.fraction: out of range (got 1.5)"),
        ("fork: {children: 2, output_tokens: 3, after_tokens: 4}", "past the parent's end (got 4)"),
        (
            "fork: {child: 2, output_tokens: 3}",
            "fork.child: unknown key (got 'child'); expected 'ch",
        ),
    ],
)
def test_bad_groups(write, group, part):
    """Each key of a group is checked, alone and against the others."""
    keys = {"count": "1", "prompt_tokens": "8", "output_tokens": "4"}
    name, _, value = group.partition(": ")
    lines = "".join(f"    {key}: {val}\n" for key, val in {**keys, name: value}.items())
    _, problems = check_file(Workload, write(f"description: x\nrequests:\n  -\n{lines}"))
    assert any(part in problem.text for problem in problems), problems


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (PROFILE.replace("heads: 4", "heads: 3"), "evenly (got 3 and 2)"),
        (PROFILE.replace("head_dim: 4", "head_dim: 5"), "cannot be halved (got 5)"),
        (PROFILE.replace("hidden_size: 8, ", ""), "model: missing hidden_size"),
        (PROFILE.replace("{num", "{path: x, num"), "`path` beside head_dim, hidden_size"),
        (PROFILE.replace("vocab_size: 32", "dtype: float8"), "model.dtype: unknown name"),
        (PROFILE + "engine: {num_blocks: 1}\n", "engine.num_blocks: out of range (got 1)"),
        (
            PROFILE + "engine: {num_blocks: lots}\n",
            "engine.num_blocks: not valid (got 'lots'); expected a whole number, or auto",
        ),
        (PROFILE + "engine: {num_blocks: 4.5}\n", "engine.num_blocks: wrong type (got 4.5)"),
        (PROFILE + "verify: {score_tolerance: 0}\n", "verify.score_tolerance: out of range"),
        (PROFILE + "device: gpu\n", "device: unknown name (got 'gpu'); expected"),
    ],
)
def test_bad_profile_files(write, text, part):
    """Geometry must be whole and fit together; sizes and names are checked."""
    with pytest.raises(SourceError) as caught:
        load_profile(write(text))
    assert part in str(caught.value)


@pytest.mark.parametrize(
    ("value", "part"),
    [
        ("1.5", "acceptance: 1.5; expected a probability"),
        ("[0.5, x]", "acceptance: [1]: 'x'; expected a probability"),
        ("{over_time: []}", "acceptance: .over_time: []; expected a list"),
        ("burst", "acceptance: unknown name 'burst'"),
    ],
)
def test_bad_acceptance(write, value, part):
    """One line with the file's line; a name has the nearest one as its hint."""
    _, problems = check_file(Workload, write(f"acceptance: {value}\n{WORKLOAD}"))
    assert [part in problem.text for problem in problems] == [True]
    assert problems[0].line == 1
    assert (value == "burst") == bool(problems[0].hint)


def test_a_misread_value_is_told_once(write):
    """A value the reader refuses gives one problem, not a second one from the schema."""
    _, problems = check_file(Workload, write(WORKLOAD + "engine: {block_size: 017, relese: x}\n"))
    assert [problem.text.split(": ")[1] for problem in problems] == [
        "engine.block_size",
        "engine.relese",
    ]


def test_hints_say_how_yaml_wants_a_number(write):
    """The remedy for an exponent is a number of the kind the key takes."""
    _, problems = check_file(Workload, write(WORKLOAD + "scale_lengths: 1e-3\n"))
    assert problems[0].hint == "YAML reads 1e-3 as text; write 1.0e-3"
    _, problems = check_file(Workload, write(WORKLOAD + "engine: {num_blocks: 1e3}\n"))
    assert problems[0].hint == "YAML reads 1e3 as text; write 1000"


def test_unknown_keys_in_profiles_do_not_show_internal_names(write):
    """`name` is the file's and not offered as a key."""
    _, problems = check_file(Profile, write(PROFILE + "nam: x\n"))
    assert "unknown key (got 'nam')" in problems[0].text
    assert " name" not in problems[0].text.partition("expected")[2]


GROUP = "count: 1, prompt_tokens: 8, output_tokens: 4"


@pytest.mark.parametrize(
    ("more", "line", "part"),
    [
        (
            "turns: {count: 1, prompt_tokens: 2}",
            4,
            "turns.count: out of range (got 1); expected at",
        ),
        ("turns: {count: 2}", 4, "turns.prompt_tokens: missing key"),
        ("turns: {count: 2, prompt_tokens: 2, think: 1}", 4, "unknown key (got 'think'); expected"),
        ("turns: {count: 2, prompt_tokens: 2, think_s: -1}", 4, "think_s: out of range (got -1)"),
        (
            "turns: {count: 2, prompt_tokens: 2}, fork: {children: 2, output_tokens: 4}",
            4,
            "requests[1]: fork beside turns; expected one of the two",
        ),
        ("shared_prefix_tokens: 0", 4, "requests[1].shared_prefix_tokens: out of range (got 0)"),
        (
            "shared_prefix_tokens: 4, prompts_of: docs",
            4,
            "requests[1]: shared_prefix_tokens beside prompts_of; expected one of the two",
        ),
        (
            "prompts_of: dogs",
            4,
            "prompts_of: no group of that name further up (got 'dogs'); expected 'docs' (the",
        ),
        ("name: a, prompts_of: a", 4, "requests[1].prompts_of: no group of that name further up"),
        ("name: docs", 4, "requests[1].name: two groups of one name (got 'docs'); expected names"),
        ("phase: 0", 4, "requests[1].phase: out of range (got 0); expected at least 1"),
    ],
)
def test_bad_turns_prefixes_and_phases(write, more, line, part):
    """What a group says of others, of its turns and its phase is checked where it stands."""
    groups = f"  - {{{GROUP}, name: docs}}\n  - {{{GROUP}, {more}}}\n"
    path = write(f"description: test\nrequests:\n{groups}")
    _, problems = check_file(Workload, path)
    assert len(problems) == 1
    assert problems[0].text.startswith(f"{path}:{line}: requests[1]")
    assert part in problems[0].text


def test_prompts_of_needs_a_group_with_a_name(write):
    """Where there is none, the remedy is said."""
    path = write(f"description: test\nrequests:\n  - {{{GROUP}, prompts_of: docs}}\n")
    with pytest.raises(SourceError, match="expected the `name` of a group above this one"):
        load_workload(path)
