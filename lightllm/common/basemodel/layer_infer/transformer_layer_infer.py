"""One decoder layer: five choices and nothing else."""

from dataclasses import dataclass

from lightllm.common.basemodel.infer_struct import InferStateInfo
from lightllm.common.basemodel.layer_infer.template.attention import AttentionBlock
from lightllm.common.basemodel.layer_infer.template.feed_forward import FeedForward
from lightllm.common.basemodel.layer_infer.template.norm import Norm
from lightllm.common.basemodel.layer_infer.template.position import Angles, Position
from lightllm.common.basemodel.layer_infer.template.residual import Attended, Residual, Stream
from lightllm.common.basemodel.layer_weights.base_layer_weight import Weights


@dataclass(frozen=True)
class TransformerLayerInfer:
    norm: Norm
    residual: Residual
    attention: AttentionBlock
    feed_forward: FeedForward

    def forward(self, stream: Stream, w: Weights, angles: dict[Position, Angles], state: InferStateInfo) -> Stream:
        return self.feed(self.attend(stream, w, angles, state), w)

    def attend(self, stream: Stream, w: Weights, angles: dict[Position, Angles], state: InferStateInfo) -> Attended:
        """The layer up to its attention; K and V are in the cache then."""
        own_angles = angles[self.attention.position]
        return self.residual.attend(stream, w, self.norm, lambda x: self.attention(x, w, own_angles, state))

    def feed(self, attended: Attended, w: Weights) -> Stream:
        """The rest of it, of all lines or of chosen ones."""
        return self.residual.feed(attended, w, self.norm, lambda x: self.feed_forward(x, w))
