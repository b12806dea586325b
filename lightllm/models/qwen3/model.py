"""Qwen3: every head of q and k is normalised."""

from lightllm.common.basemodel.basemodel import BaseModel


class Qwen3(BaseModel):
    head_norms = True
