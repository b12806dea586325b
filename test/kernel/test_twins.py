"""The torch twins, which specify the kernels and serve on a CPU, against naive arithmetic in float64."""

import math

import pytest
import torch
from support.kernel_cases import attention_specs, naive_attention, paged
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from lightllm.common.basemodel.attention.backend import AttentionSpec
from lightllm.common.basemodel.infer_struct import Chunks
from lightllm.common.basemodel.triton_kernel.apply_penalty import apply_penalty
from lightllm.common.basemodel.triton_kernel.context_attention import context_attention
from lightllm.common.basemodel.triton_kernel.destindex_copy_kv import destindex_copy_kv
from lightllm.common.basemodel.triton_kernel.group_lines import group_lines
from lightllm.common.basemodel.triton_kernel.grouped_gemm import Routing, grouped_gemm
from lightllm.common.basemodel.triton_kernel.latent_attention import latent_attention
from lightllm.common.basemodel.triton_kernel.latent_context_attention import latent_context_attention
from lightllm.common.basemodel.triton_kernel.rmsnorm import add_rmsnorm, rmsnorm
from lightllm.common.basemodel.triton_kernel.rotary_emb import rotary_copy_kv, rotary_emb
from lightllm.common.basemodel.triton_kernel.select_experts import TopK, select_experts
from lightllm.common.basemodel.triton_kernel.silu_and_mul import silu_and_mul
from lightllm.common.basemodel.triton_kernel.token_attention import token_attention
from lightllm.common.basemodel.triton_kernel.weighted_sum import weighted_sum

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def check(ours: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert ours.dtype == dtype
    torch.testing.assert_close(ours.double(), expected.double(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("of_transformers", "minus_one"), [(LlamaRMSNorm, False), (Gemma2RMSNorm, True)])
def test_rmsnorm_is_that_of_transformers(dtype: torch.dtype, of_transformers: type, minus_one: bool) -> None:
    norm = of_transformers(96, eps=1e-5).to(dtype)
    norm.weight.data.normal_()
    x, residual = torch.randn(7, 96, dtype=dtype), torch.randn(7, 96, dtype=dtype)
    torch.testing.assert_close(rmsnorm(x, norm.weight, 1e-5, minus_one), norm(x), rtol=1e-6, atol=1e-6)
    y, total = add_rmsnorm(x, residual, norm.weight, 1e-5, minus_one)
    assert torch.equal(total, residual + x)
    torch.testing.assert_close(y, norm(residual + x), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_and_mul(dtype: torch.dtype) -> None:
    x = torch.randn(5, 20, dtype=dtype)
    gate, up = x.double().chunk(2, 1)
    check(silu_and_mul(x), gate / (1 + (-gate).exp()) * up, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotary_dim", [32, 16])
def test_rotary_rotates_pairs_and_writes_kv(dtype: torch.dtype, rotary_dim: int) -> None:
    fused = torch.randn(5, 8, 32, dtype=dtype)
    q, k, v = fused.clone().split([4, 2, 2], 1)
    angle = torch.randn(5, rotary_dim // 2)
    cos, sin = (torch.cat((x, x), 1)[None].double() for x in (angle.cos(), angle.sin()))
    turned = [
        torch.cat((rotated[0].transpose(0, 1), x[..., rotary_dim:].double()), 2)
        for x, rotated in zip(
            (q, k),
            apply_rotary_pos_emb(*(x[None, ..., :rotary_dim].transpose(1, 2).double() for x in (q, k)), cos, sin),
        )
    ]
    pool = torch.zeros(12, 2, 2, 32, dtype=dtype)
    slots = ints([7, 0, 11, 3, 8])
    other_q, other_k = q.clone(), k.clone()
    rotary_copy_kv(q, k, v, angle.cos(), angle.sin(), pool, slots)
    check(q, turned[0], dtype)
    check(pool[slots.long(), :, 0], turned[1], dtype)
    assert torch.equal(pool[slots.long(), :, 1], v)
    assert pool[[1, 2, 4, 5, 6, 9, 10]].count_nonzero() == 0
    rotary_emb(other_q, other_k, angle.cos(), angle.sin())
    assert torch.equal(other_q, q) and torch.equal(other_k, pool[slots.long(), :, 0])
    again = torch.zeros_like(pool)
    destindex_copy_kv(other_k, v, again, slots)
    assert torch.equal(again, pool)


HEADS = [(4, 2, 32), (3, 1, 80), (2, 2, 16)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 1, 100, 300])
@pytest.mark.parametrize("heads, kv_heads, head_dim", HEADS)
def test_context_attention(dtype: torch.dtype, window: int | None, heads: int, kv_heads: int, head_dim: int) -> None:
    starts, lengths = [0, 70, 5, 0, 300], [1, 1, 19, 600, 270]
    pool = paged([s + n for s, n in zip(starts, lengths)], kv_heads, head_dim, dtype)
    at = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    q = torch.randn(sum(lengths), heads, head_dim, dtype=dtype)
    spec = AttentionSpec(head_dim**-0.5, window)
    chunks = Chunks(pool.rows, ints(starts), ints(lengths), ints(at), 600)
    out = context_attention(q, pool.layer_kv, pool.req_table, chunks, spec)
    for i, start in enumerate(starts):
        part = slice(at[i], at[i + 1])
        check(out[part], naive_attention(q[part], *pool.keys_values(i), start, spec), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 1, 100])
@pytest.mark.parametrize("kv_lens", [[1], [700], [64, 64, 64], [1, 900, 30, 2, 31, 899, 400], [1200] + [3] * 15])
def test_token_attention(dtype: torch.dtype, window: int | None, kv_lens: list[int]) -> None:
    for heads, kv_heads, head_dim in HEADS:
        spec = AttentionSpec(head_dim**-0.5, window)
        pool = paged(kv_lens, kv_heads, head_dim, dtype)
        q = torch.randn(len(kv_lens), heads, head_dim, dtype=dtype)
        out = token_attention(*(q, pool.layer_kv, pool.req_table, pool.rows, pool.kv_lens, spec))
        for i, n in enumerate(kv_lens):
            expected = naive_attention(q[i : i + 1], *pool.keys_values(i), n - 1, spec)
            check(out[i : i + 1], expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("feature", attention_specs(1, 1.0))
@pytest.mark.parametrize("heads, kv_heads, head_dim", HEADS)
def test_attention_features(dtype: torch.dtype, feature: str, heads: int, kv_heads: int, head_dim: int) -> None:
    spec, sinks = attention_specs(heads, head_dim**-0.5)[feature]
    starts, lengths = [0, 70, 5, 0], [1, 1, 50, 300]
    kv_lens = [s + n for s, n in zip(starts, lengths)]
    pool = paged(kv_lens, kv_heads, head_dim, dtype)
    at = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    q = torch.randn(sum(lengths), heads, head_dim, dtype=dtype)
    table = (pool.layer_kv, pool.req_table, pool.rows)
    of_rows = Chunks(pool.rows, ints(starts), ints(lengths), ints(at), 300)
    chunks = context_attention(q, *table[:2], of_rows, spec, sinks)
    last = q[torch.tensor(at[1:]) - 1]
    decode = token_attention(last, *table, pool.kv_lens, spec, sinks)
    for i, start in enumerate(starts):
        expected = naive_attention(q[at[i] : at[i + 1]], *pool.keys_values(i), start, spec, sinks)
        check(chunks[at[i] : at[i + 1]], expected, dtype)
        check(decode[i], expected[-1], dtype)


def test_no_rows() -> None:
    pool = paged([4], 1, 16, torch.float32)
    none, q = ints([]), torch.randn(0, 2, 16)
    table = (pool.layer_kv, pool.req_table, none)
    for spec in (AttentionSpec(1.0), AttentionSpec(1.0, window=3)):
        assert token_attention(q, *table, none, spec).shape == q.shape
        assert context_attention(q, *table[:2], Chunks(none, none, none, ints([0]), 0), spec).shape == q.shape


@pytest.mark.parametrize("dtype", DTYPES)
def test_latent_attention(dtype: torch.dtype) -> None:
    kv_lens, heads, rope, rank = [1, 40, 7], 3, 8, 20
    pool = paged(kv_lens, 1, (rope + rank) // 2, dtype)
    latents = pool.layer_kv.view(-1, rope + rank)
    q = torch.randn(len(kv_lens), heads, rope + rank, dtype=dtype)
    out = latent_attention(q[..., :rope], q[..., rope:], latents, pool.req_table, pool.rows, pool.kv_lens, 0.3)
    for i, n in enumerate(kv_lens):
        keys = latents[pool.req_table[pool.rows[i], :n].long()].double()
        check(out[i], (q[i].double() @ keys.t() * 0.3).softmax(-1) @ keys[:, rope:], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_latent_context_attention(dtype: torch.dtype) -> None:
    starts, lengths, heads, rope, nope, value = [0, 300, 5], [1, 40, 290], 3, 8, 16, 12
    ends = [start + length for start, length in zip(starts, lengths)]
    at, kv_at = ([sum(counts[:i]) for i in range(4)] for counts in (lengths, ends))
    q = torch.randn(sum(lengths), heads, rope + nope, dtype=dtype)
    turned, kv = torch.randn(sum(ends), rope, dtype=dtype), torch.randn(sum(ends), heads, nope + value, dtype=dtype)
    chunks = Chunks(ints([]), ints(starts), ints(lengths), ints(at[:-1]), 290)
    out = latent_context_attention(q, turned, kv, chunks, ints(kv_at[:-1]), 0.2)
    for i, start in enumerate(starts):
        held = slice(kv_at[i], kv_at[i + 1])
        keys = torch.cat((turned[held, None].expand(-1, heads, -1), kv[held, :, :nope]), -1).double()
        expected = naive_attention(q[at[i] : at[i + 1]], keys, kv[held, :, nope:].double(), start, AttentionSpec(0.2))
        check(out[at[i] : at[i + 1]], expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("per_line", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_grouped_gemm(dtype: torch.dtype, per_line: bool, gated: bool) -> None:
    ids = torch.randint(0, 9, (9, 3))  # 2 to 6 are held here
    x = torch.randn(27 if per_line else 9, 20, dtype=dtype)
    weight, bias = torch.randn(5, 12, 20, dtype=dtype), torch.randn(5, 12, dtype=dtype)
    out = grouped_gemm(x, weight, bias, Routing(ids.int(), 2, 5), gated)
    assert out.shape == (27, 6 if gated else 12)
    for line, expert in enumerate((ids.flatten() - 2).tolist()):
        if 0 <= expert < 5:
            source = x[line if per_line else line // 3].double()
            expected = weight[expert].double() @ source + bias[expert].double()
            if gated:
                gate, up = expected.to(dtype).double().chunk(2)
                expected = torch.nn.functional.silu(gate).to(dtype).double() * up
            check(out[line], expected, dtype)


def test_group_lines() -> None:
    ids = torch.randint(0, 9, (100,)).int()
    lines, expert = group_lines(ids, 2, 5, 16)
    found = {e: [] for e in range(5)}
    for e, block in zip(expert.tolist(), lines.view(-1, 16).tolist()):
        if e < 5:
            found[e] += [line for line in block if line < 100]
    assert found == {e: (ids == e + 2).nonzero().flatten().tolist() for e in range(5)}
    assert expert.tolist() == sorted(expert.tolist()) and len(expert) == 100 // 16 + 5


def test_weighted_sum() -> None:
    lines, weights = torch.randn(6, 4), torch.tensor([[0.5, 0.0, 2.0], [1.0, 0.25, 0.0]])
    expected = torch.stack((0.5 * lines[0] + 2 * lines[2], lines[3] + 0.25 * lines[4]))
    lines[[1, 5]] = torch.nan
    check(weighted_sum(lines, weights), expected, torch.float32)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("groups", "best_groups", "judges"), [(1, 1, 1), (4, 2, 1), (4, 2, 2)])
def test_select_experts(score, renormalize, biased, groups, best_groups, judges) -> None:
    """Against the words of the docstring, one token and one number at a time."""
    rule, experts = TopK(3, score, renormalize, 1.5, groups, best_groups, judges), 12
    logits, bias = torch.randn(7, experts), torch.randn(experts) if biased else None
    weights, ids = select_experts(logits, bias, rule)
    assert weights.dtype is torch.float32 and ids.dtype is torch.int32
    for token, line in enumerate(logits.double().tolist()):
        total = sum(map(math.exp, line))
        scores = [math.exp(x) / total if score == "softmax" else 1 / (1 + math.exp(-x)) for x in line]
        rank = line if bias is None else [s + b for s, b in zip(scores, bias.tolist())]
        size = experts // groups
        quality = [sum(sorted(rank[g * size : (g + 1) * size])[-judges:]) for g in range(groups)]
        best = sorted(range(groups), key=quality.__getitem__)[-best_groups:]
        chosen = sorted((e for e in range(experts) if e // size in best), key=rank.__getitem__)[:-4:-1]
        share = sum(scores[e] for e in chosen) if renormalize else 1
        assert ids[token].tolist() == chosen
        check(weights[token], torch.tensor([1.5 * scores[e] / share for e in chosen]), torch.float32)


def test_apply_penalty() -> None:
    vocab = 50
    outputs, prompts = torch.randint(0, 4, (3, vocab)), torch.randint(0, 2, (3, vocab))
    outputs[1], prompts[1] = 0, 0
    repetition, presence, frequency = [1.7, 2.0, 0.6], [0.5, 1.0, -1.5], [0.25, 1.0, -0.5]
    input_penalty = [False, True, True]
    logits = torch.randn(4, vocab)
    logits[0, 7] = -torch.inf
    rows = [2, 0, 1, 0]
    ours = logits.clone()
    counts = (2 * outputs + prompts).int()
    apply_penalty(
        ours, ints(rows), counts, *(torch.tensor(x) for x in (repetition, presence, frequency, input_penalty))
    )
    for line, row in enumerate(rows):
        for token in range(vocab):
            expected = logits[line, token].item()
            n = outputs[row, token].item()
            if n or prompts[row, token]:
                expected = expected / repetition[row] if expected > 0 else expected * repetition[row]
            n += prompts[row, token].item() * input_penalty[row]
            expected -= presence[row] * (n > 0) + frequency[row] * n
            assert math.isclose(ours[line, token].item(), expected, abs_tol=1e-5)
    assert torch.equal(ours[2], logits[2])
