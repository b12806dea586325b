"""Axis 5: the feed-forward block."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from lightllm.common.basemodel.layer_weights.base_layer_weight import Weights
from lightllm.common.basemodel.normed import Lines
from lightllm.common.basemodel.partial_sum import PartialSum
from lightllm.common.basemodel.triton_kernel.silu_and_mul import silu_and_mul

Activation = Callable[[Tensor], Tensor]


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


_PLAIN: dict[str, Activation] = {  # by their names in config.json, as in ACTIVATIONS
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": _gelu_tanh,
    "gelu_new": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "relu": F.relu,
}


def _gated(activation: Activation) -> Activation:
    def apply(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return activation(gate) * up

    return apply


GATED = {name: _gated(activation) for name, activation in _PLAIN.items()} | {"silu": silu_and_mul}


class FeedForward(Protocol):
    def __call__(self, x: Lines, w: Weights) -> PartialSum:
        """x [T, hidden] -> [T, hidden]."""


@dataclass(frozen=True)
class GatedFeedForward:
    """down(act(gate(x)) * up(x)); gate and up are one product. `prefix` is that of its slots' names."""

    act: str
    prefix: str = ""

    def __call__(self, x: Lines, w: Weights) -> PartialSum:
        gate_up, down = w[f"{self.prefix}gate_up"], w[f"{self.prefix}down"]
        hidden = gate_up.apply(x, gated=True) if self.act == "silu" else GATED[self.act](gate_up.apply(x))
        return down.partial(hidden)


@dataclass(frozen=True)
class PlainFeedForward:
    """down(act(up(x)))."""

    act: str

    def __call__(self, x: Lines, w: Weights) -> PartialSum:
        return w["down"].partial(_PLAIN[self.act](w["up"].apply(x)))
