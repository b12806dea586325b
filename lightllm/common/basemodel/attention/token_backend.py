"""TokenAttentionBackend: attention through the token table; Triton on GPUs, the torch twins on CPUs."""

from __future__ import annotations

import torch
from torch import Tensor

from lightllm.common.basemodel.attention.backend import AttentionSpec
from lightllm.common.basemodel.infer_struct import InferStateInfo
from lightllm.common.basemodel.triton_kernel.context_attention import context_attention
from lightllm.common.basemodel.triton_kernel.decode_plan import DecodePlan
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
            queries = q[:n]
            plan = _plan(queries, layer_kv, spec, state) if q.is_cuda else None
            token_attention(queries, layer_kv, state.req_table, rows, kv_lens, spec, sinks, plan, out[:n])
        if state.max_chunk:
            c, table = state.chunks, state.req_table
            chunks = c.rows, c.starts, c.lengths, c.cu_lengths, state.max_chunk
            context_attention(q[c.base :], layer_kv, table, *chunks, spec, sinks, out[c.base :])
        return out


def _plan(q: Tensor, layer_kv: LayerKV, spec: AttentionSpec, state: InferStateInfo) -> DecodePlan:
    """Made by the first layer of each kind, for all of them."""
    kind = (q.shape, layer_kv.shape, spec.window, spec.chunk)
    if kind not in state.decode_plans:
        state.decode_plans[kind] = token_plan(q, layer_kv, *state.decode, spec)
    return state.decode_plans[kind]
