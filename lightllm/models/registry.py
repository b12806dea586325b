"""Which class serves which model_type. A class is imported only when it is asked for."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from lightllm.common.basemodel.model_config import ConfigError

if TYPE_CHECKING:
    from lightllm.common.basemodel.basemodel import BaseModel

MODEL_REGISTRY = {
    "aquila": "lightllm.models.llama.model:Llama",
    "internlm": "lightllm.models.llama.model:Llama",
    "llama": "lightllm.models.llama.model:Llama",
    "mistral": "lightllm.models.mistral.model:Mistral",
    "qwen2": "lightllm.models.qwen2.model:Qwen2",
    "qwen3": "lightllm.models.qwen3.model:Qwen3",
}


def model_class(model_type: str) -> type[BaseModel]:
    """The class for config.json's model_type; ConfigError listing the known ones for any other."""
    if model_type not in MODEL_REGISTRY:
        raise ConfigError(f"model_type {model_type!r} is not supported; known: {', '.join(sorted(MODEL_REGISTRY))}")
    module, name = MODEL_REGISTRY[model_type].split(":")
    return getattr(importlib.import_module(module), name)
