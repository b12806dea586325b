"""The kernels that write and read KV in 8 bits against their torch twins: on a GPU, or interpreted."""

import dataclasses
from unittest import mock

import pytest
import torch
from kernel.test_kernels import DEVICE, DTYPES, INTERPRETED, SHAPES, check, ints, on_cpu, randn
from support.kernel_cases import attention_specs, paged, quantized, quantized_pool

from lightllm.common.basemodel.attention.backend import AttentionSpec
from lightllm.common.basemodel.infer_struct import Chunks
from lightllm.common.basemodel.triton_kernel import token_attention as kernel_module
from lightllm.common.basemodel.triton_kernel.context_attention import context_attention
from lightllm.common.basemodel.triton_kernel.destindex_copy_kv import destindex_copy_kv
from lightllm.common.basemodel.triton_kernel.quantized_kv import QuantizedKV, read_slots
from lightllm.common.basemodel.triton_kernel.rotary_spread_kv import rotary_spread_kv
from lightllm.common.basemodel.triton_kernel.token_attention import token_attention, token_sizes

KINDS = [torch.uint8, torch.float8_e4m3fn]
TOLERANCE = {torch.float32: 2e-3, torch.float16: 4e-3, torch.bfloat16: 2e-2}  # q and weights are float16


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def host(arguments: tuple) -> list:
    return [quantized(x, "cpu") if isinstance(x, QuantizedKV) else y for x, y in zip(arguments, on_cpu(arguments))]


def check_written(ours: QuantizedKV, expected: QuantizedKV, slots: list[int], dtype: torch.dtype) -> None:
    """Numbers are at most one step apart: where rounding is a tie, float32 arithmetic decides."""
    index = torch.tensor(slots)
    got, want = (read_slots(quantized(pool, "cpu"), index, torch.float32) for pool in (ours, expected))
    largest = want.abs().amax(-1, keepdim=True)
    step = largest / 127 if ours.values.dtype == torch.uint8 else want.abs() / 8 + largest * 2**-16
    assert ((got - want).abs() <= 1.02 * step + 1e-6).all()
    assert (got != want).float().mean() < (0.02 if dtype == torch.float32 else 0.002)
    untouched = torch.ones(len(ours.values), dtype=torch.bool)
    untouched[index] = False
    assert (ours.values.view(torch.uint8).cpu()[untouched] == 0x55).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 64), (1, 96), (10, 80), (1, 16)])
