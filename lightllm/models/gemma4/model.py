"""Gemma 4, its text part: heads of two sizes, caches that layers share, an input of its own for every layer."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from lightllm.common.basemodel.attention.backend import AttentionSpec
from lightllm.common.basemodel.basemodel import BaseModel
from lightllm.common.basemodel.infer_struct import InferStateInfo
from lightllm.common.basemodel.layer_infer.post_layer_infer import PostLayerInfer
from lightllm.common.basemodel.layer_infer.pre_layer_infer import PreLayerInfer, ScaledPreLayerInfer
from lightllm.common.basemodel.layer_infer.template.attention import AttentionBlock
from lightllm.common.basemodel.layer_infer.template.feed_forward import GATED, FeedForward, GatedFeedForward
from lightllm.common.basemodel.layer_infer.template.moe import MoeFeedForward
from lightllm.common.basemodel.layer_infer.template.norm import Norm, RMSNorm
from lightllm.common.basemodel.layer_infer.template.position import Position, make_rope
from lightllm.common.basemodel.layer_infer.template.residual import Residual, SandwichNorm, Stream
from lightllm.common.basemodel.layer_weights.base_layer_weight import VocabParallelWeight
from lightllm.common.basemodel.layer_weights.experts import ExpertSlot, expert_slots
from lightllm.common.basemodel.layer_weights.slot import (
    Expert,
    Part,
    Slot,
    column,
    router,
    row,
    vector,
    vocabulary,
    whole,
)
from lightllm.common.basemodel.model_config import ModelConfig
from lightllm.common.basemodel.partial_sum import total
from lightllm.common.basemodel.rope_config import read_rope
from lightllm.distributed.parallel_state import ParallelState
from lightllm.models.gemma4.attention import NormedValues, ReusedCache
from lightllm.models.gemma4.experts import DenseAndExperts, LateNorm, ScaledExperts
from lightllm.models.text_part import is_other_modality, text_tensor_name


class Gemma4(BaseModel):
    def __init__(self, config: ModelConfig, parallel: ParallelState, device: torch.device) -> None:
        raw = config.raw
        self.first_shared = config.num_hidden_layers - raw.count("num_kv_shared_layers")
        self.own_input = raw.count("hidden_size_per_layer_input")
        self.moe = raw.flag("enable_moe_block")
        super().__init__(config, parallel, device)

    def tensor_name(self, stored: str) -> str:
        return text_tensor_name(stored)

    def ignores(self, name: str) -> bool:
        return super().ignores(name) or is_other_modality(name)

    def heads_of(self, i: int) -> tuple[int, int]:
        """(KV heads, head_dim) of layer i; layers without a window have others."""
        c, raw = self.config, self.config.raw
        if c.windows[i] is not None:
            return c.num_key_value_heads, c.head_dim
        own = raw.of_layer("per_layer_config", i)
        if own is None:
            kv = raw.get("num_global_key_value_heads") if raw.flag("attention_k_eq_v") else None
            own = {"head_dim": raw.size("global_head_dim"), "num_key_value_heads": kv}
        return own.get("num_key_value_heads") or c.num_key_value_heads, own.get("head_dim") or c.head_dim

    def source_of(self, i: int) -> int:
        """The layer whose cache layer i reads."""
        windows = self.config.windows
        return i if i < self.first_shared else max(j for j in range(self.first_shared) if windows[j] == windows[i])

    def copies_of(self, kv_heads: int) -> int:
        return math.lcm(kv_heads, self.parallel.size) // kv_heads

    def slot_shape(self, i: int) -> tuple[int, ...]:
        kv_heads, head_dim = self.heads_of(i)
        held = self.parallel.share(kv_heads * self.copies_of(kv_heads))
        return (held, 2, head_dim) if i < self.first_shared else (0,)

    def outer_slots(self) -> dict[str, Slot]:
        c, width = self.config, self.own_input * self.num_layers
        if not width:
            return super().outer_slots()
        vocab = c.raw.size("vocab_size_per_layer_input")
        return super().outer_slots() | {
            "embed_per_layer": vocabulary("model.embed_tokens_per_layer", vocab, width),
            "per_layer": whole("model.per_layer_model_projection", width, c.hidden_size),
            "per_layer_norm": vector("model.per_layer_projection_norm", self.own_input),
        }

    def norm_slots(self, i: int) -> dict[str, Slot]:
        hidden = self.config.hidden_size
        names = {"attn_norm": "input", "attn_post_norm": "post_attention", "ffn_norm": "pre_feedforward"}
        names |= {"ffn_post_norm": "post_feedforward"}
        slots = {slot: self.norm_slot(f"{name}_layernorm") for slot, name in names.items()}
        slots["scalar"] = Slot((Part("layer_scalar", 1, leaf=""),), None)
        if self.own_input:
            slots["own_gate"] = whole("per_layer_input_gate", self.own_input, hidden)
            slots["own_up"] = whole("per_layer_projection", hidden, self.own_input)
            slots["own_norm"] = self.norm_slot("post_per_layer_input_norm")
        return slots

    def attention_slots(self, i: int) -> dict[str, Slot]:
        c, (kv_heads, head_dim) = self.config, self.heads_of(i)
        queries, size = c.num_attention_heads * head_dim, kv_heads * head_dim
        parts = [Part("self_attn.q_proj", queries)]
        slots = {"q_norm": vector("self_attn.q_norm", head_dim), "o": row("self_attn.o_proj", c.hidden_size, queries)}
        if i < self.first_shared:
            same = c.raw.flag("attention_k_eq_v") and c.windows[i] is None
            names = "self_attn.k_proj", "self_attn.k_proj" if same else "self_attn.v_proj"
            parts += [Part(name, size, block=head_dim, copies=self.copies_of(kv_heads)) for name in names]
            slots["k_norm"] = vector("self_attn.k_norm", head_dim)
        return slots | {"qkv": column(*parts, inputs=c.hidden_size)}

    def feed_forward_slots(self, i: int) -> Mapping[str, Slot | ExpertSlot]:
        c, raw, hidden = self.config, self.config.raw, self.config.hidden_size
        wide = 2 if raw.flag("use_double_wide_mlp") and i >= self.first_shared else 1
        dense = self.gated_slots("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", c.intermediate_size * wide)
        if not self.moe:
            return dense
        experts, size = raw.size("num_experts"), raw.size("moe_intermediate_size")

        def parts(e: int) -> tuple[Part, Part, Part]:
            gate_up, one = "experts.gate_up_proj", Expert(e, experts)
            gate, up = (Part(gate_up, size, slice(j, j + size), 2 * size, leaf="", expert=one) for j in (0, size))
            return gate, up, Part("experts.down_proj", hidden, leaf="", expert=one)

        return {
            **dense,
            "dense_post_norm": self.norm_slot("post_feedforward_layernorm_1"),
            "experts_norm": self.norm_slot("pre_feedforward_layernorm_2"),
            "experts_post_norm": self.norm_slot("post_feedforward_layernorm_2"),
            "router": router("router.proj", experts, hidden),
            "router_norm": Slot((Part("router.scale", hidden, leaf=""),), None),
            "expert_scale": Slot((Part("router.per_expert_scale", experts, leaf=""),), None),
            **expert_slots(self.parallel, experts, hidden, size, parts),
        }

    def residual(self) -> Residual:
        return LateNorm() if self.moe else SandwichNorm()

    def make_position(self) -> Position:
        c = self.config
        full = next((self.heads_of(i)[1] for i, window in enumerate(c.windows) if window is None), c.head_dim)
        local = read_rope(c.raw, "sliding_attention")
        self.local_position = make_rope(local, c.head_dim, c.max_position_embeddings, self.device)
        return make_rope(c.rope, full, c.max_position_embeddings, self.device)

    def position_of(self, i: int) -> Position:
        return self.position if self.config.windows[i] is None else self.local_position

    def attention(self, i: int, qk_norm: Norm | None = None) -> AttentionBlock:
        kind = NormedValues if i < self.first_shared else ReusedCache
        kv_heads, head_dim = self.heads_of(i)
        held = self.parallel.share(kv_heads * self.copies_of(kv_heads))
        spec = AttentionSpec(1.0, self.config.windows[i])
        return kind(self.source_of(i), self.heads, held, head_dim, self.position_of(i), spec, self.norm())

    def feed_forward(self, i: int) -> FeedForward:
        c, dense = self.config, GatedFeedForward(self.config.hidden_act)
        if not self.moe:
            return dense
        router = ScaledExperts(c.raw.size("top_k_experts"), renormalize=True)
        return DenseAndExperts(self.norm(), dense, MoeFeedForward(router, GATED[c.hidden_act], self.parallel))

    def pre_layer(self) -> PreLayerInfer:
        return ScaledPreLayerInfer(self.config.hidden_size**0.5)

    def post_layer(self) -> PostLayerInfer:
        return PostLayerInfer(self.norm(), softcap=self.config.raw.optional_number("final_logit_softcapping"))

    def stream(self, ids: Tensor, state: InferStateInfo) -> Stream:
        """Behind each layer its own input is added, and the sum is scaled."""
        angles, norm = self.angles(state), RMSNorm(self.config.rms_norm_eps)
        hidden = total(self.pre.forward(ids, self.outer_weights, state)[0])
        inputs = self._own_inputs(ids, hidden) if self.own_input else None
        for i, (layer, w) in enumerate(zip(self.layers, self.layer_weights)):
            branch, rest = layer.forward((hidden, None), w, angles, state)
            hidden = total(branch) if rest is None else rest + total(branch)
            if inputs is not None:
                gated = GATED[self.config.hidden_act](torch.cat((w["own_gate"].apply(hidden), inputs[:, i]), -1))
                hidden = hidden + norm(w["own_up"].apply(gated), w["own_norm"])
            hidden = hidden * w["scalar"].weight
        return hidden, None

    def _own_inputs(self, ids: Tensor, embeddings: Tensor) -> Tensor:
        """[T, layers, own_input]: half from the token itself, half from its embedding."""
        w, norm = self.outer_weights, RMSNorm(self.config.rms_norm_eps)
        table = w["embed_per_layer"]
        assert isinstance(table, VocabParallelWeight)
        projected = w["per_layer"].apply(embeddings) * self.config.hidden_size**-0.5
        projected = norm(projected.unflatten(-1, (self.num_layers, -1)), w["per_layer_norm"])
        looked_up = table.lookup(ids) * embeddings.new_full((), self.own_input**0.5)
        return (projected + looked_up.view(projected.shape)) * 2**-0.5
