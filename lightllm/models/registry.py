"""Which class serves which model_type. A class is imported only when it is asked for."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from lightllm.common.basemodel.model_config import ConfigError

if TYPE_CHECKING:
    from lightllm.common.basemodel.basemodel import BaseModel

MODEL_REGISTRY = {
    "aquila": "lightllm.models.llama.model:Llama",
    "baichuan": "lightllm.models.baichuan.model:Baichuan",
    "bloom": "lightllm.models.bloom.model:Bloom",
    "chatglm": "lightllm.models.chatglm.model:ChatGLM",
    "cohere": "lightllm.models.cohere.model:Cohere",
    "cohere2": "lightllm.models.cohere2.model:Cohere2",
    "deepseek_v2": "lightllm.models.deepseek.model:DeepseekV2",
    "deepseek_v3": "lightllm.models.deepseek.model:DeepseekV3",
    "gemma": "lightllm.models.gemma.model:Gemma",
    "gemma2": "lightllm.models.gemma2.model:Gemma2",
    "gemma3_text": "lightllm.models.gemma3.model:Gemma3",
    "gemma4_e": "lightllm.models.gemma4_e.model:Gemma4E",
    "gemma4_moe": "lightllm.models.gemma4_moe.model:Gemma4Moe",
    "gemma4_text": "lightllm.models.gemma4.model:Gemma4",
    "glm": "lightllm.models.glm.model:Glm",
    "glm4": "lightllm.models.glm.model:Glm4",
    "glm4_moe": "lightllm.models.glm4_moe.model:Glm4Moe",
    "gpt_bigcode": "lightllm.models.gpt_bigcode.model:GPTBigCode",
    "gpt_oss": "lightllm.models.gpt_oss.model:GptOss",
    "internlm": "lightllm.models.llama.model:Llama",
    "internlm2": "lightllm.models.internlm2.model:InternLM2",
    "llama": "lightllm.models.llama.model:Llama",
    "llama4_text": "lightllm.models.llama4.model:Llama4",
    "minicpm": "lightllm.models.minicpm.model:MiniCPM",
    "minicpm3": "lightllm.models.minicpm3.model:MiniCPM3",
    "mistral": "lightllm.models.llama.model:Llama",
    "mixtral": "lightllm.models.mixtral.model:Mixtral",
    "olmo2": "lightllm.models.olmo2.model:Olmo2",
    "phi": "lightllm.models.phi.model:Phi",
    "phi3": "lightllm.models.phi3.model:Phi3",
    "qwen2": "lightllm.models.qwen2.model:Qwen2",
    "qwen2_moe": "lightllm.models.qwen2_moe.model:Qwen2Moe",
    "qwen3": "lightllm.models.qwen3.model:Qwen3",
    "qwen3_moe": "lightllm.models.qwen3_moe.model:Qwen3Moe",
    "stablelm": "lightllm.models.stablelm.model:StableLm",
    "starcoder2": "lightllm.models.starcoder2.model:Starcoder2",
}


def model_class(model_type: str) -> type[BaseModel]:
    """The class for config.json's model_type; ConfigError listing the known ones for any other."""
    if model_type not in MODEL_REGISTRY:
        raise ConfigError(f"model_type {model_type!r} is not supported; known: {', '.join(sorted(MODEL_REGISTRY))}")
    module, name = MODEL_REGISTRY[model_type].split(":")
    return getattr(importlib.import_module(module), name)
