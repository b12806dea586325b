"""Llama 4, its text part: chunked attention with normalised heads in most layers, no positions in the others; experts
that scale their input, beside one that every token takes."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lightllm.common.basemodel.attention.backend import AttentionSpec
from lightllm.common.basemodel.infer_struct import InferStateInfo
from lightllm.common.basemodel.layer_infer.template.moe import MoeFeedForward, TopKRouter
from lightllm.common.basemodel.layer_infer.template.position import Angles, NoRope, Position
from lightllm.common.basemodel.layer_weights.experts import ExpertSlot
from lightllm.common.basemodel.layer_weights.slot import Slot
from lightllm.common.basemodel.triton_kernel.quantized_kv import LayerKV
from lightllm.models.mixture import Mixture
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


class Llama4(TextPart, Mixture):
    paired = True
    ffn_names = ("feed_forward.gate_proj", "feed_forward.up_proj", "feed_forward.down_proj")
    router_name = "feed_forward.router"
    experts_name = "feed_forward.experts"
    fused = {"transposed": True}
    size_word = "intermediate_size"
    shared_name = "feed_forward.shared_expert"
    moe_type = InputScaledMoe

    def is_sparse(self, i: int) -> bool:
        return i in self.config.raw.layers("moe_layers")

    def shared_size(self) -> int:
        return self.expert_size

    def router(self) -> TopKRouter:
        return TopKRouter(self.top_k, "sigmoid")

    def feed_forward_slots(self, i: int) -> Mapping[str, Slot | ExpertSlot]:
        dense = self.config.raw.size("intermediate_size_mlp")
        return self.mixture_slots() if self.is_sparse(i) else self.ffn_slots(self.ffn_names, dense)

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

    def _turned(self, i: int) -> bool:
        raw = self.config.raw
        if not raw.get("no_rope_layers"):  # published configs hold an empty list
            return (i + 1) % raw.size("no_rope_layer_interval") != 0
        return bool(raw.list("no_rope_layers", self.config.num_hidden_layers, (0, 1))[i])
