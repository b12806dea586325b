"""Mistral: LLaMA with a sliding window in every layer, which ModelConfig reads."""

from __future__ import annotations

from lightllm.common.basemodel.basemodel import BaseModel


class Mistral(BaseModel):
    pass
