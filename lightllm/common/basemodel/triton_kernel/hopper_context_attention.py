"""Attention of chunks on Hopper, for plain caches in 16 bits: what context_attention does, written in Gluon.

A program has warps of three kinds (as FlashAttention-3, arXiv 2407.08608). Four gather keys and values by their slots
into rings in shared memory; two groups of four attend 64 lines each, so that one group's exponentials run beside the
other's products, and within a group the values of a block are weighed while the scores of the next are exponentiated.
Lines are the query heads of a KV head, token by token, so that short chunks fill tiles and read their keys once.
"""

from __future__ import annotations

import functools
import math

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from lightllm.common.basemodel.attention.backend import AttentionSpec
from lightllm.common.basemodel.triton_kernel.quantized_kv import LayerKV
from lightllm.common.triton_utils.dependent_launch import neighbour_launch, wait_for_inputs

HEAD_DIMS = (128,)
BLOCK_N, STAGES, TURNS, GROUPS, QREG = 128, 2, True, 2, False
load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared  # Triton 3.9, 3.6
load_lines = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
LINES = gl.constexpr(64)  # of a group of four warps
HIDDEN = gl.constexpr(-1.2676506002282294e30)  # the score of a masked key, see context_attention


def suits_hopper(q: torch.Tensor, layer_kv: LayerKV, spec: AttentionSpec, sinks: torch.Tensor | None) -> bool:
    """Whether this GPU has the kernel and the kernel has such attention."""
    plain = isinstance(layer_kv, torch.Tensor) and spec.softcap is None and spec.slopes is None and sinks is None
    return plain and q.element_size() == 2 and q.shape[2] in HEAD_DIMS and spec.chunk is None and _is_hopper(q.device)


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) == (9, 0)


