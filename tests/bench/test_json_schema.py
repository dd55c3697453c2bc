"""The JSON schemas: up to date, true of every shipped file, false of a bad one."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from bench.catalog import Kind
from bench.json_schema import build_schema, schema_text
from bench.spec import load_profile, load_workload
from bench.yaml_source import SourceError
from tests.bench.tiny import ROOT

KINDS: tuple[Kind, ...] = ("workload", "profile")
SHIPPED = [(kind, path) for kind in KINDS for path in sorted((ROOT / f"{kind}s").glob("*.yaml"))]
LOGNORMAL = {"median": 8.0, "sigma": 0.5, "max": 20}
GOOD: dict[str, Any] = {
    "description": "two chats",
    "engine": {"block_size": 16, "release": "polled"},
    "requests": [
        {
            "count": 1,
            "prompt_tokens": {"uniform": [1, 5]},
            "output_tokens": 4,
            "arrival": {"every_s": 0.5, "start_s": 1},
            "fork": {"children": 2, "output_tokens": {"lognormal": LOGNORMAL}},
            "name": "chats",
        },
        {
            "count": 2,
            "prompt_tokens": 4,
            "prompts_of": "chats",
            "output_tokens": 4,
            "phase": 2,
            "turns": {"count": 3, "prompt_tokens": {"uniform": [1, 5]}, "think_s": 0.5},
        },
    ],
    "delay": "copy=2ms+load=500us",
}


def problem(schema: dict[str, Any], value: Any, root: dict[str, Any]) -> str:
    """The first reason why `value` does not fit, or nothing.

    As much of draft 2020-12 as our schemas use; any other keyword is an error, so that nothing
    passes because it was not looked at.
    """
    # The type first: the other keywords speak of values of that type.
    for keyword, rule in sorted(schema.items(), key=lambda entry: entry[0] != "type"):
        if keyword in ("$schema", "$defs", "title", "description", "default"):
            continue
        check = CHECKS[keyword]
        if found := check(rule, value, schema, root):
            return found
    return ""


def _type(rule: str, value: Any, schema: Any, root: Any) -> str:
    kinds: dict[str, Any] = {
        "object": dict,
        "array": list,
        "string": str,
        "integer": int,
        "number": (int, float),
        "boolean": bool,
    }
    fits = isinstance(value, kinds[rule]) and (rule == "boolean" or not isinstance(value, bool))
    return "" if fits else f"{value!r} is no {rule}"


def _properties(rule: dict[str, Any], value: Any, schema: Any, root: Any) -> str:
    found = (problem(rule[key], value[key], root) for key in value if key in rule)
    return next(filter(None, found), "")


def _closed(rule: bool, value: Any, schema: Any, root: Any) -> str:
    assert rule is False
    return next((f"unknown {key}" for key in value if key not in schema["properties"]), "")


def _required(rule: list[str], value: Any, schema: Any, root: Any) -> str:
    return next((f"no {key}" for key in rule if key not in value), "")


def _matching(rule: list[Any], value: Any, root: Any) -> int:
    return sum(not problem(option, value, root) for option in rule)


def _each(rule: dict[str, Any], value: Any, schema: Any, root: Any) -> str:
    return next(filter(None, (problem(rule, item, root) for item in value)), "")


def _first_items(rule: list[Any], value: Any, schema: Any, root: Any) -> str:
    pairs = zip(rule, value, strict=False)
    return next(filter(None, (problem(option, item, root) for option, item in pairs)), "")


def _compared(holds: Any, what: str) -> Any:
    return lambda rule, value, schema, root: (
        "" if holds(value, rule) else f"{value!r}: {what} {rule}"
    )


CHECKS: dict[str, Any] = {
    "type": _type,
    "properties": _properties,
    "additionalProperties": _closed,
    "required": _required,
    "items": _each,
    "prefixItems": _first_items,
    "anyOf": lambda rule, v, s, root: "" if _matching(rule, v, root) else f"{v!r}: no form of it",
    "oneOf": lambda rule, v, s, root: "" if _matching(rule, v, root) == 1 else f"{v!r}: not one",
    "$ref": lambda rule, v, s, root: problem(root["$defs"][rule.removeprefix("#/$defs/")], v, root),
    "pattern": _compared(lambda value, rule: re.search(rule, value), "does not fit"),
    "const": _compared(lambda value, only: value == only, "is not"),
    "enum": _compared(lambda value, names: value in names, "not in"),
    "minimum": _compared(lambda value, bound: value >= bound, "below"),
    "maximum": _compared(lambda value, bound: value <= bound, "above"),
    "exclusiveMinimum": _compared(lambda value, bound: value > bound, "not above"),
    "exclusiveMaximum": _compared(lambda value, bound: value < bound, "not below"),
    "minLength": _compared(lambda value, bound: len(value) >= bound, "shorter than"),
    "minItems": _compared(lambda value, bound: len(value) >= bound, "fewer than"),
    "maxItems": _compared(lambda value, bound: len(value) <= bound, "more than"),
}


def problem_of(kind: Kind, value: Any) -> str:
    """Why `value` is no file of this kind, or nothing."""
    schema = build_schema(kind)
    return problem(schema, value, schema)


@pytest.mark.parametrize("kind", KINDS)
def test_the_shipped_schema_is_that_of_the_models(kind: Kind) -> None:
    """After a change of `bench.schema`: `deepinfer-bench schema KIND > KINDs/KIND.schema.json`."""
    path = ROOT / f"{kind}s" / f"{kind}.schema.json"
    assert path.read_text(encoding="utf-8") == schema_text(kind)


@pytest.mark.parametrize(("kind", "path"), SHIPPED, ids=[path.stem for _, path in SHIPPED])
def test_every_shipped_file_fits_and_names_its_schema(kind: Kind, path: Path) -> None:
    """The first line tells an editor where the schema lies, seen from the file."""
    text = path.read_text(encoding="utf-8")
    first = text.partition("\n")[0]
    assert first == f"# yaml-language-server: $schema={kind}.schema.json"
    assert (path.parent / first.partition("$schema=")[2]).is_file()
    assert problem_of(kind, yaml.safe_load(text)) == ""


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"enginee": {}}, "unknown enginee"),
        ({"name": "x"}, "unknown name"),
        ({"description": ""}, "'': shorter than 1"),
        ({"engine": {"release": "poled"}}, "'poled': not in"),
        ({"engine": {"checks": "tags+ordre"}}, "'tags+ordre': does not fit"),
        ({"engine": {"checks": "off+tags"}}, "'off+tags': does not fit"),
        ({"engine": {"block_size": 0}}, "0: below 1"),
        ({"delay": "copi=2ms"}, "'copi=2ms': does not fit"),
        ({"delay": "copy=2ms+none"}, "'copy=2ms+none': does not fit"),
        ({"engine": {"block_size": "16"}}, "'16' is no integer"),
        ({"trace": {"format": "azure"}}, "not one"),
        ({"requests": [{"count": 1, "prompt_tokens": 4}]}, "no output_tokens"),
        (
            {
                "requests": [
                    {**GOOD["requests"][0], "output_tokens": {"fixed": 1, "uniform": [1, 2]}}
                ]
            },
            "no form of it",
        ),
        ({"requests": [{**GOOD["requests"][0], "prompt_tokens": 0}]}, "0: no form of it"),
        ({"requests": [{**GOOD["requests"][0], "arrival": {}}]}, "{}: not one"),
    ],
)
def test_a_bad_workload_fits_neither_schema_nor_model(
    tmp_path: Path, change: dict[str, Any], expected: str
) -> None:
    """What the schema refuses, `validate` refuses too."""
    assert expected in problem_of("workload", {**GOOD, **change})
    path = tmp_path / "bad.yaml"
    path.write_text(yaml.safe_dump({**GOOD, **change}))
    with pytest.raises(SourceError):
        load_workload(path)


def test_what_the_model_accepts_fits(tmp_path: Path) -> None:
    """Short and long forms of lengths, every kind of group."""
    path = tmp_path / "good.yaml"
    path.write_text(yaml.safe_dump(GOOD))
    load_workload(path)
    assert problem_of("workload", GOOD) == ""


def test_a_bad_profile_does_not_fit() -> None:
    """An unknown device, a key of the model that is none."""
    profile = yaml.safe_load((ROOT / "profiles" / "cpu-tiny.yaml").read_text(encoding="utf-8"))
    assert load_profile(ROOT / "profiles" / "cpu-tiny.yaml").device == profile["device"]
    assert "not in" in problem_of("profile", {**profile, "device": "tpu"})
    model = {**profile["model"], "num_layers": 2}
    assert problem_of("profile", {**profile, "model": model}).endswith("not one")


@pytest.mark.parametrize("name", ["cpu-tiny", "cpu-v4", "cpu-v41"])
def test_a_model_fits_the_schema_of_its_family_alone(name: str) -> None:
    """Another family's name, a key of another family, and a key that is missing are noticed."""
    profile = yaml.safe_load((ROOT / "profiles" / f"{name}.yaml").read_text(encoding="utf-8"))
    assert problem_of("profile", profile) == ""
    model = profile["model"]
    other = "deepseek_v4" if model.get("family") == "deepseek_v41" else "deepseek_v41"
    bad = [{**model, "family": other}, {**model, "num_layers": 2}, {"family": other}]
    for changed in bad:
        assert problem_of("profile", {**profile, "model": changed}).endswith("not one")


def test_choices_are_explained() -> None:
    """An editor shows what each release policy does."""
    engine = build_schema("workload")["$defs"]["EngineSettings"]["properties"]
    assert engine["release"]["enum"][0] == "early"
    assert "early: at once, nothing waited for" in engine["release"]["description"]


def test_the_checker_knows_every_keyword_it_is_given() -> None:
    """An unknown keyword is an error, and numbers are compared as numbers."""
    with pytest.raises(KeyError):
        problem({"format": "x"}, "y", {})
    assert problem({"exclusiveMinimum": 0}, math.inf, {}) == ""
