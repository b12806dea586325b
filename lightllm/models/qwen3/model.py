"""Qwen3: every head of q and k is normalised."""

from lightllm.common.basemodel.basemodel import BaseModel
from lightllm.common.basemodel.layer_infer.template.norm import Norm


class Qwen3(BaseModel):
    def head_norm(self) -> Norm | None:
        return self.norm()
