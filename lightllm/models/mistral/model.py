"""Mistral: LLaMA with a sliding window in every layer, which ModelConfig reads."""

from lightllm.common.basemodel.basemodel import BaseModel


class Mistral(BaseModel):
    pass
