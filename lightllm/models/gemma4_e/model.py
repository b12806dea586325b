"""Gemma 4 E2B and E4B: one more input for every layer; the last layers read the cache of an earlier one."""

from dataclasses import replace

import torch
from torch import Tensor

from lightllm.common.basemodel.infer_struct import InferStateInfo
from lightllm.common.basemodel.layer_infer.template.attention import Attention, AttentionBlock
from lightllm.common.basemodel.layer_infer.template.feed_forward import GATED
from lightllm.common.basemodel.layer_infer.template.position import Angles
from lightllm.common.basemodel.layer_infer.template.residual import Attended, SandwichNorm
from lightllm.common.basemodel.layer_weights.base_layer_weight import Weights
from lightllm.common.basemodel.layer_weights.slot import Slot, vocabulary, whole
from lightllm.common.basemodel.normed import Lines
from lightllm.common.basemodel.partial_sum import PartialSum, added, taken, total
from lightllm.common.basemodel.triton_kernel.quantized_kv import asking
from lightllm.common.basemodel.triton_kernel.rotary_emb import rotary_emb
from lightllm.models.gemma4.model import Gemma4


class ReusedCache(Attention):
    """`layer` is the one whose cache is read; its own has nothing to write."""

    def __call__(self, x: Lines, w: Weights, angles: Angles, state: InferStateInfo) -> PartialSum:
        assert self.qk_norm is not None and angles is not None
        q = self.qk_norm(w["qkv"].apply(x).view(len(x), -1, self.head_dim), w["q_norm"])
        rotary_emb(q, q[:, :0], *angles)
        kept = state.kv.layer(self.layer)
        return w["o"].partial(state.backend.attend(asking(q, kept), kept, self.spec, None, state).flatten(1))


class Gemma4E(Gemma4):
    residual_type = SandwichNorm

    @property
    def first_shared(self) -> int:
        return self.config.num_hidden_layers - self.config.raw.count("num_kv_shared_layers", 0)

    @property
    def own_input(self) -> int:
        return self.config.raw.size("hidden_size_per_layer_input")

    def slot_shape(self, i: int) -> tuple[int, ...]:
        return super().slot_shape(i) if i < self.first_shared else (0,)

    def outer_slots(self) -> dict[str, Slot]:
        c, width = self.config, self.own_input * self.num_layers
        vocab = c.raw.size("vocab_size_per_layer_input")
        return super().outer_slots() | {
            "embed_per_layer": vocabulary("model.embed_tokens_per_layer", vocab, width),
            "per_layer": whole("model.per_layer_model_projection", width, c.hidden_size),
            "per_layer_norm": whole("model.per_layer_projection_norm", self.own_input),
        }

    def norm_slots(self, i: int) -> dict[str, Slot]:
        return super().norm_slots(i) | {
            "own_gate": whole("per_layer_input_gate", self.own_input, self.config.hidden_size),
            "own_up": whole("per_layer_projection", self.config.hidden_size, self.own_input),
            "own_norm": self.norm_slot("post_per_layer_input_norm"),
        }

    def attention_slots(self, i: int) -> dict[str, Slot]:
        slots = super().attention_slots(i)
        if i >= self.first_shared:
            slots["qkv"] = replace(slots["qkv"], parts=slots["qkv"].parts[:1])
            del slots["k_norm"]
        return slots

    def feed_forward_slots(self, i: int) -> dict[str, Slot]:
        wide = 2 if self.config.raw.flag("use_double_wide_mlp") and i >= self.first_shared else 1
        return self.ffn_slots(self.ffn_names, self.config.intermediate_size * wide)

    def attention(self, i: int) -> AttentionBlock:
        own, windows = super().attention(i), self.config.windows
        if i < self.first_shared:
            return own
        source = max(j for j in range(self.first_shared) if windows[j] == windows[i])
        return ReusedCache(**vars(own) | {"layer": source})

    def attended(self, ids: Tensor, state: InferStateInfo) -> Attended:
        """Behind each layer its own input is added, and the sum is scaled; the last one is computed to its end."""
        angles, norm, act = self.angles(state), self.norm(), GATED[self.config.hidden_act]
        hidden = total(self.pre.forward(ids, self.outer_weights, state)[0])
        own_inputs = self._own_inputs(ids, hidden).unbind(1)
        for layer, w, own in zip(self.layers, self.layer_weights, own_inputs):
            hidden = added(*layer.forward((hidden, None), w, angles, state))
            gated = act(torch.cat((w["own_gate"].apply(hidden), own), -1))
            hidden = (hidden + norm(w["own_up"].apply(gated), w["own_norm"])) * w["scalar"].weight
        return Attended(taken(hidden))

    def logits(self, attended: Attended, index: Tensor | None) -> Tensor:
        chosen = attended if index is None else attended.index_select(index)
        return self.post.forward((chosen.answer, None), self.outer_weights)

    def _own_inputs(self, ids: Tensor, embeddings: Tensor) -> Tensor:
        """[T, layers, own_input]: half from the token itself, half from its embedding."""
        w = self.outer_weights
        projected = w["per_layer"].apply(embeddings) * self.config.hidden_size**-0.5
        projected = self.norm()(projected.unflatten(-1, (self.num_layers, -1)), w["per_layer_norm"])
        looked_up = w["embed_per_layer"].lookup(ids) * embeddings.new_full((), self.own_input**0.5)
        return (projected + looked_up.view(projected.shape)) * 2**-0.5
