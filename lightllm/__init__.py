"""LightLLM: serve and run large language models. Importing it is light: torch loads with the first use of `LLM`."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightllm.llm import LLM, CompletionOutput, RequestOutput
    from lightllm.server.core.sampling_params import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams", "__version__"]

_HOMES = {
    "LLM": "lightllm.llm",
    "RequestOutput": "lightllm.llm",
    "CompletionOutput": "lightllm.llm",
    "SamplingParams": "lightllm.server.core.sampling_params",
}


def __getattr__(name: str):
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
