"""Axis 4: multi-head latent attention (MLA, arXiv 2405.04434). A token's cache row is one vector for all heads."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lightllm.common.basemodel.attention.backend import AttentionSpec
from lightllm.common.basemodel.infer_struct import InferStateInfo
from lightllm.common.basemodel.layer_infer.template.norm import RMSNorm
from lightllm.common.basemodel.layer_infer.template.position import Angles, Position
from lightllm.common.basemodel.layer_weights.base_layer_weight import Weights
from lightllm.common.basemodel.normed import Lines
from lightllm.common.basemodel.partial_sum import PartialSum
from lightllm.common.basemodel.triton_kernel.latent_attention import latent_attention, latent_plan
from lightllm.common.basemodel.triton_kernel.latent_context_attention import latent_context_attention
from lightllm.common.basemodel.triton_kernel.write_latents import write_latents

PIECE = 1 << 27  # numbers of decompressed keys and values that a prompt's attention holds at a time


@dataclass(frozen=True)
class LatentAttention:
    """A cache row is [rope + rank]: the turned part of the key, shared by all heads, and the normalised latent.

    Slots: q_kv_a (q, or where it is compressed q_a, and behind it kv_a), q_a_norm and q_b (where it is), kv_a_norm,
    kv_b, o. Turned features come first in each head of q and in kv_a. Prompts are decompressed to K and V; decode takes
    kv_b's key half into the query and its value half into the answer, so that it reads nothing but latents. In steps of
    a fixed size every token does, for what is decompressed depends on how long the prompts are.
    """

    layer: int
    heads: int
    nope: int
    rope: int
    value: int
    position: Position
    spec: AttentionSpec
    norm: RMSNorm

    def __call__(self, x: Lines, w: Weights, angles: Angles, state: InferStateInfo) -> PartialSum:
        """x [T, hidden] -> [T, hidden]."""
        assert angles is not None
        latents = state.kv.layer(self.layer)
        assert isinstance(latents, Tensor)
        joined = w["q_kv_a"].apply(x)
        q, row = joined.split((joined.shape[1] - latents.shape[1], latents.shape[1]), 1)
        if "q_b" in w:
            q = w["q_b"].apply(self.norm(q, w["q_a_norm"]))
        q = q.unflatten(1, (self.heads, -1))
        write_latents(q, row, w["kv_a_norm"].weight, self.norm.eps, *angles, latents, state.slots)
        up = w["kv_b"].weight.view(self.heads, self.nope + self.value, -1)
        answer = q.new_empty(len(x), self.heads, self.value)
        n = len(state.lone_tokens[0])
        if n:
            self._absorbed(q[:n], latents, up, state, answer[:n])
        if n < len(x):
            self._chunks(q[n:], latents, up, state, answer[n:])
        return w["o"].partial(answer.flatten(1))

    def _absorbed(self, q: Tensor, latents: Tensor, up: Tensor, state: InferStateInfo, answer: Tensor) -> None:
        """q [n, heads, rope + nope] of the state's lone tokens -> answer [n, heads, value]."""
        turned, rest = q.split((self.rope, self.nope), -1)
        absorbed = torch.bmm(rest.transpose(0, 1), up[:, : self.nope]).transpose(0, 1)
        rows, kv_lens = state.lone_tokens
        kind = ("latent", absorbed.shape)
        plan = state.decode_plan(kind, lambda: latent_plan(absorbed, rows, kv_lens)) if q.is_cuda else None
        found = latent_attention(turned, absorbed, latents, state.req_table, rows, kv_lens, self.spec.scale, plan)
        torch.bmm(found.transpose(0, 1), up[:, self.nope :].transpose(1, 2), out=answer.transpose(0, 1))

    def _chunks(self, q: Tensor, latents: Tensor, up: Tensor, state: InferStateInfo, answer: Tensor) -> None:
        """q [T, heads, rope + nope] -> answer [T, heads, value], over decompressed keys and values of the chunks' rows:
        of as many heads at a time as PIECE allows, so that a long prompt needs no more memory for having many heads."""
        context = state.chunk_context
        turned, compressed = latents.index_select(0, context.slots).split((self.rope, up.shape[2]), -1)
        at_a_time = max(1, PIECE // (len(turned) * up.shape[1]))
        for first in range(0, self.heads, at_a_time):
            heads = slice(first, first + at_a_time)
            kv = F.linear(compressed, up[heads].flatten(0, 1)).unflatten(1, (-1, up.shape[1]))
            answer[:, heads] = latent_context_attention(
                q[:, heads], turned, kv, state.chunks, context.cu_lengths, self.spec.scale
            )
