"""TokenAttentionBackend: attention through the token table; Triton on GPUs, the torch twins on CPUs."""

import torch
from torch import Tensor

from lightllm.common.basemodel.attention.backend import AttentionSpec, NewKeys
from lightllm.common.basemodel.attention.library_attention import can_attend, library_attention
from lightllm.common.basemodel.infer_struct import InferStateInfo
from lightllm.common.basemodel.triton_kernel.context_attention import context_attention
from lightllm.common.basemodel.triton_kernel.quantized_kv import LayerKV, QuantizedKV, unspread
from lightllm.common.basemodel.triton_kernel.token_attention import token_attention, token_plan


class TokenAttentionBackend:
    def __init__(self, library_from: int | None = None) -> None:
        """library_from: where all chunks of a step have so many tokens, cuDNN computes them; None: never."""
        self._library_from = library_from

    def attend(
        self,
        q: Tensor,
        layer_kv: LayerKV,
        spec: AttentionSpec,
        sinks: Tensor | None,
        state: InferStateInfo,
        new: NewKeys | None = None,
    ) -> Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        n, table = state.num_decode, state.req_table
        queries, (rows, kv_lens) = q[:n], state.decode
        plan = None
        if n and q.is_cuda:
            kind = n, *q.shape[1:], layer_kv.shape, spec.window, spec.chunk
            plan = state.decode_plan(kind, lambda: token_plan(queries, layer_kv, rows, kv_lens, spec))
        by_library = self._suits_library(q, spec, sinks, state)
        if by_library:
            for chunk in state.host_chunks:
                tokens, kv_len = slice(chunk.first, chunk.first + chunk.length), chunk.start + chunk.length
                slots = table[chunk.row, :kv_len]
                answer = library_attention(q[tokens], layer_kv, slots, spec.scale, chunk.first_slot)
                if len(answer) == len(q):  # the chunk is all of the step
                    out = answer.contiguous()
                else:
                    out[tokens] = answer
        elif state.max_chunk:
            base = state.chunk_base
            context_attention(q[base:], layer_kv, table, state.chunks, spec, sinks, out[base:])
        if n:
            beside = state.max_chunk > 0 and not by_library
            token_attention(queries, layer_kv, table, rows, kv_lens, spec, sinks, plan, out[:n], beside, new)
        return unspread(out) if isinstance(layer_kv, QuantizedKV) else out

    def _suits_library(self, q: Tensor, spec: AttentionSpec, sinks: Tensor | None, state: InferStateInfo) -> bool:
        if self._library_from is None or not state.host_chunks:
            return False
        longest = max(chunk.start + chunk.length for chunk in state.host_chunks)
        long_enough = all(chunk.length >= self._library_from for chunk in state.host_chunks)
        return long_enough and can_attend(q, spec, sinks, longest)
