"""One decoder layer: five choices and nothing else."""

from dataclasses import dataclass

from lightllm.common.basemodel.infer_struct import InferStateInfo
from lightllm.common.basemodel.layer_infer.template.attention import AttentionBlock
from lightllm.common.basemodel.layer_infer.template.feed_forward import FeedForward
from lightllm.common.basemodel.layer_infer.template.norm import Norm
from lightllm.common.basemodel.layer_infer.template.position import Angles, Position
from lightllm.common.basemodel.layer_infer.template.residual import Residual, Stream
from lightllm.common.basemodel.layer_weights.base_layer_weight import Weight


@dataclass(frozen=True)
class TransformerLayerInfer:
    norm: Norm
    residual: Residual
    attention: AttentionBlock
    feed_forward: FeedForward

    def forward(
        self, stream: Stream, w: dict[str, Weight], angles: dict[Position, Angles], state: InferStateInfo
    ) -> Stream:
        return self.residual(
            stream,
            w,
            self.norm,
            lambda x: self.attention(x, w, angles[self.attention.position], state),
            lambda x: self.feed_forward(x, w),
        )
