"""A run as a JSON file: settings, actions, the order of events, and what happened.

    {"format": "deepinfer-exploration", "version": 1, "about": "...",
     "configuration": {"block_size": 2, "num_blocks": 3, "release": "early", ..., "streams": "..."},
     "actions": [{"do": "submit"}, {"do": "collect", "meanwhile": ["load", "compute"]}, ...],
     "happened": {"wrong_rows": 3, ...}}

`meanwhile` says what happened where the host looked at an event or waited for one during the
action, in order: a stream ran its next operation, or the event had `not yet` passed. What is not
said is the least: a look finds what is there, a wait runs what it needs. The last action may be
`drain`, the end of the run; it comes anyway.

Invariant: a file that is written, read and replayed gives the same outcome, or the code has
changed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from deepinfer.config import EngineConfig
from deepinfer.errors import UserError, nearest_hint
from deepinfer.testing.explorer.actions import Action, from_json, to_json
from deepinfer.testing.explorer.runs import ONE, SEPARATE, Outcome, Performed, Setup, replay

FORMAT, VERSION = "deepinfer-exploration", 1
DRAIN, MEANWHILE = "drain", "meanwhile"


@dataclass(frozen=True, slots=True)
class Recording:
    """A file's content.

    Attributes:
        performed: actions with what happened meanwhile.
        happened: of the outcome: what a replay must bring again.
    """

    about: str
    setup: Setup
    performed: Sequence[Performed]
    happened: dict[str, Any]


def happened(outcome: Outcome) -> dict[str, Any]:
    """What a file says of an outcome."""
    return {
        "wrong_rows": outcome.wrong_rows,
        "wrong_tokens": outcome.wrong_tokens,
        "hazards": outcome.hazards,
        "problems": outcome.problems,
        "findings": outcome.findings,
        "log": outcome.log,
    }


def write_file(path: Path, about: str, setup: Setup, outcome: Outcome) -> None:
    """Keep a run."""
    defaults = EngineConfig()
    config = {
        part.name: getattr(setup.config, part.name)
        for part in fields(EngineConfig)
        if getattr(setup.config, part.name) != getattr(defaults, part.name)
        or part.name in ("release", "free_order", "discipline")
    }
    actions = []
    for action, answers in outcome.performed:
        entry = to_json(action) if action is not None else {"do": DRAIN}
        actions.append({**entry, **({MEANWHILE: list(answers)} if answers else {})})
    content = {
        "format": FORMAT,
        "version": VERSION,
        "about": about,
        "configuration": {**config, "streams": setup.streams},
        "actions": actions,
        "happened": happened(outcome),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read_file(path: Path) -> Recording:
    """Read what `write_file` wrote. Raises UserError, naming the file, for anything else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path}: not JSON: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UserError(f"{path}: not an exploration", hint=f'expected "format": "{FORMAT}"')
    if content.get("version") != VERSION:
        raise UserError(f"{path}: version {content.get('version')!r}; this program reads {VERSION}")
    try:
        return _recording(content)
    except UserError as error:
        raise UserError(f"{path}: {error}", hint=error.hint) from None


def replay_file(path: Path) -> Outcome:
    """Run a file's actions in its order of events. Raises UserError if it is no exploration."""
    recording = read_file(path)
    return replay(recording.setup, recording.performed)


def _recording(content: dict[str, Any]) -> Recording:
    config = _part(content, "configuration", dict)
    streams = config.pop("streams", SEPARATE)
    if streams not in (SEPARATE, ONE):
        raise UserError(f"streams: {streams!r} is not one of {SEPARATE}, {ONE}")
    names = [part.name for part in fields(EngineConfig)]
    for key in config:
        if key not in names:
            raise UserError(f"configuration key {key!r} is unknown", hint=nearest_hint(key, names))
    setup = Setup(EngineConfig(**config), streams)
    setup.config.check()
    return Recording(
        str(content.get("about", "")),
        setup,
        [_performed(entry) for entry in _part(content, "actions", list)],
        _part(content, "happened", dict),
    )


def _performed(entry: Any) -> Performed:
    if not isinstance(entry, dict):
        raise UserError(f"action {entry!r}: expected an object")
    entry = dict(entry)
    answers = entry.pop(MEANWHILE, [])
    if not isinstance(answers, list) or not all(isinstance(answer, str) for answer in answers):
        raise UserError(f"{MEANWHILE}: {answers!r}; expected a list of streams or 'not yet'")
    action: Action | None = None if entry == {"do": DRAIN} else from_json(entry)
    return action, answers


def _part(content: dict[str, Any], key: str, kind: type) -> Any:
    if not isinstance(content.get(key), kind):
        raise UserError(f"{key}: missing, or not a JSON {'object' if kind is dict else 'list'}")
    return content[key]
