"""Qwen2 and Qwen2.5: biases on q, k and v, whatever the config says; a sliding window in some layers if switched on."""

from __future__ import annotations

from lightllm.common.basemodel.basemodel import BaseModel


class Qwen2(BaseModel):
    def qkv_bias(self) -> bool:
        return True
