"""How a mixture of experts chooses: objects that turn the router's logits into k experts and their weights."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from lightllm.common.basemodel.layer_weights.base_layer_weight import Weight
from lightllm.common.basemodel.triton_kernel.select_experts import TopK, select_experts


class Router(Protocol):
    def __call__(self, logits: Tensor, w: dict[str, Weight]) -> tuple[Tensor, Tensor]:
        """logits float32 [T, experts] -> (weights float32 [T, k], ids int32 [T, k])."""


@dataclass(frozen=True)
class TopKRouter(TopK):
    """A slot "router_bias", where there is one, steers the choice but not the weights."""

    def __call__(self, logits: Tensor, w: dict[str, Weight]) -> tuple[Tensor, Tensor]:
        return select_experts(logits, w["router_bias"].weight if "router_bias" in w else None, self)
