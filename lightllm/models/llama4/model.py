"""Llama 4, its text part: chunked attention with normalised heads in most layers, no positions in the others; experts
that scale their input, beside one that every token takes."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lightllm.common.basemodel.attention.backend import AttentionSpec
from lightllm.common.basemodel.infer_struct import InferStateInfo
from lightllm.common.basemodel.layer_infer.template.feed_forward import GATED, FeedForward, GatedFeedForward
from lightllm.common.basemodel.layer_infer.template.moe import MoeFeedForward, SumFeedForward
from lightllm.common.basemodel.layer_infer.template.position import Angles, NoRope, Position
from lightllm.common.basemodel.layer_infer.template.routing import TopKRouter
from lightllm.common.basemodel.layer_weights.experts import ExpertSlot, expert_slots, fused_experts
from lightllm.common.basemodel.layer_weights.slot import Slot, router
from lightllm.common.basemodel.triton_kernel.quantized_kv import LayerKV
from lightllm.models.text_part import TextPart


class NormedHeads:
    """A position whose q and k are normalised, without weights: whether before or after they are turned is the same."""

    def __init__(self, inner: Position, eps: float) -> None:
        self.inner, self.eps, self.angles = inner, eps, inner.angles

    def write(self, q: Tensor, k: Tensor, v: Tensor, angles: Angles, layer_kv: LayerKV, slots: Tensor) -> Tensor:
        q.copy_(F.rms_norm(q, q.shape[-1:], eps=self.eps))
        return self.inner.write(q, F.rms_norm(k, k.shape[-1:], eps=self.eps), v, angles, layer_kv, slots)


@dataclass(frozen=True)
class TunedNoRope(NoRope):
    """No positions, but q grows with the logarithm of its position (arXiv 2501.19399)."""

    floor: float
    scale: float

    def angles(self, state: InferStateInfo) -> Angles:
        growth = torch.log1p(torch.floor((state.positions.float() + 1) / self.floor)) * self.scale + 1
        return growth[:, None, None], growth

    def write(self, q: Tensor, k: Tensor, v: Tensor, angles: Angles, layer_kv: LayerKV, slots: Tensor) -> Tensor:
        assert angles is not None
        return super().write(q.copy_(q * angles[0]), k, v, angles, layer_kv, slots)


class InputScaledMoe(MoeFeedForward):
    """The weights scale what goes into the experts."""

    def scale_inputs(self, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        return (x[:, None] * weights.to(x.dtype)[..., None]).flatten(0, 1), torch.ones_like(weights)


class Llama4(TextPart):
    def attention_slots(self, i: int) -> dict[str, Slot]:
        c, names = self.config, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        return super().attention_slots(i) | {"qkv": self.qkv_slot(*names, bias=c.attention_bias, paired=True)}

    def feed_forward_slots(self, i: int) -> Mapping[str, Slot | ExpertSlot]:
        c, experts = self.config, self.config.raw.size("num_experts")
        size, hidden, name = c.intermediate_size, c.hidden_size, "feed_forward"
        if not self._sparse(i):
            names = f"{name}.gate_proj", f"{name}.up_proj", f"{name}.down_proj"
            return self.gated_slots(*names, c.raw.size("intermediate_size_mlp"))
        shared = (f"{name}.shared_expert.gate_proj", f"{name}.shared_expert.up_proj", f"{name}.shared_expert.down_proj")
        parts = fused_experts(f"{name}.experts", experts, hidden, size, transposed=True)
        return {
            "router": router(f"{name}.router", experts, hidden),
            **expert_slots(self.parallel, experts, hidden, size, parts),
            **self.gated_slots(*shared, size, prefix="shared_"),
        }

    def make_position(self) -> Position:
        raw, rope = self.config.raw, super().make_position()
        tuned = bool(raw.get("attn_temperature_tuning"))  # a number in some configs
        self.no_rope = TunedNoRope(raw.number("floor_scale"), raw.number("attn_scale")) if tuned else NoRope()
        return NormedHeads(rope, self.config.rms_norm_eps) if raw.flag("use_qk_norm") else rope

    def position_of(self, i: int) -> Position:
        return self.position if self._turned(i) else self.no_rope

    def attention_spec(self, i: int) -> AttentionSpec:
        chunk = self.config.raw.size("attention_chunk_size") if self._turned(i) else None
        return AttentionSpec(self.head_dim**-0.5, chunk=chunk)

    def feed_forward(self, i: int) -> FeedForward:
        c = self.config
        if not self._sparse(i):
            return super().feed_forward(i)
        router = TopKRouter(c.raw.size("num_experts_per_tok"), "sigmoid")
        routed = InputScaledMoe(router, GATED[c.hidden_act], self.parallel)
        return SumFeedForward(routed, GatedFeedForward(c.hidden_act, prefix="shared_"))

    def _turned(self, i: int) -> bool:
        raw = self.config.raw
        if not raw.get("no_rope_layers"):  # published configs hold an empty list
            return (i + 1) % raw.size("no_rope_layer_interval") != 0
        return bool(raw.list("no_rope_layers", self.config.num_hidden_layers, (0, 1))[i])

    def _sparse(self, i: int) -> bool:
        return i in self.config.raw.layers("moe_layers")
