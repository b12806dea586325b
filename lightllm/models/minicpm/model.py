"""MiniCPM 1 and 2: LLaMA with scaled embeddings, branches and logits."""

import math

from lightllm.common.basemodel.basemodel import BaseModel
from lightllm.common.basemodel.layer_infer.post_layer_infer import PostLayerInfer
from lightllm.common.basemodel.layer_infer.pre_layer_infer import PreLayerInfer, ScaledPreLayerInfer
from lightllm.common.basemodel.layer_infer.template.residual import Residual, ScaledPreNorm


class MiniCPM(BaseModel):
    def residual(self) -> Residual:
        return ScaledPreNorm(self.config.raw.number("scale_depth") / math.sqrt(self.config.num_hidden_layers))

    def pre_layer(self) -> PreLayerInfer:
        return ScaledPreLayerInfer(self.config.raw.number("scale_emb"))

    def post_layer(self) -> PostLayerInfer:
        c = self.config
        return PostLayerInfer(self.norm(), scale=c.raw.number("dim_model_base") / c.hidden_size)
