"""Every Triton kernel against its torch twin: compiled on a GPU, or under the interpreter (see test_interpreter.py)."""

import dataclasses
import os

import pytest
import torch
from support.kernel_cases import attention_specs, paged

from lightllm.common.basemodel.attention.backend import AttentionSpec, NewKeys
from lightllm.common.basemodel.infer_struct import Chunks
from lightllm.common.basemodel.triton_kernel.all_reduce import add_received_rmsnorm
from lightllm.common.basemodel.triton_kernel.apply_penalty import apply_penalty
from lightllm.common.basemodel.triton_kernel.context_attention import context_attention
from lightllm.common.basemodel.triton_kernel.decode_plan import PlanSize, plan_decode
from lightllm.common.basemodel.triton_kernel.destindex_copy_kv import destindex_copy_kv
from lightllm.common.basemodel.triton_kernel.gather_rows import gather_rows
from lightllm.common.basemodel.triton_kernel.group_lines import group_lines
from lightllm.common.basemodel.triton_kernel.grouped_gemm import Routing, grouped_gemm
from lightllm.common.basemodel.triton_kernel.host_memory import deliver, fetch
from lightllm.common.basemodel.triton_kernel.latent_attention import latent_attention, latent_plan
from lightllm.common.basemodel.triton_kernel.latent_context_attention import latent_context_attention
from lightllm.common.basemodel.triton_kernel.prepare_decode import prepare_decode
from lightllm.common.basemodel.triton_kernel.rmsnorm import add_rmsnorm, rmsnorm
from lightllm.common.basemodel.triton_kernel.rotary_emb import rotary_copy_kv, rotary_emb
from lightllm.common.basemodel.triton_kernel.router_logits import router_logits
from lightllm.common.basemodel.triton_kernel.sampling import sample
from lightllm.common.basemodel.triton_kernel.select_experts import TopK, select_experts
from lightllm.common.basemodel.triton_kernel.silu_and_mul import silu_and_mul
from lightllm.common.basemodel.triton_kernel.skinny_linear import (
    CANDIDATES,
    MOST_LINES,
    SkinnyConfig,
    add_skinny_linear,
    skinny_linear,
)
from lightllm.common.basemodel.triton_kernel.token_attention import token_attention, token_plan
from lightllm.common.basemodel.triton_kernel.weighted_sum import routed_sum, weighted_sum
from lightllm.common.basemodel.triton_kernel.write_latents import write_latents

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    from support.triton_interpreter_bf16 import install

    install()
elif not torch.cuda.is_available():
    pytest.skip("needs a GPU; on a CPU test_interpreter.py runs this file interpreted", allow_module_level=True)

DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float32, torch.bfloat16] if INTERPRETED else [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape).to(DEVICE, dtype)


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def check(ours: torch.Tensor, expected: torch.Tensor, tolerance: float | None = None) -> None:
    assert ours.dtype == expected.dtype and ours.device.type == DEVICE
    tolerance = tolerance or TOLERANCE[expected.dtype]
    torch.testing.assert_close(ours.cpu().float(), expected.cpu().float(), rtol=tolerance, atol=tolerance)


def on_cpu(arguments: tuple) -> list:
    """The same on the host, also within named tuples."""
    moved = {torch.Tensor: lambda x: x.cpu().clone()} | {
        kind: lambda x: type(x)(*on_cpu(x)) for kind in (Chunks, NewKeys)
    }
    return [moved.get(type(x), lambda x: x)(x) for x in arguments]


def in_float(arguments: tuple) -> list:
    return [x.float() if isinstance(x, torch.Tensor) else x for x in on_cpu(arguments)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 576), (5, 64), (37, 48), (3, 2048)])
@pytest.mark.parametrize("minus_one", [False, True])
def test_rmsnorm(dtype: torch.dtype, shape: tuple[int, int], minus_one: bool) -> None:
    fused = randn(shape[0], 2 * shape[1], dtype=dtype)
    x, weight, residual = fused[:, : shape[1]], randn(shape[1], dtype=dtype), randn(*shape, dtype=dtype)
    check(rmsnorm.launcher(x, weight, 1e-5, minus_one), rmsnorm.twin(x, weight, 1e-5, minus_one))
    arguments = x, residual, weight, 1e-6, minus_one
    for ours, expected in zip(add_rmsnorm.launcher(*arguments), add_rmsnorm.twin(*arguments)):
        check(ours, expected)


@pytest.mark.parametrize("parts", [1, 3])
def test_rmsnorm_of_parts(parts: int) -> None:
    x, residual, weight = randn(parts, 5, 320), randn(5, 320, dtype=torch.bfloat16), randn(320, dtype=torch.bfloat16)
    for ours, expected in zip(
        add_rmsnorm.launcher(x, residual, weight, 1e-5), add_rmsnorm.twin(*on_cpu((x, residual, weight, 1e-5)))
    ):
        check(ours, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rmsnorm_of_what_was_received(dtype: torch.dtype) -> None:
    x, received, residual = (randn(5, width, dtype=dtype)[:, :320] for width in (320, 320, 640))
    weight = randn(320, dtype=dtype)
    ours, expected = torch.empty(2, 5, 320, dtype=dtype, device=DEVICE), torch.empty(2, 5, 320, dtype=dtype)
    add_received_rmsnorm.launcher(x, received, residual, weight, 1e-5, *ours)
    add_received_rmsnorm.twin(*on_cpu((x, received, residual, weight)), 1e-5, *expected)
    check(ours, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 7])
