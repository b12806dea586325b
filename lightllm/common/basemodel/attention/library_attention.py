"""Attention of long chunks by cuDNN: faster than our kernel from some length on, which is measured at start."""

from functools import partial

import torch
from torch import Tensor

from lightllm.common.basemodel.attention.backend import AttentionSpec
from lightllm.common.basemodel.infer_struct import Chunks
from lightllm.common.basemodel.triton_kernel.context_attention import context_attention
from lightllm.common.basemodel.triton_kernel.quantized_kv import LayerKV, read_slots
from lightllm.common.triton_utils.timing import milliseconds

LENGTHS = (1024, 2048, 4096, 8192)  # prompts that are timed
REPEATS = 3


def library_attention(
    q: Tensor, layer_kv: LayerKV, slots: Tensor, scale: float, first_slot: int | None = None
) -> Tensor:
    """Causal attention of one chunk, q [L, H, hd] in 16 bits, the last L positions of a row whose slots int [N] are in
    order -> [L, H, hd]. first_slot: of the chunk, where its slots are neighbours.

    The library's causal mask begins at the first key, so that keys before the chunk are attended to apart, and the two
    answers are joined by their log-sum-exp.
    """
    queries, before = q.transpose(0, 1)[None], len(slots) - len(q)
    if first_slot is None or not isinstance(layer_kv, Tensor):
        kv = read_slots(layer_kv, slots[before:], q.dtype)
    else:
        kv = layer_kv[first_slot : first_slot + len(q)]
    own, own_lse = _attend(queries, kv, True, scale)
    if before:
        old, old_lse = _attend(queries, read_slots(layer_kv, slots[:before], q.dtype), False, scale)
        own = torch.lerp(old.float(), own.float(), torch.sigmoid(own_lse - old_lse)).to(q.dtype)
    return own[0].transpose(0, 1)


def _attend(q: Tensor, kv: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """q [1, H, L, hd] over kv [N, KH, 2, hd] -> (answers [1, H, L, hd], log-sum-exp [1, H, L, 1])."""
    k, v = kv.permute(2, 1, 0, 3).unsqueeze(1)
    op = torch.ops.aten._scaled_dot_product_cudnn_attention
    answer, lse, *_ = op(q, k, v, None, True, 0.0, causal, False, scale=scale)
    return answer, lse.view(*answer.shape[:3], 1)


def can_attend(q: Tensor, spec: AttentionSpec, sinks: Tensor | None, kv_len: int) -> bool:
    """Whether the library knows such attention."""
    plain = spec.softcap is None and spec.slopes is None and sinks is None
    small = q.element_size() == 2 and q.shape[2] <= 128 and q.shape[2] % 8 == 0
    return q.is_cuda and plain and small and (spec.reach is None or spec.reach >= kv_len)


@torch.inference_mode()
def measure_crossover(heads: int, head_dim: int, layer_kv: LayerKV, dtype: torch.dtype) -> int | None:
    """From which length on chunks of these shapes are faster by the library; None if they never are, or without it.
    layer_kv is a layer of the cache whose content does not matter."""
    device = layer_kv.device
    spec = AttentionSpec(head_dim**-0.5)
    if not can_attend(torch.empty(1, heads, head_dim, dtype=dtype, device=device), spec, None, 1):
        return None
    faster = None
    for length in reversed(LENGTHS):
        q = torch.randn(length, heads, head_dim, dtype=dtype, device=device)
        slots = torch.zeros(length, dtype=torch.int32, device=device)
        row, lengths, ends = (torch.tensor(v, dtype=torch.int32, device=device) for v in ([0], [length], [0, length]))
        ours = partial(context_attention, q, layer_kv, slots[None], Chunks(row, row, lengths, ends, length), spec)
        try:
            theirs = milliseconds(partial(library_attention, q, layer_kv, slots, spec.scale), REPEATS)
        except RuntimeError:
            return None
        if theirs > milliseconds(ours, REPEATS):
            break
        faster = length
    return faster
