"""Models of the golden form (`tests/golden/README.md`): config, weights, ids and values by name."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepinfer.models.hybrid.layer_plan import HybridConfig, v4_config, v41_config
from deepinfer.models.hybrid.loading import load_weights
from deepinfer.models.hybrid.weights import HybridWeights

FOLDER = Path(__file__).parent / "golden"


@dataclass(frozen=True)
class GoldenModel:
    """`values` holds every array that is neither weight nor table, as in the file."""

    config: HybridConfig
    weights: HybridWeights
    values: dict[str, np.ndarray[Any, Any]]

    def ids(self, which: int) -> Tensor:
        """int64 [T]: `ids.0` or `ids.1`."""
        return torch.from_numpy(self.values[f"ids.{which}"].astype(np.int64))


def load_golden(path: Path | str, **overrides: Any) -> GoldenModel:
    """A golden file by path, or by name in `tests/golden`; `overrides` of its config."""
    with np.load(path if isinstance(path, Path) else FOLDER / f"{path}.npz") as file:
        arrays = {name: file[name] for name in file.files}
    raw = json.loads(str(arrays.pop("config_json")))
    make = v4_config if "layer_types" in raw else v41_config
    config = make(raw, **overrides)
    state = {
        name.removeprefix("w."): torch.from_numpy(arrays.pop(name))
        for name in list(arrays)
        if name.startswith(("w.", "engram_"))
    }
    return GoldenModel(config, load_weights(config, state), arrays)
