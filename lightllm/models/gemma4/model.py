"""Gemma 4, its text part: heads of two sizes, caches that layers share, and one more input for every layer."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from lightllm.common.basemodel.attention.backend import AttentionSpec
from lightllm.common.basemodel.infer_struct import InferStateInfo
from lightllm.common.basemodel.layer_infer.template.attention import AttentionBlock
from lightllm.common.basemodel.layer_infer.template.feed_forward import GATED, FeedForward
from lightllm.common.basemodel.layer_infer.template.norm import Norm, RMSNorm
from lightllm.common.basemodel.layer_infer.template.position import Position, make_rope
from lightllm.common.basemodel.layer_infer.template.residual import Residual, Stream
from lightllm.common.basemodel.layer_weights.base_layer_weight import VocabParallelWeight
from lightllm.common.basemodel.layer_weights.experts import ExpertSlot
from lightllm.common.basemodel.layer_weights.slot import Part, Slot, column, row, vector, vocabulary, whole
from lightllm.common.basemodel.model_config import ModelConfig
from lightllm.common.basemodel.partial_sum import total
from lightllm.common.basemodel.rope_config import read_rope
from lightllm.distributed.parallel_state import ParallelState
from lightllm.models.gemma3.model import Gemma3
from lightllm.models.gemma4.attention import NormedValues, ReusedCache
from lightllm.models.gemma4.experts import LateNorm, dense_and_experts, expert_side_slots


class Gemma4(Gemma3):
    def __init__(self, config: ModelConfig, parallel: ParallelState, device: torch.device) -> None:
        self.first_shared = config.num_hidden_layers - config.raw.count("num_kv_shared_layers")
        self.moe = config.raw.flag("enable_moe_block")
        self.own_input = config.raw.count("hidden_size_per_layer_input")
        super().__init__(config, parallel, device)

    def heads_of(self, i: int) -> tuple[int, int, int]:
        """(KV heads, copies of each, head_dim) of layer i; layers without a window have others."""
        c, raw = self.config, self.config.raw
        own = raw.of_layer("per_layer_config", i)
        if own is None and c.windows[i] is None:
            kv_heads = raw.get("num_global_key_value_heads") if raw.flag("attention_k_eq_v") else None
            own = {"head_dim": raw.size("global_head_dim"), "num_key_value_heads": kv_heads}
        kv_heads = (own or {}).get("num_key_value_heads") or c.num_key_value_heads
        copies = math.lcm(kv_heads, self.parallel.size) // kv_heads
        return kv_heads, copies, (own or {}).get("head_dim") or c.head_dim

    def slot_shape(self, i: int) -> tuple[int, ...]:
        kv_heads, copies, head_dim = self.heads_of(i)
        return (self.parallel.share(kv_heads * copies), 2, head_dim) if i < self.first_shared else (0,)

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
        slots = super().norm_slots(i) | {"scalar": Slot((Part("layer_scalar", 1, leaf=""),), None)}
        if not self.own_input:
            return slots
        return slots | {
            "own_gate": whole("per_layer_input_gate", self.own_input, self.config.hidden_size),
            "own_up": whole("per_layer_projection", self.config.hidden_size, self.own_input),
            "own_norm": self.norm_slot("post_per_layer_input_norm"),
        }

    def attention_slots(self, i: int) -> dict[str, Slot]:
        c, (kv_heads, copies, head_dim) = self.config, self.heads_of(i)
        queries = c.num_attention_heads * head_dim
        parts = [Part("self_attn.q_proj", queries)]
        slots = {"q_norm": vector("self_attn.q_norm", head_dim), "o": row("self_attn.o_proj", c.hidden_size, queries)}
        if i < self.first_shared:
            same = c.raw.flag("attention_k_eq_v") and c.windows[i] is None
            names = "self_attn.k_proj", "self_attn.k_proj" if same else "self_attn.v_proj"
            parts += [Part(name, kv_heads * head_dim, block=head_dim, copies=copies) for name in names]
            slots["k_norm"] = vector("self_attn.k_norm", head_dim)
        return slots | {"qkv": column(*parts, inputs=c.hidden_size)}

    def feed_forward_slots(self, i: int) -> Mapping[str, Slot | ExpertSlot]:
        wide = 2 if self.config.raw.flag("use_double_wide_mlp") and i >= self.first_shared else 1
        names = "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"
        slots = self.gated_slots(*names, self.config.intermediate_size * wide)
        return {**slots, **expert_side_slots(self)} if self.moe else slots

    def norm(self) -> Norm:
        return RMSNorm(self.config.rms_norm_eps)

    def residual(self) -> Residual:
        return LateNorm() if self.moe else super().residual()

    def make_position(self) -> Position:
        c = self.config
        full = next((self.heads_of(i)[2] for i, window in enumerate(c.windows) if window is None), c.head_dim)
        local = read_rope(c.raw, "sliding_attention")
        self.local_position = make_rope(local, c.head_dim, c.max_position_embeddings, self.device)
        return make_rope(c.rope, full, c.max_position_embeddings, self.device)

    def attention(self, i: int, qk_norm: Norm | None = None) -> AttentionBlock:
        windows, (kv_heads, copies, head_dim) = self.config.windows, self.heads_of(i)
        axes = head_dim, self.position_of(i), AttentionSpec(1.0, windows[i]), self.norm()
        held = self.parallel.share(kv_heads * copies)
        if i < self.first_shared:
            return NormedValues(i, self.heads, held, *axes)
        source = max(j for j in range(self.first_shared) if windows[j] == windows[i])
        return ReusedCache(source, self.heads, held, *axes)

    def feed_forward(self, i: int) -> FeedForward:
        return dense_and_experts(self) if self.moe else super().feed_forward(i)

    def stream(self, ids: Tensor, state: InferStateInfo) -> Stream:
        """Behind each layer its own input is added, and the sum is scaled."""
        angles, norm, act = self.angles(state), self.norm(), GATED[self.config.hidden_act]
        hidden = total(self.pre.forward(ids, self.outer_weights, state)[0])
        inputs = self._own_inputs(ids, hidden) if self.own_input else None
        for i, (layer, w) in enumerate(zip(self.layers, self.layer_weights)):
            branch, rest = layer.forward((hidden, None), w, angles, state)
            hidden = total(branch) if rest is None else rest + total(branch)
            if inputs is not None:
                gated = act(torch.cat((w["own_gate"].apply(hidden), inputs[:, i]), -1))
                hidden = hidden + norm(w["own_up"].apply(gated), w["own_norm"])
            hidden = hidden * w["scalar"].weight
        return hidden, None

    def _own_inputs(self, ids: Tensor, embeddings: Tensor) -> Tensor:
        """[T, layers, own_input]: half from the token itself, half from its embedding."""
        w, table = self.outer_weights, self.outer_weights["embed_per_layer"]
        assert isinstance(table, VocabParallelWeight)
        projected = w["per_layer"].apply(embeddings) * self.config.hidden_size**-0.5
        projected = self.norm()(projected.unflatten(-1, (self.num_layers, -1)), w["per_layer_norm"])
        looked_up = table.lookup(ids) * embeddings.new_full((), self.own_input**0.5)
        return (projected + looked_up.view(projected.shape)) * 2**-0.5
