"""Gemma 1: norms whose weights are stored minus 1, scaled embeddings, gelu, tied weights."""

from lightllm.common.basemodel.basemodel import BaseModel
from lightllm.common.basemodel.layer_infer.pre_layer_infer import PreLayerInfer, ScaledPreLayerInfer
from lightllm.common.basemodel.layer_infer.template.norm import RMSNorm, UnitOffsetRMSNorm


class Gemma(BaseModel):
    norm_type: type[RMSNorm | UnitOffsetRMSNorm] = UnitOffsetRMSNorm

    def pre_layer(self) -> PreLayerInfer:
        return ScaledPreLayerInfer(self.config.hidden_size**0.5)
