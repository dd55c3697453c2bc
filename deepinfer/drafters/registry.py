"""Drafters by name. Invariant: the keys are `deepinfer.names.DRAFTERS`, in that order."""

from __future__ import annotations

from deepinfer.drafters.base import Drafter
from deepinfer.drafters.ngram import NgramDrafter
from deepinfer.drafters.replay import ReplayDrafter
from deepinfer.errors import UserError, check_name

DRAFTERS: dict[str, type[Drafter] | None] = {
    "ngram": NgramDrafter,
    "mtp": None,  # a model's own draft layers: its runner is the drafter
    "replay": ReplayDrafter,
}


def make_drafter(name: str) -> Drafter:
    """The drafter of this name, with its default settings.

    Raises UserError for an unknown name, or for one that needs more than its name.
    """
    check_name("drafter", name, DRAFTERS)
    if name == "mtp":
        raise UserError(
            "drafter: 'mtp' asks the model's own draft layers, and this engine runs no such model",
            hint="drafter: ngram",
        )
    if name == "replay":
        raise UserError(
            "drafter: 'replay' needs the tokens of a reference run",
            hint="pass a ReplayDrafter to the engine; workloads do that themselves",
        )
    return NgramDrafter()
