"""The JSON schema of workload and profile files, made from the models that check them.

Knows pydantic's schemas and what they leave out: the names of choices, the short form of a length,
which keys exclude one another. Invariant: every file that `validate` accepts fits the schema, but
for keys that are null, which say nothing; the schema may accept a file that `validate` refuses,
since it cannot relate one number to another.

The files lie beside the YAML (`workloads/workload.schema.json`), so that the first line of a
shipped file finds its schema in a checkout and in an installed package alike.
"""

from __future__ import annotations

import inspect
import json
from typing import Any

from bench.catalog import Kind
from bench.schema import Arrival, Lengths, Profile, Workload
from bench.strict import Count, Strict
from deepinfer.names import CHECKS, DESCRIPTIONS, TITLES, names_of

_MODELS: dict[Kind, type[Strict]] = {"workload": Workload, "profile": Profile}
_DIALECT = "https://json-schema.org/draft/2020-12/schema"
# Of these keys a file gives exactly one: what `Strict.only` checks.
_EXCLUSIVE: dict[str, tuple[str, ...]] = {
    Lengths.__name__: ("fixed", "uniform", "lognormal"),
    Arrival.__name__: ("at_s", "poisson_per_s", "every_s"),
    Workload.__name__: ("requests", "trace"),
}


def schema_text(kind: Kind) -> str:
    """The schema as the text of its file."""
    return json.dumps(build_schema(kind), indent=2, ensure_ascii=False) + "\n"


def build_schema(kind: Kind) -> dict[str, Any]:
    """The schema of one kind of file, draft 2020-12."""
    model = _MODELS[kind]
    schema = model.model_json_schema()
    del schema["properties"]["name"]  # the file's name, never a key in it
    definitions: dict[str, Any] = schema.pop("$defs")
    schema = {"$schema": _DIALECT, "title": f"deepinfer-bench {kind}", **_finished(schema)}
    _choose_one(schema, _EXCLUSIVE.get(model.__name__, ()))
    schema["$defs"] = {}
    for name, definition in definitions.items():
        finished = _finished(definition)
        _choose_one(finished, _EXCLUSIVE.get(name, ()))
        if name == Lengths.__name__:
            finished = {"anyOf": [_short_form(), finished]}
        schema["$defs"][name] = finished
    return schema


def _short_form() -> dict[str, Any]:
    """A length given as a plain number."""
    from pydantic import TypeAdapter

    return {**TypeAdapter(Count).json_schema(), "description": "A fixed number of tokens."}


def _choose_one(schema: dict[str, Any], names: tuple[str, ...]) -> None:
    if names:
        schema["oneOf"] = [{"required": [name]} for name in names]


def _finished(schema: dict[str, Any]) -> dict[str, Any]:
    """Without generated titles, descriptions on one line, and with the names of choices."""
    schema = {key: value for key, value in schema.items() if key != "title"}
    if "description" in schema:
        schema["description"] = " ".join(inspect.cleandoc(schema["description"]).split())
    properties: dict[str, dict[str, Any]] = schema.get("properties", {})
    schema["properties"] = {name: _property(name, entry) for name, entry in properties.items()}
    return schema


def _property(name: str, entry: dict[str, Any]) -> dict[str, Any]:
    """One key: `X | None` is X, for a file leaves out what it does not say."""
    given = [kind for kind in entry.get("anyOf", ()) if kind != {"type": "null"}]
    plain = {key: value for key, value in entry.items() if key not in ("title", "anyOf")}
    if isinstance(plain.get("default", ""), (dict, type(None))):
        del plain["default"]  # none, or a group of keys that have their own
    finished = {**(given[0] if len(given) == 1 else {}), **plain}
    if name in DESCRIPTIONS:
        names = names_of(name)
        said = "; ".join(f"{choice}: {text}" for choice, text in names.items())
        if name == "checks":
            one = "|".join(CHECKS)
            finished["pattern"] = rf"^(off|({one})(\+({one}))*)$"
        elif name == "overlap":  # as YAML reads its names, too
            del finished["type"]
            finished["enum"] = [*DESCRIPTIONS[name], False, True, 2]
        else:
            finished["enum"] = list(names)
        finished["description"] = f"{TITLES[name]}. {said}"
    return finished
