"""From token ids to the residual stream."""

from __future__ import annotations

from torch import Tensor

from lightllm.common.basemodel.layer_infer.template.residual import Stream
from lightllm.common.basemodel.layer_weights.base_layer_weight import VocabParallelWeight


class PreLayerInfer:
    def forward(self, ids: Tensor, embed: VocabParallelWeight) -> Stream:
        """ids int64 [T] -> stream of [T, hidden], nothing in its residual yet."""
        return embed.lookup(ids), None
