"""TokenAttentionBackend: attention through the token table; Triton on GPUs, the torch twins on CPUs."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from lightllm.common.basemodel.attention.backend import AttentionSpec
from lightllm.common.basemodel.infer_struct import InferStateInfo
from lightllm.common.basemodel.triton_kernel.context_attention import context_attention
from lightllm.common.basemodel.triton_kernel.quantized_kv import LayerKV
from lightllm.common.basemodel.triton_kernel.token_attention import token_attention, token_plan


class TokenAttentionBackend:
    def attend(
        self, q: Tensor, layer_kv: LayerKV, spec: AttentionSpec, sinks: Tensor | None, state: InferStateInfo
    ) -> Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        n = state.num_decode
        if n:
            rows, kv_lens = state.decode
            queries, kind = q[:n], (n, *q.shape[1:], layer_kv.shape, spec.window, spec.chunk)
            make = functools.partial(token_plan, queries, layer_kv, rows, kv_lens, spec)
            plan = state.decode_plan(kind, make) if q.is_cuda else None
            token_attention(queries, layer_kv, state.req_table, rows, kv_lens, spec, sinks, plan, out[:n])
        if state.max_chunk:
            c, table = state.chunks, state.req_table
            chunks = c.rows, c.starts, c.lengths, c.cu_lengths, state.max_chunk
            context_attention(q[c.base :], layer_kv, table, *chunks, spec, sinks, out[c.base :])
        return out
