"""A paged LLM inference engine in which every choice of block ownership is a plug-in.

The names below are loaded when they are first used, so importing the package (or one of its host
modules) does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepinfer.block_manager import BlockManager, Verdict
    from deepinfer.config import EngineConfig, ModelConfig
    from deepinfer.engine import LLMEngine
    from deepinfer.outputs import RequestOutput, StepOutput
    from deepinfer.sequence import SamplingParams

__all__ = [
    "BlockManager",
    "EngineConfig",
    "LLMEngine",
    "ModelConfig",
    "RequestOutput",
    "SamplingParams",
    "StepOutput",
    "Verdict",
]

_HOMES = {
    "BlockManager": "block_manager",
    "EngineConfig": "config",
    "LLMEngine": "engine",
    "ModelConfig": "config",
    "RequestOutput": "outputs",
    "SamplingParams": "sequence",
    "StepOutput": "outputs",
    "Verdict": "block_manager",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"deepinfer.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