@gluon.jit
def _ring(count: gl.constexpr, rows: gl.constexpr, columns: gl.constexpr, dtype: gl.constexpr, readers: gl.constexpr):
    """(tiles in shared memory, the barriers that tell they are there, those that tell they are free)."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([rows, columns], dtype)
    tiles = gl.allocate_shared_memory(dtype, [count, rows, columns], layout)
    there = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(count):
        mbarrier.init(there.index(i), count=1)
        mbarrier.init(free.index(i), count=readers)
    return tiles, there, free


@gluon.jit
def _put(ring, i, KV, slots, slot_stride, Tiles, first_slot, column, neighbours):
    """The i-th tile on its way into the ring, when the one in its place is read: `column`... of slots' numbers."""
    tiles, there, free = ring
    COUNT: gl.constexpr = tiles.shape[0]
    HD: gl.constexpr = tiles.shape[2]
    mbarrier.wait(free.index(i % COUNT), (i // COUNT & 1) ^ 1)
    if neighbours:
        mbarrier.expect(there.index(i % COUNT), 2 * tiles.shape[1] * HD)
        load_tile(Tiles, [first_slot, column], there.index(i % COUNT), tiles.index(i % COUNT))
    else:
        layout: gl.constexpr = slots.type.layout.parent
        d = column + gl.arange(0, HD, gl.SliceLayout(0, layout))
        load_lines(tiles.index(i % COUNT), KV + slots.to(gl.int64)[:, None] * slot_stride + d[None, :])
    async_copy.commit_group()


@gluon.jit
def _announce(ring, i, gathered, put_since: gl.constexpr):
    """That the i-th tile is there, if it was gathered; the copy engine tells by itself."""
    there = ring[1]
    COUNT: gl.constexpr = there.shape[0]
    async_copy.wait_group(put_since)
    fence_async_shared()
    mbarrier.arrive(there.index((i + COUNT) % COUNT), pred=gathered)


@gluon.jit
def _await(ring, i):
    """Waits for the i-th tile."""
    there = ring[1]
    COUNT: gl.constexpr = there.shape[0]
    mbarrier.wait(there.index(i % COUNT), i // COUNT & 1)


@gluon.jit
def _tile(ring, i):
    return ring[0].index(i % ring[0].shape[0])


@gluon.jit
def _release(ring, i):
    tiles, _, free = ring
    mbarrier.arrive(free.index(i % tiles.shape[0]))


@gluon.jit
def _gather(KV, Tiles, Table, keys, values, column, last, blocks, slot_stride):
    """Blocks of keys and of values into the rings, the last block first; before key 0 comes key 0 again. Those of
    neighbouring slots, the copy engine fetches."""
    BLOCK_N: gl.constexpr = keys[0].shape[1]
    HD: gl.constexpr = keys[0].shape[2]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HD, HD // 8], [gl.num_warps(), 1], [1, 0])
    n = gl.arange(0, BLOCK_N, gl.SliceLayout(1, layout))
    begin = last + 1 - BLOCK_N
    slots = gl.load(Table + gl.maximum(begin + n, 0))
    first_slot = gl.load(Table + gl.maximum(begin, 0))
    gathered = False
    for i in range(blocks):
        neighbours = gl.max(gl.where(slots == first_slot + n, 0, 1), 0) == 0
        _put(keys, i, KV, slots, slot_stride, Tiles, first_slot, column, neighbours)
        _announce(values, i - 1, gathered, 1)
        gathered = neighbours == 0
        _put(values, i, KV, slots, slot_stride, Tiles, first_slot, column + HD, neighbours)
        _announce(keys, i, gathered, 1)
        begin -= BLOCK_N
        slots = gl.load(Table + gl.maximum(begin + n, 0))
        first_slot = gl.load(Table + gl.maximum(begin, 0))
    _announce(values, blocks - 1, gathered, 0)


@gluon.jit
def _attend_block(
    i, q, keys, values, turns, peak, total, acc, weights, position, last, scale,
    PART: gl.constexpr, WINDOW: gl.constexpr, MASK: gl.constexpr, FIRST: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """One step of online softmax (base 2) over block i, while the values of the block before it are weighed."""
    BLOCK_N: gl.constexpr = keys[0].shape[1]
    HD: gl.constexpr = keys[0].shape[2]
    of_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    of_answer: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HD, 16])
    if TURNS:
        mbarrier.wait(turns.index(PART), (i + 1 - PART) & 1)
    _await(keys, i)
    score = gl.zeros([LINES, BLOCK_N], gl.float32, of_scores)
    score = warpgroup_mma(q, _tile(keys, i).permute((1, 0)), score, use_acc=False, is_async=True)
    if not FIRST:
        acc = warpgroup_mma(weights, _tile(values, i - 1), acc, is_async=True)
    if TURNS:
        mbarrier.arrive(turns.index(1 - PART))
    score = warpgroup_mma_wait(0 if FIRST else 1, deps=[score])
    _release(keys, i)
    if MASK:
        j = last + 1 - (i + 1) * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, of_scores))
        oldest = gl.maximum(position - WINDOW + 1, 0) if WINDOW > 0 else position * 0
        seen = (j[None, :] <= position[:, None]) & (j[None, :] >= oldest[:, None])
        score = gl.where(seen, score, HIDDEN)
    new_peak = gl.maximum(peak, gl.max(score, 1) * scale)
    p = gl.exp2(score * scale - new_peak[:, None])
    shrink = gl.exp2(peak - new_peak)
    total = total * shrink + gl.sum(p, 1)
    new_weights = gl.convert_layout(p.to(q.dtype), gl.DotOperandLayout(0, of_answer, 2))
    _await(values, i)  # here, so that no compiler puts off what is above until the values before are weighed
    if not FIRST:
        acc, weights = warpgroup_mma_wait(0, deps=[acc, weights])
        _release(values, i - 1)
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, of_answer))[:, None]
    return new_peak, total, acc, new_weights


