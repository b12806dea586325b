"""Gemma 1: norms whose weights are stored minus 1, scaled embeddings, gelu, tied weights."""

from lightllm.common.basemodel.basemodel import BaseModel
from lightllm.common.basemodel.layer_infer.pre_layer_infer import PreLayerInfer, ScaledPreLayerInfer
from lightllm.common.basemodel.layer_infer.template.feed_forward import FeedForward, GatedFeedForward
from lightllm.common.basemodel.layer_infer.template.norm import RMSNorm, UnitOffsetRMSNorm


class Gemma(BaseModel):
    norm_type: type[RMSNorm | UnitOffsetRMSNorm] = UnitOffsetRMSNorm

    def feed_forward(self, i: int) -> FeedForward:
        act = self.config.hidden_act
        return GatedFeedForward("gelu_pytorch_tanh" if act == "gelu" else act)  # "gelu" of the first release meant this

    def pre_layer(self) -> PreLayerInfer:
        return ScaledPreLayerInfer(self.config.hidden_size**0.5)