def test_rmsnorm_of_heads(dtype: torch.dtype, tokens: int) -> None:
    """Those of k, between those of q and of v in one product."""
    heads, weight = randn(tokens, 9, 64, dtype=dtype)[:, 4:7], randn(64, dtype=dtype)
    check(rmsnorm.launcher(heads, weight, 1e-5), rmsnorm.twin(heads, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1536, 48])
def test_silu_and_mul(dtype: torch.dtype, width: int) -> None:
    x = randn(3, 2 * width, dtype=dtype)
    check(silu_and_mul.launcher(x), silu_and_mul.twin(x))


def rotary_inputs(dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, rotary_dim: int) -> list[torch.Tensor]:
    fused = randn(5, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    parts = fused.split([heads * head_dim, kv_heads * head_dim, kv_heads * head_dim], 1)
    angle = randn(5, rotary_dim // 2)
    return [part.view(5, -1, head_dim) for part in parts] + [angle.cos(), angle.sin()]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(9, 3, 64, 64), (4, 4, 128, 128), (2, 1, 96, 96), (3, 1, 80, 20), (17, 1, 16, 16)])
def test_rotary(dtype: torch.dtype, shape: tuple[int, int, int, int]) -> None:
    slots = ints([7, 0, 11, 3, 8])
    pools, queries = [], []
    for run in (rotary_copy_kv.launcher, rotary_copy_kv.twin):
        torch.manual_seed(1)
        inputs = rotary_inputs(dtype, *shape)
        pools.append(torch.zeros(12, shape[1], 2, shape[2], dtype=dtype, device=DEVICE))
        run(*inputs, pools[-1], slots)
        queries.append(inputs[0])
    check(queries[0], queries[1])
    check(pools[0], pools[1])
    for run in (rotary_emb.launcher, rotary_emb.twin):
        torch.manual_seed(1)
        q, k, _, cos, sin = rotary_inputs(dtype, *shape)
        run(q, k, cos, sin)
        check(q, queries[1])
        check(k, pools[1][slots.long(), :, 0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 64), (10, 96), (1, 256)])
