"""From the residual stream to logits."""

from dataclasses import dataclass

from torch import Tensor

from lightllm.common.basemodel.layer_infer.template.norm import Norm
from lightllm.common.basemodel.layer_infer.template.residual import Stream
from lightllm.common.basemodel.layer_weights.base_layer_weight import Weights


@dataclass(frozen=True)
class PostLayerInfer:
    """Logits are scale * head(norm(x)), then softcap * tanh(logits / softcap)."""

    norm: Norm
    scale: float = 1.0
    softcap: float | None = None

    def forward(self, stream: Stream, w: Weights) -> Tensor:
        """Stream of [S, hidden] -> logits [S, vocab_size]: float32, or as the head gives them where nothing follows."""
        normed, _ = self.norm.add(*stream, w["final_norm"])
        logits = w["head"].apply(normed)
        if self.scale != 1:
            logits = logits.float() * self.scale
        return logits if self.softcap is None else self.softcap * (logits.float() / self.softcap).tanh()
