"""The weights of experts: stacked, each rank holding a part of every expert or some experts whole."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from lightllm.common.basemodel.config_reader import ConfigError
from lightllm.common.basemodel.layer_weights.base_layer_weight import Weight
from lightllm.common.basemodel.layer_weights.slot import Expert, Part, Shard, Slot, column
from lightllm.common.basemodel.triton_kernel.grouped_gemm import Routing, grouped_gemm
from lightllm.common.basemodel.triton_kernel.weighted_sum import routed_sum
from lightllm.distributed.parallel_state import ParallelState

ExpertParts = Callable[[int], tuple[Part, Part, Part]]
"""Of expert number e the parts of gate, up and down."""


@dataclass(frozen=True)
class ExpertSlot:
    """One weight of every expert, of equal shapes. With expert parallelism a rank holds `held` of them, else all."""

    slots: tuple[Slot, ...]
    held: range


class ExpertsWeight(Weight):
    """weight [held experts, outputs, inputs], bias [held experts, outputs]; `first` is the first expert held."""

    def __init__(self, weight: Tensor, bias: Tensor | None, first: int) -> None:
        super().__init__(weight, bias)
        self.first = first

    def apply_routed(self, x: Tensor, routing: Routing, gated: bool = False) -> Tensor:
        """x [T, inputs] or [T * k, inputs] -> [T * k, outputs], a line for each choice of each token."""
        return grouped_gemm(x, self.weight, self.bias, routing, gated)

    def sum_routed(self, x: Tensor, routing: Routing, weights: Tensor, addend: Tensor | None) -> Tensor:
        """The lines of `apply_routed` weighted with weights float32 [T, k] and summed, with addend: [T, outputs].
        Choices of experts that are not held must have weight 0."""
        return routed_sum(x, self.weight, self.bias, routing, weights, addend)


def named_experts(prefix: str, projections: tuple[str, str, str], hidden: int, size: int) -> ExpertParts:
    """Experts that have tensors of their own, called prefix.e.projection."""

    def parts(e: int) -> tuple[Part, Part, Part]:
        gate, up, down = (f"{prefix}.{e}.{projection}" for projection in projections)
        return Part(gate, size), Part(up, size), Part(down, hidden)

    return parts


def fused_experts(
    prefix: str, experts: int, hidden: int, size: int, transposed: bool = False, alternating: bool = False
) -> ExpertParts:
    """Experts that lie in one tensor of all, gate and up in the same: gate first, or `alternating` with up."""
    halves = (slice(0, 2 * size, 2), slice(1, 2 * size, 2)) if alternating else (slice(0, size), slice(size, 2 * size))

    def parts(e: int) -> tuple[Part, Part, Part]:
        one, name = Expert(e, experts, transposed), f"{prefix}.gate_up_proj"
        gate, up = (Part(name, size, half, 2 * size, leaf="", expert=one) for half in halves)
        return gate, up, Part(f"{prefix}.down_proj", hidden, leaf="", expert=one)

    return parts


def expert_slots(
    parallel: ParallelState, experts: int, hidden: int, size: int, parts: ExpertParts, bias: bool = False
) -> dict[str, ExpertSlot]:
    """Slots of experts of a feed-forward `size`. Raises ConfigError if the ranks cannot share them evenly."""
    name, value = ("num_experts", experts) if parallel.ep_moe else ("moe_intermediate_size", size)
    if value % parallel.size:
        raise ConfigError(f"--tp {parallel.size} does not divide {name} {value} of this model")
    gate_up, down = [], []
    for gate, up, out in map(parts, range(experts)):
        gate_up.append(column(gate, up, inputs=hidden, bias=bias))
        down.append(Slot((out,), size, Shard.ROW, bias))
    if not parallel.ep_moe:
        held = range(experts)
    else:
        share = parallel.share(experts)
        held = range(parallel.rank * share, (parallel.rank + 1) * share)
        gate_up, down = ([replace(slot, shard=Shard.NONE) for slot in slots] for slots in (gate_up, down))
    return {"experts_gate_up": ExpertSlot(tuple(gate_up), held), "experts_down": ExpertSlot(tuple(down), held)}