def test_destindex_copy_kv(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    fused = randn(5, 2 * shape[0], shape[1], dtype=dtype)
    k, v = fused[:, : shape[0]], fused[:, shape[0] :]
    slots = ints([7, 0, 11, 3, 8])
    ours = randn(12, shape[0], 2, shape[1], dtype=dtype)
    expected = ours.clone()
    destindex_copy_kv.launcher(k, v, ours, slots)
    destindex_copy_kv.twin(k, v, expected, slots)
    assert torch.equal(ours, expected)


SHAPES = [  # query heads, kv heads, head_dim, window
    (6, 2, 64, None), (6, 2, 64, 1), (3, 1, 64, 40), (2, 2, 128, None), (2, 1, 16, 40), (20, 1, 32, None),
    (3, 1, 48, 1), (4, 2, 80, None), (2, 1, 96, 40), (1, 1, 256, None),
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads, kv_heads, head_dim, window", SHAPES)
def test_context_attention(dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, window: int | None) -> None:
    starts, lengths = [0, 70, 5, 100, 0], [1, 1, 19, 33, 7]
    pool = paged([s + n for s, n in zip(starts, lengths)], kv_heads, head_dim, dtype, DEVICE)
    at = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    q = randn(sum(lengths), 2 * heads, head_dim, dtype=dtype)[:, :heads]
    chunks = Chunks(pool.rows, ints(starts), ints(lengths), ints(at), max(lengths))
    arguments = (q, pool.layer_kv, pool.req_table, chunks)
    spec = AttentionSpec(head_dim**-0.5, window)
    expected = context_attention.twin(*on_cpu(arguments), spec)
    check(context_attention.launcher(*arguments, spec), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 70])
def test_context_attention_of_long_chunks(dtype: torch.dtype, window: int | None) -> None:
    starts, lengths = [0, 130], [150, 129]
    pool = paged([s + n for s, n in zip(starts, lengths)], 1, 64, dtype, DEVICE)
    q = randn(sum(lengths), 1, 64, dtype=dtype)
    chunks = Chunks(pool.rows, ints(starts), ints(lengths), ints([0, 150, 279]), 200)
    arguments = (q, pool.layer_kv, pool.req_table, chunks)
    spec = AttentionSpec(0.125, window)
    expected = context_attention.twin(*on_cpu(arguments), spec)
    check(context_attention.launcher(*arguments, spec), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads, kv_heads, head_dim, window", [*SHAPES, (70, 1, 16, None)])
def test_token_attention(dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, window: int | None) -> None:
    kv_lens = [1, 200, 65, 128]
    pool = paged(kv_lens, kv_heads, head_dim, dtype, DEVICE)
    q = randn(len(kv_lens), 2 * heads, head_dim, dtype=dtype)[:, :heads]
    spec = AttentionSpec(head_dim**-0.5, window)
    arguments = (q, pool.layer_kv, pool.req_table, pool.rows, pool.kv_lens, spec)
    plan = token_plan(q, pool.layer_kv, pool.rows, pool.kv_lens, spec)
    expected = token_attention.twin(*on_cpu(arguments))
    for _ in range(2):  # a plan may be used again
        check(token_attention.launcher(*arguments, None, plan), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("heads, kv_heads, head_dim, half", [(8, 2, 64, 32), (6, 2, 48, 8), (70, 1, 128, 64)])
def test_token_attention_turns_and_keeps_new_keys(
    dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, half: int, window: int | None
) -> None:
    """Slices of one projection, as a layer has them; with a window there are a cap and sinks too."""
    kv_lens = [1, 200, 65, 128, 129]
    pool = paged(kv_lens, kv_heads, head_dim, dtype, DEVICE)
    qkv = randn(len(kv_lens), heads + 2 * kv_heads, head_dim, dtype=dtype)
    q, k, v = qkv.split((heads, kv_heads, kv_heads), 1)
    new = NewKeys(k, v, *randn(2, len(kv_lens), half))
    spec = AttentionSpec(head_dim**-0.5, window, softcap=window and 5.0)
    sinks = randn(heads, dtype=dtype) if window else None
    arguments = (q, pool.layer_kv, pool.req_table, pool.rows, pool.kv_lens, spec, sinks, None, None, False, new)
    on_host = on_cpu(arguments)
    check(token_attention.launcher(*arguments), token_attention.twin(*on_host))
    check(pool.layer_kv.nan_to_num(7.0), on_host[1].nan_to_num(7.0))  # slots of nobody are no numbers


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("feature", attention_specs(1, 1.0))
@pytest.mark.parametrize("heads, kv_heads, head_dim", [(6, 2, 64), (8, 2, 64), (3, 1, 48)])
def test_attention_features(dtype: torch.dtype, feature: str, heads: int, kv_heads: int, head_dim: int) -> None:
    spec, sinks = attention_specs(heads, head_dim**-0.5, DEVICE)[feature]
    on_host = dataclasses.replace(spec, slopes=spec.slopes.cpu() if spec.slopes is not None else None)
    starts, lengths = [0, 70, 5, 100], [1, 1, 50, 33]
    kv_lens = [s + n for s, n in zip(starts, lengths)]
    pool = paged(kv_lens, kv_heads, head_dim, dtype, DEVICE)
    at = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    q = randn(sum(lengths), heads, head_dim, dtype=dtype)
    table = (pool.layer_kv, pool.req_table, pool.rows)
    chunks = Chunks(pool.rows, ints(starts), ints(lengths), ints(at), max(lengths))
    arguments = (q, pool.layer_kv, pool.req_table, chunks)
    expected = context_attention.twin(*on_cpu((*arguments, on_host, sinks)))
    check(context_attention.launcher(*arguments, spec, sinks), expected)
    arguments = (q[:4], *table, pool.kv_lens)
    expected = token_attention.twin(*on_cpu((*arguments, on_host, sinks)))
    check(token_attention.launcher(*arguments, spec, sinks), expected)


@pytest.mark.parametrize("fillers", [0, 3, 150])
def test_rows_without_tokens_leave_the_answers_of_others(fillers: int) -> None:
    """As in steps padded for CUDA graphs: decode rows without keys, chunks without queries, offsets from any token."""
    lengths = [*[0] * fillers, 33, 0, 5, *[0] * fillers, 40, 0]
    starts, kv_lens = [7 * (n > 0) for n in lengths], [7 + n if n else 1 for n in lengths]
    pool = paged(kv_lens, 1, 32, torch.float32, DEVICE)
    at = [3 + sum(lengths[:i]) for i in range(len(lengths) + 1)]
    q, spec = randn(at[-1] + 2, 2, 32), AttentionSpec(0.2)
    chunks = Chunks(pool.rows, ints(starts), ints(lengths), ints(at), 64)
    arguments = (q, pool.layer_kv, pool.req_table, chunks, spec, None)
    ours, expected = torch.full_like(q, 9.0), torch.full_like(q.cpu(), 9.0)
    context_attention.launcher(*arguments, ours)
    context_attention.twin(*on_cpu(arguments), expected)
    check(ours, expected)
    assert (expected[:3] == 9).all() and (expected[-2:] == 9).all() and (expected[3:-2] != 9).all()
    kv_lens = ints([kv_len if length else 0 for kv_len, length in zip(kv_lens, lengths)])
    arguments = (randn(len(lengths), 2, 32), pool.layer_kv, pool.req_table, pool.rows, kv_lens, spec, None, None)
    ours, expected = torch.full_like(arguments[0], 9.0), torch.full_like(arguments[0].cpu(), 9.0)
    token_attention.launcher(*arguments, ours)
    token_attention.twin(*on_cpu(arguments), expected)
    check(ours, expected)
    assert [(line == 9).all().item() for line in expected] == [n == 0 for n in lengths]


@pytest.mark.parametrize("decode", [9, 200])
def test_decode_rows_beside_chunks(decode: int) -> None:
    """Chunks are long enough for decode rows to be done first."""
    kv_lens = [*range(1, decode + 1), 900]
    pool = paged(kv_lens, 2, 64, torch.bfloat16, DEVICE)
    q, spec = randn(decode + 300, 8, 64, dtype=torch.bfloat16), AttentionSpec(0.125)
    layer = pool.layer_kv, pool.req_table
    chunk = (q[decode:], *layer, Chunks(pool.rows[-1:], ints([600]), ints([300]), ints([0, 300]), 300), spec)
    rows = (q[:decode], *layer, pool.rows[:-1], pool.kv_lens[:-1], spec)
    plan = token_plan(q[:decode], pool.layer_kv, *rows[3:])
    ours = torch.full_like(q, 9.0)
    context_attention.launcher(*chunk, None, ours[decode:])
    token_attention.launcher(*rows, None, plan, ours[:decode], beside=True)
    ours = ours.clone()  # the next kernel finds both done
    check(ours, torch.cat((token_attention.twin(*on_cpu(rows)), context_attention.twin(*on_cpu(chunk)))))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [1, 20])
def test_token_attention_of_one_long_row(dtype: torch.dtype, batch: int) -> None:
    kv_lens = [1500] + [2] * (batch - 1)
    pool = paged(kv_lens, 1, 64, dtype, DEVICE)
    q = randn(batch, 3, 64, dtype=dtype)
    arguments = (q, pool.layer_kv, pool.req_table, pool.rows, pool.kv_lens, AttentionSpec(0.125))
    check(token_attention.launcher(*arguments), token_attention.twin(*on_cpu(arguments)))


@pytest.mark.parametrize("spec", [AttentionSpec(0.3, window=37), AttentionSpec(0.3, chunk=64)])
def test_decode_reads_nothing_before_its_reach(spec: AttentionSpec) -> None:
    pool = paged([300, 65, 20], 2, 32, torch.float32, DEVICE)
    q = randn(3, 4, 32)
    arguments = (q, pool.layer_kv, pool.req_table, pool.rows, pool.kv_lens, spec)
    expected = token_attention.launcher(*arguments)
    for row, end in zip(pool.rows.tolist(), pool.kv_lens.tolist()):
        pool.layer_kv[pool.req_table[row, : max(0, spec.oldest(end - 1))].long()] = torch.nan
    assert torch.equal(token_attention.launcher(*arguments), expected)


@pytest.mark.parametrize("spec", [AttentionSpec(1.0), AttentionSpec(1.0, window=100), AttentionSpec(1.0, chunk=64)])
@pytest.mark.parametrize("heads, block", [(1, 64), (8, 64), (32, 32), (600, 128)])
def test_decode_plan(spec: AttentionSpec, heads: int, block: int) -> None:
    for kv_lens in ([1], [5000], [64, 65, 1, 700], [300] * 40, [20000, *range(1, 60)], [0, 9, 0, 0, 70], [0, 0]):
        rows = torch.randperm(len(kv_lens)).int()
        size = PlanSize(200 // heads, 160 // heads, 300 // heads)
        ours, expected = (
            run(ints(kv_lens).to(device), rows.to(device), spec, heads, block, size)
            for run, device in ((plan_decode.launcher, DEVICE), (plan_decode.twin, "cpu"))
        )
        assert torch.equal(ours.items.cpu(), expected.items) and not ours.arrived.any()
        assert len(ours.arrived) == len(expected.arrived)
        seen = [range(0)] * len(kv_lens)
        for row, low, high, *_, of_table in expected.items.T.tolist():
            if row >= 0:
                assert of_table == rows[row]
                oldest = max(0, spec.oldest(kv_lens[row] - 1))
                assert low == (seen[row].stop if seen[row] else oldest) < high
                seen[row] = range(oldest, high)
        assert [span.stop for span in seen] == kv_lens


@pytest.mark.parametrize(
    ("size", "most"),
    [
        (PlanSize(33, 20), 54),  # rows and spare
        (PlanSize(33, 60), 68),  # two for each
        (PlanSize(120, 20), 120),
        (PlanSize(33, 20, 50), 50),  # one wave
        (PlanSize(33, 20, 80), 68),
        (PlanSize(33, 20, 34), 54),  # too many rows for one wave
    ],
)
def test_a_plan_cuts_only_what_is_long_and_begins_with_it(size: PlanSize, most: int) -> None:
    """34 rows have keys."""
    kv_lens = [300, 20000, 700, 0, 1, *[900] * 30]
    items = plan_decode.twin(torch.tensor(kv_lens), torch.tensor(kv_lens), AttentionSpec(1.0), 8, 64, size).items
    used = items[:, items[0] >= 0]
    lengths = (used[2] - used[1]).tolist()

    def needed(longest: int) -> int:
        return sum(-(-n // longest) for n in kv_lens)

    longest = next(n for n in range(64, 20001, 64) if needed(n) <= most)
    assert len(lengths) == needed(longest) and max(lengths) <= longest
    assert lengths[0] > longest // 2 > lengths[-1] == 1


def test_a_plan_is_the_same_whatever_the_number_of_rows_without_keys() -> None:
    kv_lens = [100 + 10 * i for i in range(100)]
    plans = [
        plan_decode.twin(lens, lens, AttentionSpec(1.0), 8, 64, PlanSize(33, 20, 82)).items
        for lens in (torch.tensor(kv_lens + fillers * [0]) for fillers in (0, 60, 200))
    ]
    used = [items[:, items[0] >= 0] for items in plans]
    assert torch.equal(used[0], used[1]) and torch.equal(used[0], used[2])
    assert len({items.shape for items in plans}) == 3


@pytest.mark.parametrize("config", CANDIDATES, ids=str)
def test_skinny_linear(config: SkinnyConfig) -> None:
    inputs, outputs = 2 * config.block_k * (config.split if config.dot else config.num_stages), 2 * config.block_n
    weight, bias = randn(outputs, inputs, dtype=torch.bfloat16) / 32, randn(outputs, dtype=torch.bfloat16)
    for lines in (1, 5, MOST_LINES) if config.dot else (1,):
        assert config.fits(lines, *weight.shape)
        x = randn(lines, inputs, dtype=torch.bfloat16)
        for added in (None, bias):
            expected = skinny_linear.twin(*in_float((x, weight, added)))
            check(skinny_linear.launcher(x, weight, added, config), expected.bfloat16())


@pytest.mark.parametrize("config", CANDIDATES, ids=str)
def test_skinny_linear_with_what_lies_before_and_behind_it(config: SkinnyConfig) -> None:
    inputs, outputs = 2 * config.block_k * (config.split if config.dot else config.num_stages), 2 * config.block_n
    lines = 5 if config.dot else 1
    x, norm = randn(lines, inputs, dtype=torch.bfloat16), randn(outputs, dtype=torch.bfloat16)
    weight, residual = randn(outputs, inputs, dtype=torch.bfloat16) / 32, randn(lines, outputs, dtype=torch.bfloat16)
    squares = torch.rand(3, lines, device=DEVICE) * inputs
    for bias in (None, norm / 2):
        for gated, normed in ((False, squares), (True, None), (True, squares)):
            arguments = (x, weight, bias, config, normed, 1e-5, gated)
            expected = skinny_linear.twin(*in_float(arguments))
            check(skinny_linear.launcher(*arguments), expected.bfloat16())
        arguments = (x, weight, bias, residual, norm, config)
        *sums, ours = add_skinny_linear.launcher(*arguments)
        *expected, whole = add_skinny_linear.twin(*in_float(arguments))
        for got, wanted in zip(sums, expected):
            check(got, wanted.bfloat16())
        check(ours.sum(0), whole.sum(0), 1e-2)


SHARES = [(0, 6), (2, 3)]  # first expert held, experts held, of six


@pytest.mark.parametrize(("first", "experts"), SHARES)
@pytest.mark.parametrize(("lines", "block"), [(1, 16), (40, 16), (100, 32), (2500, 16)])
def test_group_lines(lines: int, block: int, first: int, experts: int) -> None:
    for ids in (torch.randint(0, 6, (lines,)), torch.full((lines,), 5), torch.randint(4, 6, (lines,))):
        expected = group_lines.twin(ids.int(), first, experts, block)
        for ours, wanted in zip(group_lines.launcher(ids.int().to(DEVICE), first, experts, block), expected):
            used = slice(0, len(ours) // len(expected[1]) * int((expected[1] < experts).sum()))
            assert ours.dtype == wanted.dtype and ours.shape == wanted.shape
            assert torch.equal(ours.cpu()[used], wanted[used])
            if wanted is expected[1]:
                assert torch.equal(ours.cpu(), wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "k", "inputs", "outputs"),
    [(1, 2, 64, 48), (1, 3, 24, 20), (2, 3, 40, 64), (13, 2, 128, 96), (50, 3, 136, 130), (400, 2, 64, 40)],
)
def test_grouped_gemm(dtype: torch.dtype, tokens: int, k: int, inputs: int, outputs: int) -> None:
    ids = torch.rand(tokens, 6).topk(k, -1).indices.int()  # of one token, no expert twice
    for first, experts in SHARES:
        weight, bias = randn(experts, outputs, inputs, dtype=dtype), randn(experts, outputs, dtype=dtype)
        held = ((ids >= first) & (ids < first + experts)).flatten()
        for lines, part, gated in ((tokens, bias, False), (tokens * k, None, False), (tokens, bias, True)):
            x = randn(lines, inputs, dtype=dtype)
            expected = grouped_gemm.twin(*on_cpu((x, weight, part)), Routing(ids, first, experts), gated)
            ours = grouped_gemm.launcher(x, weight, part, Routing(ids.to(DEVICE), first, experts), gated)
            assert ours.shape == expected.shape
            scale = inputs**0.5 * (inputs**0.5 if gated else 1)
            check(ours[held.to(DEVICE)] / scale, expected[held] / scale, TOLERANCE[dtype] * 4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "k", "width"), [(1, 2, 64), (5, 8, 700)])
def test_weighted_sum(dtype: torch.dtype, tokens: int, k: int, width: int) -> None:
    lines, weights = randn(tokens * k, width, dtype=dtype), torch.rand(tokens, k, device=DEVICE)
    weights[0, 1] = 0
    lines[1] = torch.nan  # nobody's
    check(weighted_sum.launcher(lines, weights), weighted_sum.twin(*on_cpu((lines, weights))))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "inputs", "outputs"), [(1, 40, 24), (1, 2300, 6), (7, 40, 24)])
def test_routed_sum(dtype: torch.dtype, tokens: int, inputs: int, outputs: int) -> None:
    ids = torch.rand(tokens, 6).topk(3, -1).indices.int()
    for first, experts in SHARES:
        held = (ids >= first) & (ids < first + experts)
        weights = torch.where(held, torch.rand(tokens, 3), 0.0)
        weight = randn(experts, outputs, inputs, dtype=dtype)
        x = randn(tokens * 3, inputs, dtype=dtype) * inputs**-0.5
        x[~held.flatten().to(DEVICE)] = torch.nan
        for bias, addend in ((randn(experts, outputs, dtype=dtype), None), (None, randn(tokens, outputs, dtype=dtype))):
            routing, on_device = Routing(ids, first, experts), Routing(ids.to(DEVICE), first, experts)
            expected = routed_sum.twin(*on_cpu((x, weight, bias)), routing, *on_cpu((weights, addend)))
            ours = routed_sum.launcher(x, weight, bias, on_device, weights.to(DEVICE), addend)
            check(ours, expected, TOLERANCE[dtype] * 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "experts", "hidden"), [(1, 6, 700), (16, 5, 64), (17, 5, 64)])
def test_router_logits(dtype: torch.dtype, tokens: int, experts: int, hidden: int) -> None:
    x, weight, bias = randn(tokens, hidden, dtype=dtype), randn(experts, hidden) * hidden**-0.5, randn(experts)
    for part in (bias, None):
        check(router_logits.launcher(x, weight, part), router_logits.twin(*on_cpu((x, weight, part))))


RULES = [
    (5, TopK(2)), (128, TopK(8, renormalize=True)), (6, TopK(1, "sigmoid")), (64, TopK(6, scaling=1.5)),
    (160, TopK(6, groups=8, best_groups=3, scaling=16.0)),
    (256, TopK(8, "sigmoid", True, 2.5, groups=8, best_groups=4, judges=2)), (12, TopK(3, groups=3, best_groups=1)),
]  # fmt: skip


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("experts", "rule"), RULES)
def test_select_experts(experts: int, rule: TopK, biased: bool) -> None:
    logits, bias = 3 * randn(9, experts), randn(experts) if biased else None
    logits[0, 1:] = -200.0  # whose probabilities are zero
    ours, expected = select_experts.launcher(logits, bias, rule), select_experts.twin(*on_cpu((logits, bias)), rule)
    assert torch.equal(ours[1].cpu()[1:], expected[1][1:])
    check(ours[0], expected[0], 1e-5)


