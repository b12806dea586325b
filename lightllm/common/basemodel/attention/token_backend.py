"""TokenAttentionBackend: attention through the token table; Triton on GPUs, the torch twins on CPUs."""

from __future__ import annotations

import torch
from torch import Tensor

from lightllm.common.basemodel.attention.backend import AttentionSpec
from lightllm.common.basemodel.infer_struct import InferStateInfo
from lightllm.common.basemodel.triton_kernel.context_attention import context_attention
from lightllm.common.basemodel.triton_kernel.token_attention import token_attention, token_plan


class TokenAttentionBackend:
    def attend(
        self, q: Tensor, layer_kv: Tensor, spec: AttentionSpec, sinks: Tensor | None, state: InferStateInfo
    ) -> Tensor:
        n = state.num_decode
        if n == len(q):
            return self._decode(q, layer_kv, spec, sinks, state)
        if n == 0:
            return self._chunks(q, layer_kv, spec, sinks, state)
        parts = self._decode(q[:n], layer_kv, spec, sinks, state), self._chunks(q[n:], layer_kv, spec, sinks, state)
        return torch.cat(parts)

    def _decode(
        self, q: Tensor, layer_kv: Tensor, spec: AttentionSpec, sinks: Tensor | None, state: InferStateInfo
    ) -> Tensor:
        rows, kv_lens = state.decode
        kind = (q.shape, layer_kv.shape, spec.window, spec.chunk)
        plan = state.decode_plan(kind, lambda: token_plan(q, layer_kv, *state.decode, spec)) if q.is_cuda else None
        return token_attention(q, layer_kv, state.req_table, rows, kv_lens, spec, sinks, plan)

    def _chunks(
        self, q: Tensor, layer_kv: Tensor, spec: AttentionSpec, sinks: Tensor | None, state: InferStateInfo
    ) -> Tensor:
        c = state.chunks
        return context_attention(
            *(q, layer_kv, state.req_table, c.rows, c.starts, c.lengths, c.cu_lengths, state.max_chunk, spec, sinks)
        )
