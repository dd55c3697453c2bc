"""Tiny models of transformers to compare with: seeded, with no trivial tensor, in true float64."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor


def transformers_v4(raw: dict[str, Any]) -> Any:
    """A float64 model of transformers, no tensor of it trivial (sinks, biases and tables are 0)."""
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    config = DeepseekV4Config(**{**raw, "max_position_embeddings": 4096})
    config._attn_implementation = config._experts_implementation = "eager"
    model = DeepseekV4ForCausalLM(config).eval().double()
    generator = torch.Generator().manual_seed(0)
    for name, tensor in sorted(model.state_dict().items()):
        if name.endswith("tid2eid"):
            order = torch.rand(len(tensor), raw["n_routed_experts"], generator=generator)
            tensor.copy_(order.argsort(1)[:, : tensor.shape[1]])
            continue
        drawn = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        if "norm" in name or name.endswith("scale"):
            tensor.copy_(1 + 0.2 * drawn)
        else:
            tensor.copy_(drawn * (0.5 if "position_bias" in name else tensor.shape[-1] ** -0.5))
    return model


@contextlib.contextmanager
def true_float64() -> Iterator[None]:
    """Make transformers cast to float64 where it casts to float32, and keep the first of ties."""
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as modeling

    class Wide:
        float32 = float = torch.float64

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    def stable(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
        ordered = torch.sort(x, dim=dim, descending=largest, stable=True)
        return torch.return_types.topk([part.narrow(dim, 0, k) for part in ordered])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        patch.setattr(torch.Tensor, "topk", stable)
        patch.setattr(Wide, "topk", staticmethod(stable), raising=False)
        patch.setattr(modeling, "torch", Wide())
        yield
