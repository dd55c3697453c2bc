"""Pydantic's complaints in the words of this toolkit: one line with file, line, key, value, remedy.

Knows the shape of pydantic models and errors, nothing of what the keys mean. Invariant: every
complaint gives exactly one problem, and a value the YAML reader has already complained of gives
none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, Tag, ValidationError
from pydantic_core import ErrorDetails

from bench.nearest import choices
from bench.yaml_source import KeyPath, Problem, Source, is_number_in_disguise, show_value

Model = TypeVar("Model", bound=BaseModel)

_EXPECTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "text",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "model_type": "a mapping of keys",
    "model_attributes_type": "a mapping of keys",
    "string_too_short": "text",
    "finite_number": "a finite number",
}
FAMILY = "family"  # the key that says which kind of model a mapping is
_BOUNDS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}


def validate(
    model: type[Model], source: Source, **extra: Any
) -> tuple[Model | None, list[Problem]]:
    """The file as a `model` plus every problem of it, the reader's own included.

    `extra` are fields that do not come from the file; a file that has them is refused.
    The model is None as soon as there is one problem.
    """
    problems = list(source.problems)
    for name in extra.keys() & source.data.keys():
        valid = [key for key in model.model_fields if key not in extra]
        problems.append(_unknown_key(source, (name,), valid))
    try:
        made = model.model_validate({**source.data, **extra})
    except ValidationError as error:
        details = error.errors(include_url=False)
        problems += [
            describe(source, model, detail, hidden=extra.keys())
            for detail in details
            if not _overlaps(source.bad_paths, _path(detail)) and not _misspelt(detail, details)
        ]
        return None, problems
    return (None if problems else made), problems


def describe(
    source: Source, model: type[BaseModel], detail: ErrorDetails, hidden: Iterable[str] = ()
) -> Problem:
    """One pydantic error as one line."""
    path, kind, value = _path(detail), detail["type"], detail["input"]
    context = detail.get("ctx", {})
    if kind == "extra_forbidden":
        valid = _keys_at(model, detail["loc"][:-1]) - set(hidden)
        return _unknown_key(source, path, sorted(valid))
    if kind == "missing":
        return source.problem(path, "missing key; expected it here")
    if kind == "conflict":
        return source.problem(path, f"{context['text']}; expected {context['expected']}")
    if kind == "refused":
        return source.problem(path, context["text"], hint=context.get("hint"))
    hint = None
    if kind == "union_tag_invalid":
        path, value = (*path, FAMILY), _bare(context["tag"])
        names = [_bare(name.strip("' ")) for name in context["expected_tags"].split(",")]
        what, expected = "unknown name", choices(value, names)
    elif kind == "unknown_name":
        name = context.get("name", value)  # of several in one value, the one that is wrong
        what, expected = "unknown name", choices(name, context["valid"])
    elif kind == "literal_error":
        names = [name.strip("'") for name in context["expected"].replace(" or ", ", ").split(", ")]
        what, expected = "unknown name", choices(value, names)
    elif bound := next((key for key in _BOUNDS if key in context), None):
        what, expected = "out of range", f"{_BOUNDS[bound]} {context[bound]}"
    elif kind in _EXPECTED:
        what, expected = "wrong type", _EXPECTED[kind]
        if expected.endswith("number") and is_number_in_disguise(value):
            hint = _number_hint(str(value), whole=kind == "int_type")
    else:
        what, expected = "not valid", detail["msg"]
    if path and path[-1] == "fixed" and path not in source.positions:
        path, expected = path[:-1], f"{expected}, or {{uniform: [low, high]}} or {{lognormal: ...}}"
    return source.problem(path, f"{what} (got {show_value(value)}); expected {expected}", hint=hint)


def _unknown_key(source: Source, path: KeyPath, valid: Sequence[str]) -> Problem:
    name = path[-1]
    return source.problem(path, f"unknown key (got {name!r}); expected {choices(name, valid)}")


def _misspelt(missing: ErrorDetails, details: Sequence[ErrorDetails]) -> bool:
    """Whether a missing key is there under another name, of which another complaint tells."""
    if missing["type"] != "missing":
        return False
    *parent, name = _path(missing)
    unknown = [
        str(_path(other)[-1])
        for other in details
        if other["type"] == "extra_forbidden" and [*_path(other)[:-1]] == parent
    ]
    return bool(get_close_matches(str(name), unknown, n=1))


def _path(detail: ErrorDetails) -> KeyPath:
    """Where the value stands in the file; pydantic also says which kind of model was tried."""
    within = detail.get("ctx", {}).get("at", ())
    return (*(part for part in detail["loc"] if not _is_tag(part)), *within)


def _is_tag(part: object) -> bool:
    return isinstance(part, str) and part.startswith("<")


def _bare(tag: str) -> str:
    return tag.strip("<>")


def _overlaps(bad_paths: Iterable[KeyPath], path: KeyPath) -> bool:
    """Whether a path lies at, under or just above a bad one: then the cause is already told."""
    return any(path[: len(bad)] == bad or bad[: len(path)] == path for bad in bad_paths)


def _number_hint(text: str, *, whole: bool) -> str | None:
    """How to write a number that YAML 1.1 reads as text; None if a whole one cannot be meant."""
    if whole:
        number = float(text)
        return f"YAML reads {text} as text; write {int(number)}" if number.is_integer() else None
    mantissa, _, exponent = text.lower().partition("e")
    mantissa = mantissa if "." in mantissa else f"{mantissa}.0"
    sign = "" if exponent[0] in "+-" else "+"
    return f"YAML reads {text} as text; write {mantissa}e{sign}{exponent}"


def _keys_at(model: type[BaseModel], loc: Sequence[int | str]) -> set[str]:
    """The keys of the model at `loc` within `model`."""
    annotation: Any = model
    for part in loc:
        if isinstance(part, int):
            continue
        if _is_tag(part):
            annotation = next(kind for kind in get_args(annotation) if Tag(part) in get_args(kind))
        else:
            inner = _model_in(annotation)
            assert inner is not None, "a key was reported inside something without keys"
            annotation = inner.model_fields[part].annotation
    found = _model_in(annotation)
    assert found is not None, "an unknown key was reported inside something without keys"
    return set(found.model_fields)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for arg in get_args(annotation) if (found := _model_in(arg))), None)