@gluon.jit
def _attend(
    Q, Out, q_lines, keys, values, turns, block, scale, q_stride,
    PART: gl.constexpr, H: gl.constexpr, PACK: gl.constexpr, WINDOW: gl.constexpr, TURNS: gl.constexpr,
    QREG: gl.constexpr,
):  # fmt: skip
    """Lines PART * LINES... of the program: `full` of their blocks but the first are seen by all of them."""
    head, token, first, length, begin, last, blocks, full = block
    BLOCK_N: gl.constexpr = keys[0].shape[1]
    HD: gl.constexpr = keys[0].shape[2]
    of_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    of_answer: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HD, 16])
    of_lines: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HD, HD // 8], [4, 1], [1, 0])
    if blocks > 0:
        m = PART * LINES + gl.arange(0, LINES, gl.SliceLayout(1, of_lines))
        d = gl.arange(0, HD, gl.SliceLayout(0, of_lines))
        t = first + m // PACK
        at = (token + t).to(gl.int64) * q_stride + (head + m % PACK) * HD
        q = gl.load(Q + at[:, None] + d[None, :], mask=(t < length)[:, None], other=0.0)
        if QREG:
            q = gl.convert_layout(q, gl.DotOperandLayout(0, of_scores, 2))
        else:
            tile = q_lines.slice(PART * LINES, LINES)
            tile.store(q)
            fence_async_shared()
            q = tile
        position = begin + first + (PART * LINES + gl.arange(0, LINES, gl.SliceLayout(1, of_scores))) // PACK
        total = gl.zeros([LINES], gl.float32, gl.SliceLayout(1, of_scores))
        peak = total - 1.0e30
        acc = gl.zeros([LINES, HD], gl.float32, of_answer)
        peak, total, acc, weights = _attend_block(
            0, q, keys, values, turns, peak, total, acc, peak, position, last, scale,
            PART, WINDOW, True, True, TURNS,
        )  # fmt: skip
        for i in range(1, full):
            peak, total, acc, weights = _attend_block(
                i, q, keys, values, turns, peak, total, acc, weights, position, last, scale,
                PART, WINDOW, False, False, TURNS,
            )  # fmt: skip
        for i in range(gl.maximum(full, 1), blocks):
            peak, total, acc, weights = _attend_block(
                i, q, keys, values, turns, peak, total, acc, weights, position, last, scale,
                PART, WINDOW, True, False, TURNS,
            )  # fmt: skip
        acc = warpgroup_mma(weights, _tile(values, blocks - 1), acc)
        acc = acc / gl.convert_layout(total, gl.SliceLayout(1, of_answer))[:, None]
        m = PART * LINES + gl.arange(0, LINES, gl.SliceLayout(1, of_answer))
        d = gl.arange(0, HD, gl.SliceLayout(0, of_answer))
        t = first + m // PACK
        to = (token + t).to(gl.int64) * (H * HD) + (head + m % PACK) * HD
        gl.store(Out + to[:, None] + d[None, :], acc.to(Out.dtype.element_ty), mask=(t < length)[:, None])


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit(do_not_specialize=["Rows", "Starts", "Lengths", "CuLengths", "rows"])
def _hopper_context_attention_kernel(
    Q, KV, Tiles, Table, Rows, Starts, Lengths, CuLengths, Out, rows, q_stride, slot_stride, table_stride, scale,
    H: gl.constexpr, GROUP: gl.constexpr, PACK: gl.constexpr, HD: gl.constexpr, WINDOW: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr, TURNS: gl.constexpr,
    QREG: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Program (PACK query heads; block of a row's tokens), in the order of context_attention's."""
    wait_for_inputs(PDL)
    TOKENS: gl.constexpr = GROUPS * LINES // PACK
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    lines: gl.constexpr = gl.NVMMASharedLayout.get_default_for([GROUPS * LINES, HD], Q.dtype.element_ty)
    row, end, before = 0, 0x7FFFFFFF, 0
    for start in range(0, rows, 128):  # the first row whose blocks end behind this program's
        i = start + gl.arange(0, 128, flat)
        of_row = (gl.load(Lengths + i, mask=i < rows, other=0) + TOKENS - 1) // TOKENS
        ends = before + gl.associative_scan(of_row, 0, _add)
        later = (ends > gl.program_id(1)) & (i < rows)
        row += gl.sum(((i < rows) & (later == 0)).to(gl.int32), 0)
        end = gl.minimum(end, gl.min(gl.where(later, ends, 0x7FFFFFFF), 0))
        before += gl.sum(of_row, 0)
    token, first, length, begin, last, blocks, full = 0, 0, 0, 0, 0, 0, 0
    if row < rows:
        length = gl.load(Lengths + row)
        token = gl.load(CuLengths + row)
        begin = gl.load(Starts + row)
        Table += gl.load(Rows + row).to(gl.int64) * table_stride
        first = (end - 1 - gl.program_id(1)) * TOKENS
        last = begin + gl.minimum(first + TOKENS, length) - 1
        oldest, hidden = 0, 0
        if WINDOW > 0:
            oldest = gl.maximum(begin + first - WINDOW + 1, 0)
            hidden = gl.maximum(last - WINDOW + 1, 0)
        blocks = (last + BLOCK_N - oldest) // BLOCK_N
        full = (last + 1 - hidden) // BLOCK_N
    head = gl.program_id(0) * PACK

    q_lines = gl.allocate_shared_memory(Q.dtype.element_ty, [GROUPS * LINES, HD], lines)
    keys = _ring(STAGES, BLOCK_N, HD, Q.dtype.element_ty, GROUPS)
    values = _ring(STAGES, BLOCK_N, HD, Q.dtype.element_ty, GROUPS)
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(turns.index(i), count=1)
    fence_async_shared()
    block = (head, token, first, length, begin, last, blocks, full)
    column = head // GROUP * 2 * HD
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (
                    _attend,
                    (Q, Out, q_lines, keys, values, turns, block, scale, q_stride, 0, H, PACK, WINDOW, TURNS, QREG),
                ),
                (
                    _attend,
                    (Q, Out, q_lines, keys, values, turns, block, scale, q_stride, 1, H, PACK, WINDOW, TURNS, QREG),
                ),
                (_gather, (KV, Tiles, Table, keys, values, column, last, blocks, slot_stride)),
            ],
            [4, 4],
            [216, 80],
        )
    else:
        gl.warp_specialize(
            [
                (
                    _attend,
                    (Q, Out, q_lines, keys, values, turns, block, scale, q_stride, 0, H, PACK, WINDOW, False, QREG),
                ),
                (_gather, (KV, Tiles, Table, keys, values, column, last, blocks, slot_stride)),
            ],
            [4],
            [56],
        )


def hopper_context_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    req_table: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    cu_lengths: torch.Tensor,
    spec: AttentionSpec,
    out: torch.Tensor,
) -> torch.Tensor:
    """Launches what context_attention describes; what suits_hopper."""
    heads, head_dim = q.shape[1:]
    group = heads // kv.shape[1]
    pack = math.gcd(group, 16)
    layout = gl.NVMMASharedLayout.get_default_for(
        [BLOCK_N, head_dim], gl.bfloat16 if q.dtype == torch.bfloat16 else gl.float16
    )
    tiles = TensorDescriptor.from_tensor(kv.flatten(1), [BLOCK_N, head_dim], layout)
    _hopper_context_attention_kernel[(heads // pack, len(q) * pack // (GROUPS * LINES.value) + len(rows))](
        *(q, kv, tiles, req_table, rows, starts, lengths, cu_lengths, out, len(rows)),
        *(q.stride(0), kv.stride(0), req_table.stride(0), spec.scale * math.log2(math.e)),
        H=heads,
        GROUP=group,
        PACK=pack,
        HD=head_dim,
        WINDOW=spec.window or 0,
        BLOCK_N=BLOCK_N,
        STAGES=STAGES,
        GROUPS=GROUPS,
        TURNS=TURNS,
        QREG=QREG,
        num_warps=4,
        **neighbour_launch(q),
        **({"maxnreg": 128} if GROUPS == 1 else {}),
    )
    return out