LATENT = [(16, 64, 512), (3, 8, 20), (20, 32, 64)]  # heads, rope, rank


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "rope", "rank"), LATENT)
def test_latent_attention(dtype: torch.dtype, heads: int, rope: int, rank: int) -> None:
    kv_lens = [1, 500, 65]
    pool = paged(kv_lens, 1, (rope + rank) // 2, dtype, DEVICE)
    latents = pool.layer_kv.view(-1, rope + rank)
    q = randn(len(kv_lens), heads, rope + 3, dtype=dtype)
    absorbed = randn(heads, len(kv_lens), rank, dtype=dtype).transpose(0, 1)
    scale = (rope + rank) ** -0.5
    arguments = (q[..., :rope], absorbed, latents, pool.req_table, pool.rows, pool.kv_lens, scale)
    expected = latent_attention.twin(*on_cpu(arguments))
    plan = latent_plan(absorbed, pool.rows, pool.kv_lens)
    for _ in range(2):  # one plan serves many layers
        check(latent_attention.launcher(*arguments, plan), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "rope", "nope", "value"), [(2, 64, 128, 128), (3, 8, 16, 12)])
def test_latent_context_attention(dtype: torch.dtype, heads: int, rope: int, nope: int, value: int) -> None:
    starts, lengths = [0, 70, 5, 100, 0], [1, 1, 19, 33, 150]
    ends = [s + n for s, n in zip(starts, lengths)]
    cumulated = lambda counts: ints([sum(counts[:i]) for i in range(len(counts))])
    q = randn(sum(lengths), heads + 2, rope + nope, dtype=dtype)[:, 1:-1]
    turned = randn(sum(ends), rope + 24, dtype=dtype)[:, :rope]
    kv = randn(sum(ends), heads, nope + value, dtype=dtype)
    chunks = Chunks(ints([]), ints(starts), ints(lengths), cumulated(lengths), 150)
    arguments = (q, turned, kv, chunks, cumulated(ends), 0.1)
    check(latent_context_attention.launcher(*arguments), latent_context_attention.twin(*on_cpu(arguments)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "rope", "rank"), LATENT)
