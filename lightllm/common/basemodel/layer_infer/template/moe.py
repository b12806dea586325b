"""Axis 5, mixtures of experts: routed experts, and what is added to them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightllm.common.basemodel.layer_infer.template.feed_forward import GATED, Activation, GatedFeedForward
from lightllm.common.basemodel.layer_weights.base_layer_weight import Weights
from lightllm.common.basemodel.layer_weights.experts import ExpertsWeight
from lightllm.common.basemodel.normed import Lines, tensor_of
from lightllm.common.basemodel.partial_sum import PartialSum
from lightllm.common.basemodel.triton_kernel.grouped_gemm import Routing
from lightllm.common.basemodel.triton_kernel.router_logits import router_logits
from lightllm.common.basemodel.triton_kernel.select_experts import TopK, select_experts
from lightllm.distributed.parallel_state import ParallelState


@dataclass(frozen=True)
class TopKRouter(TopK):
    """A slot "router_bias", where there is one, steers the choice but not the weights."""

    def __call__(self, logits: Tensor, w: Weights) -> tuple[Tensor, Tensor]:
        """logits float32 [T, experts] -> (weights float32 [T, k], ids int32 [T, k])."""
        return select_experts(logits, w["router_bias"].weight if "router_bias" in w else None, self)


@dataclass(frozen=True)
class MoeFeedForward:
    """Each token's k experts, weighted and summed. Slots: router, experts_gate_up, experts_down.

    The router computes in float32. Ranks hold a part of every expert or some experts whole.
    `activation` takes the product with gate_up, [lines, 2 * size], to [lines, size]; silu is part of that product.
    """

    router: TopKRouter
    activation: Activation
    parallel: ParallelState

    def __call__(self, x: Lines, w: Weights) -> PartialSum:
        x = tensor_of(x)
        return self.apply(x, *self.route(x, w), w)

    def route(self, x: Tensor, w: Weights) -> tuple[Tensor, Tensor]:
        """(weights float32 [T, k], ids int32 [T, k])."""
        return self.router(router_logits(x, w["router"].weight, w["router"].bias), w)

    def apply(self, x: Tensor, weights: Tensor, ids: Tensor, w: Weights, addend: Tensor | None = None) -> PartialSum:
        """Of experts chosen already; `addend` [T, hidden] is this rank's part of another sum, added to theirs."""
        gate_up, down = w["experts_gate_up"], w["experts_down"]
        assert isinstance(gate_up, ExpertsWeight) and isinstance(down, ExpertsWeight)
        routing = Routing(ids, gate_up.first, len(gate_up.weight))
        x, weights = self.scale_inputs(x, weights)
        if self.activation is GATED["silu"]:
            hidden = gate_up.apply_routed(x, routing, gated=True)
        else:
            hidden = self.activation(gate_up.apply_routed(x, routing))
        if self.parallel.ep_moe:
            held = (ids >= routing.first) & (ids < routing.first + routing.experts)
            weights = torch.where(held, weights, 0.0)
        return PartialSum(down.sum_routed(hidden, routing, weights, addend), self.parallel)

    def scale_inputs(self, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """What goes into the experts, [T, hidden] or, with a line for each choice, [T * k, hidden]; and the weights of
        what comes out of them."""
        return x, weights


@dataclass(frozen=True)
class SumFeedForward:
    """Routed experts and a feed-forward that every token takes."""

    routed: MoeFeedForward
    shared: GatedFeedForward

    def __call__(self, x: Lines, w: Weights) -> PartialSum:
        x = tensor_of(x)
        choice = self.routed.route(x, w)
        return self.routed.apply(x, *choice, w, self.shared(x, w).addend)
