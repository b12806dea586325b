"""One draw per line: temperature, top_k, top_p, min_p, then Gumbel-max with noise hashed from integers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from lightllm.common.triton_utils.dispatch import op

_LOOKS = (256, 4096)  # among how many likeliest tokens the twin looks for a top_p threshold before it sorts them all


def _signed(x: int) -> int:
    return x - (1 << 32) if x >= 1 << 31 else x


def _mix_(h: torch.Tensor) -> torch.Tensor:
    """lowbias32 (C. Wellons, hash-prospector) in place on int32, whose products wrap as uint32's do."""
    h ^= (h >> 16).bitwise_and_(0xFFFF)
    h *= 0x7FEB352D
    h ^= (h >> 15).bitwise_and_(0x1FFFF)
    h *= _signed(0x846CA68B)
    h ^= (h >> 16).bitwise_and_(0xFFFF)
    return h


def gumbel_noise(
    seed: torch.Tensor, sample_index: torch.Tensor, output_index: torch.Tensor, vocab: int
) -> torch.Tensor:
    """Standard Gumbel noise float32 [S, vocab], a pure function of (seed, sample index, output index, token id).

    seed int64 [S], indices int32 [S]. A line is known by 64 hashed bits (key, tweak). 31 bits of hash give a uniform v;
    the exponential variate -log(1 - v) keeps its precision where it is small: there the winner of many tokens lives.
    """
    low, high = seed.to(torch.int32), (seed >> 32).to(torch.int32)
    key = _mix_(_mix_(_mix_(_mix_(low.clone()) ^ high) ^ sample_index) ^ output_index)
    tweak = _mix_(_mix_(_mix_(_mix_(high ^ _signed(0x9E3779B9)) ^ low) + output_index) + sample_index)
    token = torch.arange(vocab, dtype=torch.int32, device=seed.device)
    h = _mix_(_mix_(token ^ key[:, None]).bitwise_xor_(tweak[:, None]))
    v = (h >> 1).bitwise_and_(0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
    exponential = torch.where(v < 2.0**-8, v * (1 + v * (0.5 + v * 0.33333334)), (1 - v).log_().neg_())
    return exponential.log_().neg_()


def _top_p_threshold(x: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """[S, 1]: the lowest logit of x [S, V] that top_p < 1 keeps; -inf where top_p is 1."""
    peak = x.amax(-1, keepdim=True)
    whole = (x - peak).exp_().sum(-1, keepdim=True)
    for count in (*_LOOKS, x.shape[1]):
        ordered = x.topk(count, -1).values if count < x.shape[1] else x.sort(-1, descending=True).values
        mass = ((ordered - peak).exp_() / whole).cumsum(-1)
        if bool(((mass[:, -1] >= top_p) | (top_p >= 1)).all()):
            break
    likelier = F.pad(mass[:, :-1], (1, 0))
    last = (likelier < top_p[:, None]).sum(-1, keepdim=True) - 1
    return ordered.gather(1, last).masked_fill_(top_p[:, None] >= 1, -torch.inf)


@op
def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seed: torch.Tensor,
    sample_index: torch.Tensor,
    output_index: torch.Tensor,
) -> torch.Tensor:
    """logits float32 [S, V] (biased, penalised, masked with -inf) and per-line parameters [S] -> tokens int64 [S].

    temperature float32 (0: argmax), top_k int32 (<= 0: off), top_p float32 (1: off), min_p float32 (0: off), applied
    one after the other on logits / temperature: top_k keeps logits >= the k-th largest, top_p keeps a token iff the
    mass of strictly likelier ones is < top_p, min_p keeps p >= min_p * max p. seed int64, sample_index and output_index
    int32 feed the noise. Ties go to the lowest id.
    """
    tokens = logits.argmax(-1)
    lines = temperature.nonzero().squeeze(1)
    if len(lines) == 0:
        return tokens
    x = logits[lines] * (1 / temperature[lines])[:, None]
    top_k, top_p, min_p = top_k[lines], top_p[lines], min_p[lines]
    vocab = x.shape[1]
    if bool((top_k > 0).any()):
        k = torch.where(top_k > 0, top_k, 1).clamp(max=vocab).long()
        threshold = x.topk(int(k.max()), -1).values.gather(1, k[:, None] - 1)
        x.masked_fill_((x < threshold) & (top_k[:, None] > 0), -torch.inf)
    if bool((top_p < 1).any()):
        x.masked_fill_(x < _top_p_threshold(x, top_p), -torch.inf)
    if bool((min_p > 0).any()):
        x.masked_fill_(x < x.amax(-1, keepdim=True) + min_p.log()[:, None], -torch.inf)
    x += gumbel_noise(seed[lines], sample_index[lines], output_index[lines], vocab)
    tokens[lines] = x.argmax(-1)
    return tokens


@triton.jit
def _mix32(h):
    h ^= h >> 16
    h *= 0x7FEB352D
    h ^= h >> 15
    h *= 0x846CA68B
    return h ^ (h >> 16)


@triton.jit
def _float_of(order):
    """The float whose place among all floats (as an int32 that sorts like them) is `order`."""
    bits = order.to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def _order_of(x):
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def _sample_kernel(
    Logits, Temperature, TopK, TopP, MinP, Seed, SampleIndex, OutputIndex, Tokens, stride, vocab, BLOCK: tl.constexpr
):
    """Program (line). Thresholds by bisection over the 2^32 ordered floats: 32 passes over a line that sits in L2."""
    line = tl.program_id(0)
    Logits += line.to(tl.int64) * stride
    offs = tl.arange(0, BLOCK)
    temperature = tl.load(Temperature + line)
    greedy = temperature == 0
    inverse = 1.0
    threshold = -float("inf")
    key = tl.full((), 0, tl.uint32)
    tweak = tl.full((), 0, tl.uint32)
    if temperature > 0:
        inverse = tl.div_rn(1.0, temperature)
        seed = tl.load(Seed + line)
        low = seed.to(tl.uint32)
        high = (seed >> 32).to(tl.uint32)
        sample_index = tl.load(SampleIndex + line).to(tl.uint32)
        output_index = tl.load(OutputIndex + line).to(tl.uint32)
        key = _mix32(_mix32(_mix32(_mix32(low) ^ high) ^ sample_index) ^ output_index)
        tweak = _mix32(_mix32(_mix32(_mix32(high ^ 0x9E3779B9) ^ low) + output_index) + sample_index)

        top_k = tl.load(TopK + line)
        top_p = tl.load(TopP + line)
        min_p = tl.load(MinP + line)
        if (top_k > 0) | (top_p < 1) | (min_p > 0):
            peaks = tl.full([BLOCK], -float("inf"), tl.float32)
            for start in range(0, vocab, BLOCK):
                x = tl.load(Logits + start + offs, mask=start + offs < vocab, other=-float("inf")) * inverse
                peaks = tl.maximum(peaks, x)
            peak = tl.max(peaks, 0)
            bottom = _order_of(tl.full((), -float("inf"), tl.float32))
            top = _order_of(peak)
            if (top_k > 0) & (top_k < vocab):
                # the highest threshold that at least top_k logits reach
                least = bottom
                most = top
                while least < most:
                    middle = (least + most + 1) >> 1
                    candidate = _float_of(middle)
                    reached = tl.zeros([BLOCK], tl.int32)
                    for start in range(0, vocab, BLOCK):
                        x = tl.load(Logits + start + offs, mask=start + offs < vocab, other=-float("inf")) * inverse
                        reached += (x >= candidate).to(tl.int32)
                    if tl.sum(reached, 0) >= top_k:
                        least = middle
                    else:
                        most = middle - 1
                threshold = _float_of(least)
            if top_p < 1:
                # the lowest threshold above which there is less than top_p of what top_k has left
                masses = tl.zeros([BLOCK], tl.float32)
                for start in range(0, vocab, BLOCK):
                    x = tl.load(Logits + start + offs, mask=start + offs < vocab, other=-float("inf")) * inverse
                    masses += tl.where(x >= threshold, tl.exp(x - peak), 0.0)
                enough = tl.sum(masses, 0) * top_p
                least = _order_of(threshold)
                most = top
                while least < most:
                    middle = (least + most) >> 1
                    candidate = _float_of(middle)
                    masses = tl.zeros([BLOCK], tl.float32)
                    for start in range(0, vocab, BLOCK):
                        x = tl.load(Logits + start + offs, mask=start + offs < vocab, other=-float("inf")) * inverse
                        masses += tl.where(x > candidate, tl.exp(x - peak), 0.0)
                    if tl.sum(masses, 0) < enough:
                        most = middle
                    else:
                        least = middle + 1
                threshold = _float_of(most)
            if min_p > 0:
                threshold = tl.maximum(threshold, peak + tl.log(min_p))

    best = tl.full([BLOCK], -float("inf"), tl.float32)
    where = offs
    for start in range(0, vocab, BLOCK):
        token = start + offs
        x = tl.load(Logits + token, mask=token < vocab, other=-float("inf")) * inverse
        if not greedy:
            h = _mix32(_mix32(token.to(tl.uint32) ^ key) ^ tweak)
            v = tl.minimum(((h >> 1).to(tl.int32).to(tl.float32) + 0.5) * 4.656612873077393e-10, 0.9999999403953552)
            exponential = tl.where(v < 0.00390625, v * (1 + v * (0.5 + v * 0.33333334)), -tl.log(1 - v))
            x = tl.where(x >= threshold, x - tl.log(exponential), -float("inf"))
        better = x > best
        best = tl.where(better, x, best)
        where = tl.where(better, token, where)
    winner = tl.min(tl.where(best == tl.max(best, 0), where, vocab), 0)
    tl.store(Tokens + line, winner.to(tl.int64))


@sample.kernel
def _sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seed: torch.Tensor,
    sample_index: torch.Tensor,
    output_index: torch.Tensor,
) -> torch.Tensor:
    lines, vocab = logits.shape
    tokens = torch.empty(lines, dtype=torch.int64, device=logits.device)
    if lines:
        _sample_kernel[(lines,)](
            *(logits, temperature, top_k, top_p, min_p, seed, sample_index, output_index, tokens),
            *(logits.stride(0), vocab),
            BLOCK=min(8192, triton.next_power_of_2(vocab)),
            num_warps=16,
            enable_fp_fusion=False,
        )
    return tokens