def test_write_latents(dtype: torch.dtype, heads: int, rope: int, rank: int) -> None:
    q, rows, weight = (
        randn(5, heads, rope + 5, dtype=dtype),
        randn(5, rope + rank, dtype=dtype),
        randn(rank, dtype=dtype),
    )
    angle, latents = randn(5, rope // 2), randn(12, rope + rank, dtype=dtype)
    arguments = (q, rows, weight, 1e-6, angle.cos(), angle.sin(), latents, ints([7, 0, 11, 3, 8]))
    on_twin = on_cpu(tuple(x.clone() if isinstance(x, torch.Tensor) else x for x in arguments))
    write_latents.launcher(*arguments)
    write_latents.twin(*on_twin)
    check(q, on_twin[0])
    check(latents, on_twin[6])


def test_nothing_to_do() -> None:
    pool = paged([4], 1, 16, torch.float32, DEVICE)
    none, q = ints([]), randn(0, 2, 16)
    table = (pool.layer_kv, pool.req_table, none)
    assert rmsnorm.launcher(randn(0, 8), randn(8), 1e-5).shape == (0, 8)
    assert silu_and_mul.launcher(randn(0, 8)).shape == (0, 4)
    assert token_attention.launcher(q, *table, none, AttentionSpec(1.0)).shape == q.shape
    routing = Routing(ints([]).view(0, 2), 0, 3)
    assert grouped_gemm.launcher(randn(0, 8), randn(3, 5, 8), None, routing).shape == (0, 5)
    assert weighted_sum.launcher(randn(0, 8), randn(0, 2)).shape == (0, 8)
    assert select_experts.launcher(randn(0, 8), None, TopK(2))[1].shape == (0, 2)
    assert router_logits.launcher(randn(0, 8), randn(4, 8), None).shape == (0, 4)
    chunks = Chunks(none, none, none, ints([0]), 0)
    assert context_attention.launcher(q, *table[:2], chunks, AttentionSpec(1.0)).shape == q.shape
    rotary_copy_kv.launcher(q, randn(0, 1, 16), randn(0, 1, 16), randn(0, 8), randn(0, 8), pool.layer_kv, none)
    assert sample.launcher(randn(0, 8), none, none, *sampling_tables(0)).shape == (2, 0)


def test_apply_penalty() -> None:
    vocab, table_rows = 1500, 4
    counts = torch.randint(0, 6, (table_rows, vocab), dtype=torch.int32).to(DEVICE)
    tables = [torch.rand(table_rows, device=DEVICE) + shift for shift in (0.5, -0.5, -0.5)]
    input_penalty = torch.tensor([True, False, True, False], device=DEVICE)
    ours = randn(3, vocab)
    ours[0, 5] = -torch.inf
    expected = ours.clone()
    apply_penalty.launcher(ours, ints([2, 0, 3]), counts, *tables, input_penalty)
    apply_penalty.twin(expected, ints([2, 0, 3]), counts, *tables, input_penalty)
    check(ours, expected, 1e-6)


def sampling_tables(rows: int, settings: list[tuple] | None = None) -> list[torch.Tensor]:
    """The tables by row that `sample` reads, and last_token; settings are (temperature, top_k, top_p, min_p)."""
    columns = list(zip(*settings)) if settings else [[0.0] * rows] * 4
    kinds = (torch.float32, torch.int32, torch.float32, torch.float32)
    tables = [torch.tensor(column, dtype=kind, device=DEVICE) for column, kind in zip(columns, kinds)]
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), dtype=torch.int64).to(DEVICE)
    sample_index = torch.arange(rows, dtype=torch.int32, device=DEVICE) % 8
    return [*tables, seeds, sample_index, torch.full((rows,), -1, dtype=torch.int64, device=DEVICE)]


