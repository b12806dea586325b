"""Axis 4: multi-head latent attention (MLA, arXiv 2405.04434). A token's cache row is one vector for all heads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lightllm.common.basemodel.attention.backend import AttentionSpec
from lightllm.common.basemodel.infer_struct import InferStateInfo
from lightllm.common.basemodel.layer_infer.template.norm import Norm
from lightllm.common.basemodel.layer_infer.template.position import Angles, Position
from lightllm.common.basemodel.layer_weights.base_layer_weight import Weight
from lightllm.common.basemodel.partial_sum import PartialSum
from lightllm.common.basemodel.triton_kernel.context_attention import context_attention
from lightllm.common.basemodel.triton_kernel.latent_attention import latent_attention
from lightllm.common.basemodel.triton_kernel.rotary_emb import rotary_emb


@dataclass(frozen=True)
class LatentAttention:
    """A cache row is [rope + rank]: the turned part of the key, shared by all heads, and the normalised latent.

    Slots: q_a and q_a_norm (absent where q is not compressed), q_b, kv_a, kv_a_norm, kv_b, o. Turned features come
    first in each head of q and in kv_a. Prompts are decompressed to K and V; decode takes kv_b's key half into the
    query and its value half into the answer, so that it reads nothing but latents.
    """

    layer: int
    heads: int
    nope: int
    rope: int
    value: int
    position: Position
    spec: AttentionSpec
    norm: Norm

    def __call__(self, x: Tensor, w: dict[str, Weight], angles: Angles, state: InferStateInfo) -> PartialSum:
        """x [T, hidden] -> [T, hidden]."""
        assert angles is not None
        compressed = self.norm(w["q_a"].apply(x), w["q_a_norm"]) if "q_a" in w else x
        q = w["q_b"].apply(compressed).view(len(x), self.heads, -1)
        row = w["kv_a"].apply(x)
        rotary_emb(q, row[:, None], *angles)
        row[:, self.rope :] = self.norm(row[:, self.rope :], w["kv_a_norm"])
        latents = state.kv.layer(self.layer)
        assert isinstance(latents, Tensor)
        latents.index_copy_(0, state.slots.long(), row)
        n = state.num_decode
        parts = [self._decode(q[:n], latents, w["kv_b"], state)] if n else []
        if n < len(x):
            parts.append(self._chunks(q[n:], latents, w["kv_b"], state))
        return w["o"].partial((parts[0] if len(parts) == 1 else torch.cat(parts)).flatten(1))

    def _decode(self, q: Tensor, latents: Tensor, kv_b: Weight, state: InferStateInfo) -> Tensor:
        """[n, heads, rope + nope] -> [n, heads, value]."""
        up = kv_b.weight.view(self.heads, self.nope + self.value, -1)
        absorbed = torch.bmm(q[..., self.rope :].transpose(0, 1), up[:, : self.nope]).transpose(0, 1)
        query = torch.cat((q[..., : self.rope], absorbed), -1)
        rows, kv_lens = state.decode
        answer = latent_attention(
            query, latents, state.req_table, rows, kv_lens, state.max_kv, self.rope, self.spec.scale
        )
        return torch.bmm(answer.transpose(0, 1), up[:, self.nope :].transpose(1, 2)).transpose(0, 1)

    def _chunks(self, q: Tensor, latents: Tensor, kv_b: Weight, state: InferStateInfo) -> Tensor:
        """[T, heads, rope + nope] -> [T, heads, value]: K and V of the chunks' rows, V padded to K's width."""
        context, c = state.chunk_context, state.chunks
        rows = latents.index_select(0, context.slots)
        decompressed = kv_b.apply(rows[:, self.rope :]).view(len(rows), self.heads, -1)
        keys, values = decompressed.split((self.nope, self.value), -1)
        turned = rows[:, None, : self.rope].expand(-1, self.heads, -1)
        padded = F.pad(values, (0, self.rope + self.nope - self.value))
        kv = torch.stack((torch.cat((turned, keys), -1), padded), 2)
        answer = context_attention(
            *(q, kv, context.table, context.rows, c.starts, c.lengths, c.cu_lengths, state.max_chunk, self.spec)
        )
        return answer[..., : self.value]
