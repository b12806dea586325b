"""Qwen2 and Qwen2.5: biases on q, k and v, whatever the config says; a sliding window in some layers if switched on."""

from lightllm.common.basemodel.basemodel import BaseModel


class Qwen2(BaseModel):
    qkv_bias = True