def test_writes(kind: torch.dtype, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    slots, (kv_heads, head_dim) = [7, 0, 11, 3, 8], shape
    fused = randn(5, 2 * kv_heads, head_dim, dtype=dtype)
    k, v = fused[:, :kv_heads], fused[:, kv_heads:]
    k[0] *= 1e-7  # smaller than any scale
    v[1] *= 300
    pools = [quantized_pool(12, kv_heads, head_dim, kind, DEVICE) for _ in range(2)]
    destindex_copy_kv.launcher(k, v, pools[0], ints(slots))
    destindex_copy_kv.twin(k, v, pools[1], ints(slots))
    check_written(*pools, slots, dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "turned"), [(7, 3, 64, 64), (4, 1, 128, 128), (4, 2, 96, 96), (4, 2, 64, 16)]
)
@pytest.mark.parametrize("tokens", [1, 11])
def test_writes_turned_and_spread(
    kind: torch.dtype, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, turned: int, tokens: int
) -> None:
    """q, k and v are slices of one product; heads of 96 features, and such of which a part is turned, take the way in
    several kernels."""
    angle = randn(tokens, turned // 2, dtype=torch.float32)
    fused = randn(tokens, heads + 2 * kv_heads, head_dim, dtype=dtype)
    slots = [(5 * i + 2) % 23 for i in range(tokens)]
    pools, asked = [], []
    for run in (rotary_spread_kv.launcher, rotary_spread_kv.twin):
        q, k, v = fused.clone().split((heads, kv_heads, kv_heads), 1)
        pools.append(quantized_pool(23, kv_heads, head_dim, kind, DEVICE))
        asked.append(run(q, k, v, angle.cos(), angle.sin(), pools[-1], ints(slots)))
    check(asked[0], asked[1].cpu())
    check_written(*pools, slots, dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads, kv_heads, head_dim, window", SHAPES[::3] if INTERPRETED else SHAPES)
def test_attention(
    kind: torch.dtype, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, window: int | None
) -> None:
    starts, lengths = [0, 70, 5, 100, 0], [1, 1, 19, 70, 7]
    kv_lens = [s + n for s, n in zip(starts, lengths)]
    pool = paged(kv_lens, kv_heads, head_dim, dtype, DEVICE)
    kv = quantized(pool.layer_kv, DEVICE, kind)
    at = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    q = randn(sum(lengths), 2 * heads, head_dim, dtype=dtype)[:, :heads]
    spec = AttentionSpec(head_dim**-0.5, window)
    arguments = (q, kv, pool.req_table, Chunks(pool.rows, ints(starts), ints(lengths), ints(at), max(lengths)), spec)
    check(context_attention.launcher(*arguments), context_attention.twin(*host(arguments)), TOLERANCE[dtype])
    arguments = (q[:5], kv, pool.req_table, pool.rows, pool.kv_lens, spec)
    check(token_attention.launcher(*arguments), token_attention.twin(*host(arguments)), TOLERANCE[dtype])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("feature", attention_specs(1, 1.0))
def test_attention_features(kind: torch.dtype, feature: str) -> None:
    heads, head_dim, dtype = 6, 64, torch.bfloat16
    spec, sinks = attention_specs(heads, head_dim**-0.5, DEVICE)[feature]
    on_host = dataclasses.replace(spec, slopes=spec.slopes.cpu() if spec.slopes is not None else None)
    starts, lengths = [0, 70, 5, 100], [1, 1, 50, 33]
    kv_lens = [s + n for s, n in zip(starts, lengths)]
    pool = paged(kv_lens, 2, head_dim, dtype, DEVICE)
    kv = quantized(pool.layer_kv, DEVICE, kind)
    at = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    q = randn(sum(lengths), heads, head_dim, dtype=dtype)
    table = (kv, pool.req_table, pool.rows)
    arguments = (q, *table[:2], Chunks(pool.rows, ints(starts), ints(lengths), ints(at), max(lengths)))
    expected = context_attention.twin(*host((*arguments, on_host, sinks)))
    check(context_attention.launcher(*arguments, spec, sinks), expected, TOLERANCE[dtype])
    arguments = (q[:4], *table, pool.kv_lens)
    expected = token_attention.twin(*host((*arguments, on_host, sinks)))
    check(token_attention.launcher(*arguments, spec, sinks), expected, TOLERANCE[dtype])


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_row_with_its_items_joined(kind: torch.dtype) -> None:
    pool = paged([1500, 2], 1, 128, torch.bfloat16, DEVICE)
    kv = quantized(pool.layer_kv, DEVICE, kind)
    q = randn(2, 4, 128, dtype=torch.bfloat16)
    arguments = (q, kv, pool.req_table, pool.rows, pool.kv_lens, AttentionSpec(0.1))
    check(token_attention.launcher(*arguments), token_attention.twin(*host(arguments)), TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_many_rows_have_tiles_of_their_own(kind: torch.dtype, head_dim: int) -> None:
    kv_lens = [1 + 37 * i % 150 for i in range(132)]
    pool = paged(kv_lens, 1, head_dim, torch.bfloat16, DEVICE)
    kv = quantized(pool.layer_kv, DEVICE, kind)
    q = randn(len(kv_lens), 4, head_dim, dtype=torch.bfloat16)
    arguments = (q, kv, pool.req_table, pool.rows, pool.kv_lens, AttentionSpec(0.1))
    with mock.patch.multiple(kernel_module, MANY_PROGRAMS=132, token_sizes=token_sizes.__wrapped__):
        ours = token_attention.launcher(*arguments)
    check(ours, token_attention.twin(*host(arguments)), TOLERANCE[torch.bfloat16])
