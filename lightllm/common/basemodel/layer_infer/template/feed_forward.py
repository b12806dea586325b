"""Axis 5: the feed-forward block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from lightllm.common.basemodel.layer_weights.base_layer_weight import Weight
from lightllm.common.basemodel.model_config import ConfigError
from lightllm.common.basemodel.triton_kernel.silu_and_mul import silu_and_mul


def _gated(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def apply(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return activation(gate) * up

    return apply


_GATED: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu_and_mul,
    "gelu": _gated(F.gelu),
    "gelu_pytorch_tanh": _gated(lambda x: F.gelu(x, approximate="tanh")),
    "relu": _gated(F.relu),
}


class FeedForward(Protocol):
    def __call__(self, x: Tensor, w: dict[str, Weight]) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        ...


@dataclass(frozen=True)
class GatedFeedForward:
    """down(act(gate(x)) * up(x)); gate and up are one product."""

    act: str

    def __post_init__(self) -> None:
        if self.act not in _GATED:
            raise ConfigError(f"config.json: hidden_act {self.act!r} is none of {', '.join(_GATED)}")

    def __call__(self, x: Tensor, w: dict[str, Weight]) -> Tensor:
        return w["down"].apply(_GATED[self.act](w["gate_up"].apply(x)))
