"""From token ids to the residual stream."""

from dataclasses import dataclass

from torch import Tensor

from lightllm.common.basemodel.infer_struct import InferStateInfo
from lightllm.common.basemodel.layer_infer.template.residual import Stream
from lightllm.common.basemodel.layer_weights.base_layer_weight import Weights


class PreLayerInfer:
    def forward(self, ids: Tensor, w: Weights, state: InferStateInfo) -> Stream:
        """ids int64 [T] -> stream of [T, hidden], nothing in its residual yet."""
        return w["embed"].lookup(ids), None


@dataclass(frozen=True)
class ScaledPreLayerInfer(PreLayerInfer):
    """Embeddings times a factor, rounded to their dtype first as transformers does."""

    scale: float

    def forward(self, ids: Tensor, w: Weights, state: InferStateInfo) -> Stream:
        embeddings = w["embed"].lookup(ids)
        return embeddings * embeddings.new_full((), self.scale), None
