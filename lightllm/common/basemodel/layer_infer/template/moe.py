"""Axis 5, mixtures of experts: routed experts, and what is added to them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lightllm.common.basemodel.layer_infer.template.feed_forward import Activation, GatedFeedForward
from lightllm.common.basemodel.layer_infer.template.routing import Router
from lightllm.common.basemodel.layer_weights.base_layer_weight import Weight
from lightllm.common.basemodel.layer_weights.experts import ExpertsWeight
from lightllm.common.basemodel.partial_sum import PartialSum
from lightllm.common.basemodel.triton_kernel.grouped_gemm import Routing
from lightllm.distributed.parallel_state import ParallelState


@dataclass(frozen=True)
class MoeFeedForward:
    """Each token's k experts, weighted and summed. Slots: router, experts_gate_up, experts_down.

    The router computes in float32. Ranks hold a part of every expert or some experts whole.
    `activation` takes the product with gate_up, [lines, 2 * size], to [lines, size].
    """

    router: Router
    activation: Activation
    parallel: ParallelState

    def __call__(self, x: Tensor, w: dict[str, Weight]) -> PartialSum:
        return self.apply(x, *self.route(x, w), w)

    def route(self, x: Tensor, w: dict[str, Weight]) -> tuple[Tensor, Tensor]:
        """(weights float32 [T, k], ids int64 [T, k])."""
        return self.router(w["router"].apply(x.float()), w)

    def apply(self, x: Tensor, weights: Tensor, ids: Tensor, w: dict[str, Weight]) -> PartialSum:
        """Of experts chosen already."""
        return PartialSum(self.experts(x, ids, weights, w), self.parallel)

    def experts(self, x: Tensor, ids: Tensor, weights: Tensor, w: dict[str, Weight]) -> Tensor:
        """This rank's share of the experts' sum, [T, hidden]."""
        return (self.lines(x, ids, w).view(*ids.shape, -1) * weights.to(x.dtype)[..., None]).sum(1)

    def lines(self, x: Tensor, ids: Tensor, w: dict[str, Weight]) -> Tensor:
        """What each chosen expert makes of x [T, hidden] or, with a line for each choice, [T * k, hidden]: [T * k,
        hidden]; zeros from experts of other ranks."""
        gate_up, down = w["experts_gate_up"], w["experts_down"]
        assert isinstance(gate_up, ExpertsWeight) and isinstance(down, ExpertsWeight)
        routing = Routing(ids - gate_up.first, len(gate_up.weight))
        return down.apply_routed(self.activation(gate_up.apply_routed(x, routing)), routing)


@dataclass(frozen=True)
class SumFeedForward:
    """Routed experts and a feed-forward that every token takes."""

    routed: MoeFeedForward
    shared: GatedFeedForward

    def __call__(self, x: Tensor, w: dict[str, Weight]) -> PartialSum:
        return self.routed(x, w) + self.shared(x, w)