SETTINGS = [  # temperature, top_k, top_p, min_p
    (0.0, -1, 1.0, 0.0), (1.0, -1, 1.0, 0.0), (0.7, 5, 1.0, 0.0), (1.3, -1, 0.8, 0.0), (1.0, -1, 1.0, 0.2),
    (2.0, 20, 0.5, 0.01), (1e-5, -1, 1.0, 0.0), (1e-3, 3, 0.9, 0.1), (1.0, 1, 1.0, 0.0), (5.0, 10**6, 0.999, 0.0),
    (1.0, 50, 0.9, 0.0), (3.0, -1, 0.01, 0.0), (9.0, 2000, 0.9, 0.001), (2.0, -1, 0.5, 0.3), (1.0, 500, 1.0, 0.0),
]  # fmt: skip


@pytest.mark.parametrize("vocab", [33, 9000] if INTERPRETED else [33, 9000, 128256])
@pytest.mark.parametrize(("spread", "dtype"), [(0.01, torch.float32), (3.0, torch.float32), (3.0, torch.bfloat16)])
def test_sample(vocab: int, spread: float, dtype: torch.dtype) -> None:
    rows = len(SETTINGS) * (1 if INTERPRETED else 20)
    logits = spread * randn(rows, vocab)
    logits[:, ::7] = -torch.inf
    logits[1::2] = logits[1::2].bfloat16().float()
    logits[-1, 40:] = -torch.inf  # fewer than its top_k
    logits = logits.to(dtype)
    order = torch.randperm(rows).to(DEVICE)
    tables = sampling_tables(rows, SETTINGS * (rows // len(SETTINGS)))
    arguments = (logits, order, 1000 * torch.arange(rows, dtype=torch.int32, device=DEVICE), *tables)
    on_host = on_cpu(arguments)
    on_host[-1] = on_host[-1].clone()  # what the interpreter's launcher writes
    ours, expected = sample.launcher(*arguments).cpu(), sample.twin(*on_host)
    assert ours.dtype == torch.int32 and ours[0].tolist() == expected[0].tolist()
    check(ours[1].view(torch.float32).to(DEVICE), expected[1].view(torch.float32), 1e-5)
    assert arguments[-1][order].tolist() == ours[0].tolist() == on_host[-1][order.cpu()].tolist()


def test_sample_of_numbers_that_are_none_stays_in_the_vocabulary() -> None:
    logits = torch.full((3, 9000), torch.nan, device=DEVICE)
    logits[2] = -torch.inf
    drawn = sample.launcher(logits, ints([0, 1, 2]), ints([0, 0, 0]), *sampling_tables(3, SETTINGS[9:12]))
    assert ((drawn[0] >= 0) & (drawn[0] < 9000)).all()


@pytest.mark.parametrize(("tables", "width", "dtype"), [(1, 1536, torch.bfloat16), (2, 48, torch.float32)])
def test_gather_rows(tables: int, width: int, dtype: torch.dtype) -> None:
    table, index = torch.randn(tables, 9, width, device=DEVICE).to(dtype), torch.tensor([8, 0, 3, 3], device=DEVICE)
    for kind in (torch.int32, torch.int64):
        assert torch.equal(gather_rows.launcher(table, index.to(kind)), gather_rows.twin(table, index))


@pytest.mark.parametrize("count", [1, 7, 1024, 5000])
def test_numbers_come_from_the_host_and_go_to_it(count: int) -> None:
    """From and to places that nothing is aligned to but int32, and nowhere beside them."""
    pinned = DEVICE == "cuda"
    there, back = (torch.full((count + 2,), -7, dtype=torch.int32, pin_memory=pinned) for _ in range(2))
    there[1:-1] = torch.randint(-(2**31), 2**31 - 1, (count,), dtype=torch.int32)
    address = torch.tensor([back.data_ptr() + 4]).view(torch.int32).to(DEVICE)
    for receive, answer in ((fetch.launcher, deliver.launcher), (fetch.twin, deliver.twin)):
        if pinned and answer is deliver.twin:
            continue  # of host memory only
        numbers = torch.full((count + 2,), -7, dtype=torch.int32, device=DEVICE)
        receive(numbers[1:-1], there[1:-1])
        assert torch.equal(numbers.cpu(), there)
        answer(numbers[1:-1], torch.zeros_like(address))
        answer(numbers[1:-1], address)
        if pinned:
            torch.cuda.synchronize()
        assert torch.equal(back, there)
        back.fill_(-7)


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("lines", [1, 5, 200])
def test_prepare_decode(lines: int, given: bool) -> None:
    rows, positions = torch.randperm(250)[:lines], torch.randint(0, 30, (lines,))
    ids = [torch.randint(-1, 2, (lines,))] * given
    columns = torch.stack((rows, positions, torch.randperm(900)[:lines], *ids)).int().to(DEVICE)
    last_token, prompt_lens = torch.randint(0, 10**6, (250,)), torch.randint(1, 40, (250,)).int()
    tables = [torch.full((250, 30), -1, dtype=torch.int32, device=DEVICE) for _ in range(2)]
    ours, expected = (
        run(columns, last_token.to(DEVICE), prompt_lens.to(DEVICE), table)
        for run, table in zip((prepare_decode.launcher, prepare_decode.twin), tables)
    )
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(ours, expected))
    assert torch.equal(*tables)
