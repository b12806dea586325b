"""One token per line, and its logprob: temperature, top_k, top_p, min_p, then Gumbel-max with hashed noise."""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from lightllm.common.triton_utils.dispatch import op

_CHUNK = 4096  # logits of one program of the scan
_GROUPS = 128  # groups of a chunk of which a line with top_k notes the largest logit
_CAPACITY = 1024  # candidates that a line with top_k gathers; with more it goes through all logits
_LOOKS = (256, 4096)  # among how many likeliest tokens the twin looks for a top_p threshold before it sorts them all


def _signed(x: int) -> int:
    return x - (1 << 32) if x >= 1 << 31 else x


def _mix_(h: Tensor) -> Tensor:
    """lowbias32 (C. Wellons, hash-prospector) in place on int32, whose products wrap as uint32's do."""
    h ^= (h >> 16).bitwise_and_(0xFFFF)
    h *= 0x7FEB352D
    h ^= (h >> 15).bitwise_and_(0x1FFFF)
    h *= _signed(0x846CA68B)
    h ^= (h >> 16).bitwise_and_(0xFFFF)
    return h


def gumbel_noise(seed: Tensor, sample_index: Tensor, output_index: Tensor, vocab: int) -> Tensor:
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


def _top_p_threshold(x: Tensor, top_p: Tensor) -> Tensor:
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
    logits: Tensor,
    rows: Tensor,
    output_index: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    sample_index: Tensor,
    last_token: Tensor,
) -> Tensor:
    """logits [S, V] (biased, penalised, masked with -inf) -> int32 [2, S]: tokens, and the bits of their logprobs
    float32, log_softmax of these logits in float32. Sets last_token[rows] = tokens (int64 [R]).

    Line s belongs to row rows[s] (int) of the per-row tables [R]: temperature float32 (0: argmax), top_k int32 (<= 0:
    off), top_p float32 (1: off), min_p float32 (0: off), applied one after the other on logits / temperature: top_k
    keeps logits >= the k-th largest, top_p keeps a token iff the mass of strictly likelier ones is < top_p, min_p keeps
    p >= min_p * max p. seed int64, sample_index int32 and output_index int32 [S] feed the noise. Ties go to the lowest
    id.
    """
    rows, logits = rows.long(), logits.float()
    tokens = logits.argmax(-1)
    lines = temperature.index_select(0, rows).nonzero().squeeze(1)
    if len(lines):
        chosen = rows[lines]
        settings = [table.index_select(0, chosen) for table in (temperature, top_k, top_p, min_p, seed, sample_index)]
        tokens[lines] = _draw(logits[lines], settings, output_index[lines])
    last_token.index_copy_(0, rows, tokens)
    logprobs = logits.gather(1, tokens[:, None]).squeeze(1) - logits.logsumexp(-1)
    return torch.stack((tokens.to(torch.int32), logprobs.view(torch.int32)))


def _draw(logits: Tensor, settings: list[Tensor], output_index: Tensor) -> Tensor:
    """Tokens int64 [S] of lines that are not greedy; settings are temperature to sample_index of each line."""
    temperature, top_k, top_p, min_p, seed, sample_index = settings
    x = logits * (1 / temperature)[:, None]
    vocab = x.shape[1]
    if bool((top_k > 0).any()):
        k = torch.where(top_k > 0, top_k, 1).clamp(max=vocab).long()
        threshold = x.topk(int(k.max()), -1).values.gather(1, k[:, None] - 1)
        x.masked_fill_((x < threshold) & (top_k[:, None] > 0), -torch.inf)
    if bool((top_p < 1).any()):
        x.masked_fill_(x < _top_p_threshold(x, top_p), -torch.inf)
    if bool((min_p > 0).any()):
        x.masked_fill_(x < x.amax(-1, keepdim=True) + min_p.log()[:, None], -torch.inf)
    return x.add_(gumbel_noise(seed, sample_index, output_index, vocab)).argmax(-1)


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
def _keys(seed, sample_index, output_index):
    """The 64 hashed bits by which a line is known."""
    low = seed.to(tl.uint32)
    high = (seed >> 32).to(tl.uint32)
    sample_index = sample_index.to(tl.uint32)
    output_index = output_index.to(tl.uint32)
    key = _mix32(_mix32(_mix32(_mix32(low) ^ high) ^ sample_index) ^ output_index)
    return key, _mix32(_mix32(_mix32(_mix32(high ^ 0x9E3779B9) ^ low) + output_index) + sample_index)


@triton.jit
def _gumbel(token, key, tweak):
    h = _mix32(_mix32(token.to(tl.uint32) ^ key) ^ tweak)
    v = tl.minimum(((h >> 1).to(tl.int32).to(tl.float32) + 0.5) * 4.656612873077393e-10, 0.9999999403953552)
    return -tl.log(tl.where(v < 0.00390625, v * (1 + v * (0.5 + v * 0.33333334)), -tl.log(1 - v)))


@triton.jit
def _scaled(Logits, token, vocab, inverse):
    return tl.load(Logits + token, mask=token < vocab, other=-float("inf")).to(tl.float32) * inverse


@triton.jit
def _first_of_largest(value, token, none):
    """The lowest token whose value is the largest; `none` if no value is a number."""
    return tl.min(tl.where(value == tl.max(value, 0), token, none), 0)


@triton.jit(do_not_specialize=["Rows", "OutputIndex"])
def _scan_kernel(
    Logits, Rows, OutputIndex, Temperature, TopK, TopP, MinP, Seed, SampleIndex, Peaks, Sums, Best, Groups, Counts,
    stride, vocab, CHUNK: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Program (line, chunk of its logits): largest logit, sum of exponentials behind it, and what the draw needs: how
    good the best token of an unfiltered line is, the largest logits of small groups of a line with top_k, no candidates
    yet."""
    line = tl.program_id(0).to(tl.int64)
    tl.store(Counts + line, 0)
    part = line * tl.num_programs(1) + tl.program_id(1)
    token = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    row = tl.load(Rows + line).to(tl.int64)
    temperature = tl.load(Temperature + row)
    x = _scaled(Logits + line * stride, token, vocab, 1.0)
    peak = tl.max(x, 0)
    tl.store(Peaks + part, peak)
    tl.store(Sums + part, tl.sum(tl.exp(x - tl.where(peak == -float("inf"), 0.0, peak)), 0))
    best = peak
    if temperature > 0:
        x *= tl.div_rn(1.0, temperature)
        top_k = tl.load(TopK + row)
        if top_k > 0:
            group = tl.arange(0, GROUPS)
            tl.store(Groups + part * GROUPS + group, tl.max(tl.reshape(x, [GROUPS, CHUNK // GROUPS]), 1))
        elif (tl.load(TopP + row) == 1) & (tl.load(MinP + row) == 0):
            key, tweak = _keys(tl.load(Seed + row), tl.load(SampleIndex + row), tl.load(OutputIndex + line))
            best = tl.max(x + _gumbel(token, key, tweak), 0)
    tl.store(Best + part, best)


@triton.jit
def _count(Logits, threshold, vocab, inverse, BLOCK: tl.constexpr):
    """How many finite logits reach the threshold."""
    reached = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab, BLOCK):
        x = _scaled(Logits, start + tl.arange(0, BLOCK), vocab, inverse)
        reached += ((x >= threshold) & (x > -float("inf"))).to(tl.int32)
    return tl.sum(reached, 0)


@triton.jit
def _mass(Logits, order, peak, vocab, inverse, BLOCK: tl.constexpr):
    """The sum of exp(x - peak) over the logits whose order is at least `order`."""
    threshold = _float_of(order)
    masses = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        x = _scaled(Logits, start + tl.arange(0, BLOCK), vocab, inverse)
        masses += tl.where(x >= threshold, tl.exp(x - peak), 0.0)
    return tl.sum(masses, 0)


@triton.jit
def _draw_among(Keys, count, peak, top_k, top_p, min_p, key, tweak, none, CAPACITY: tl.constexpr):
    """The draw from gathered candidates, which hold the top_k: (order of the logit) << 32 | token."""
    place = tl.arange(0, CAPACITY)
    packed = tl.load(Keys + place, mask=place < count, other=-0x7FFFFFFFFFFFFFFF)
    packed = tl.sort(packed, descending=True)
    x = tl.where(place < count, _float_of(packed >> 32), -float("inf"))
    token = (packed & 0x7FFFFFFF).to(tl.int32)
    threshold = tl.max(tl.where(place == tl.minimum(top_k, count) - 1, x, -float("inf")), 0)
    mass = tl.where(x >= threshold, tl.exp(x - peak), 0.0)
    enough = tl.where(top_p < 1, top_p * tl.sum(mass, 0), float("inf"))
    likely = (x >= threshold) & (tl.cumsum(mass, 0) - mass < enough)
    threshold = tl.min(tl.where(likely, x, float("inf")), 0)
    if min_p > 0:
        threshold = tl.maximum(threshold, peak + tl.log(min_p))
    return _first_of_largest(tl.where(x >= threshold, x + _gumbel(token, key, tweak), -float("inf")), token, none)


@triton.jit
def _draw_by_rejection(
    Logits, floor, peak, top_p, min_p, key, tweak, vocab, inverse, BLOCK: tl.constexpr
):  # fmt: skip
    """The draw from the logits whose order is at least `floor`: without top_p first; while that token has too much mass
    above it, again from what is above it."""
    enough = 0.0
    if top_p < 1:
        enough = top_p * _mass(Logits, floor, peak, vocab, inverse, BLOCK)
    if min_p > 0:
        floor = tl.maximum(floor, _order_of(peak + tl.log(min_p)))
    winner = vocab
    rejected = 1
    while rejected > 0:
        threshold = _float_of(floor)
        best = tl.full([BLOCK], -float("inf"), tl.float32)
        where = tl.arange(0, BLOCK)
        for start in range(0, vocab, BLOCK):
            token = start + tl.arange(0, BLOCK)
            x = _scaled(Logits, token, vocab, inverse)
            x = tl.where(x >= threshold, x + _gumbel(token, key, tweak), -float("inf"))
            better = x > best
            best = tl.where(better, x, best)
            where = tl.where(better, token, where)
        winner = _first_of_largest(best, where, vocab)
        rejected = 0
        if (top_p < 1) & (winner < vocab):
            floor = _order_of(tl.load(Logits + winner).to(tl.float32) * inverse) + 1
            if _mass(Logits, floor, peak, vocab, inverse, BLOCK) >= enough:
                rejected = 1
    return winner


@triton.jit(do_not_specialize=["Rows", "OutputIndex"])
def _choose_kernel(
    Logits, Rows, OutputIndex, Temperature, TopK, TopP, MinP, Seed, SampleIndex, LastToken, Peaks, Sums, Best, Groups,
    Keys, Counts, Out, stride, vocab, chunks,
    CHUNK: tl.constexpr, GROUPS: tl.constexpr, CHUNKS: tl.constexpr, ALL_GROUPS: tl.constexpr,
    CAPACITY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (line): the token out of what the scan found."""
    line = tl.program_id(0).to(tl.int64)
    Logits += line * stride
    chunk = tl.arange(0, CHUNKS)
    part = line * chunks + chunk
    peaks = tl.load(Peaks + part, mask=chunk < chunks, other=-float("inf"))
    peak = tl.max(peaks, 0)
    sums = tl.load(Sums + part, mask=chunk < chunks, other=0.0)
    total = tl.sum(tl.where(sums > 0, sums * tl.exp(peaks - peak), 0.0), 0)

    row = tl.load(Rows + line).to(tl.int64)
    temperature = tl.load(Temperature + row)
    top_k = tl.load(TopK + row)
    top_p = tl.load(TopP + row)
    min_p = tl.load(MinP + row)
    winner = vocab
    if (temperature > 0) & ((top_k > 0) | (top_p < 1) | (min_p > 0)):
        inverse = tl.div_rn(1.0, temperature)
        peak_x = peak * inverse
        key, tweak = _keys(tl.load(Seed + row), tl.load(SampleIndex + row), tl.load(OutputIndex + line))
        least = _order_of(tl.full((), -float("inf"), tl.float32))
        if (top_k > 0) & (top_k < vocab):
            # a threshold that top_k groups reach, so top_k logits do; to 2^12 in the order, for it need not be the best
            group = tl.arange(0, ALL_GROUPS)
            largest = tl.load(
                Groups + line * chunks * GROUPS + group, mask=group < chunks * GROUPS, other=-float("inf")
            )
            bound = least
            most = _order_of(peak_x)
            while most - bound > 4096:
                middle = (bound + most) >> 1
                if tl.sum((largest >= _float_of(middle)).to(tl.int32), 0) >= top_k:
                    bound = middle
                else:
                    most = middle - 1
            count = _count(Logits, _float_of(bound), vocab, inverse, BLOCK)
            if count <= CAPACITY:
                for start in range(0, vocab, BLOCK):
                    token = start + tl.arange(0, BLOCK)
                    x = _scaled(Logits, token, vocab, inverse)
                    found = (x >= _float_of(bound)) & (x > -float("inf"))
                    place = tl.atomic_add(Counts + line + tl.zeros([BLOCK], tl.int32), 1, mask=found)
                    tl.store(Keys + line * CAPACITY + place, (_order_of(x) << 32) | token.to(tl.int64), mask=found)
                tl.debug_barrier()
                winner = _draw_among(
                    Keys + line * CAPACITY, count, peak_x, top_k, top_p, min_p, key, tweak, vocab, CAPACITY
                )
            else:
                # the highest threshold that at least top_k logits reach
                least = bound
                most = _order_of(peak_x)
                while least < most:
                    middle = (least + most + 1) >> 1
                    if _count(Logits, _float_of(middle), vocab, inverse, BLOCK) >= top_k:
                        least = middle
                    else:
                        most = middle - 1
        if winner == vocab:
            winner = _draw_by_rejection(Logits, least, peak_x, top_p, min_p, key, tweak, vocab, inverse, BLOCK)
    else:
        best = tl.load(Best + part, mask=chunk < chunks, other=-float("inf"))
        token = _first_of_largest(best, chunk, chunks) * CHUNK + tl.arange(0, CHUNK)
        x = _scaled(Logits, token, vocab, 1.0)
        if temperature > 0:
            key, tweak = _keys(tl.load(Seed + row), tl.load(SampleIndex + row), tl.load(OutputIndex + line))
            x = x * tl.div_rn(1.0, temperature) + _gumbel(token, key, tweak)
        winner = _first_of_largest(x, token, vocab)
    winner = tl.minimum(winner, vocab - 1)  # logits that are no numbers still give a token
    logprob = tl.load(Logits + winner).to(tl.float32) - peak - tl.log(total)
    tl.store(LastToken + row, winner.to(tl.int64))
    tl.store(Out + line, winner)
    tl.store(Out + tl.num_programs(0) + line, logprob.to(tl.int32, bitcast=True))


@sample.kernel
def _sample(
    logits: Tensor,
    rows: Tensor,
    output_index: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    sample_index: Tensor,
    last_token: Tensor,
) -> Tensor:
    lines, vocab = logits.shape
    device = logits.device
    out = torch.empty(2, lines, dtype=torch.int32, device=device)
    if lines == 0:
        return out
    chunks = triton.cdiv(vocab, _CHUNK)
    # Not parts of one: their alignment, by which kernels are compiled, would depend on the number of lines.
    peaks, sums, best = (torch.empty(lines, chunks, dtype=torch.float32, device=device) for _ in range(3))
    groups = torch.empty(lines, chunks * _GROUPS, dtype=torch.float32, device=device)
    keys = torch.empty(lines, _CAPACITY, dtype=torch.int64, device=device)
    counts = torch.empty(lines, dtype=torch.int32, device=device)
    settings = (logits, rows, output_index, temperature, top_k, top_p, min_p, seed, sample_index)
    _scan_kernel[(lines, chunks)](
        *settings, peaks, sums, best, groups, counts, logits.stride(0), vocab,
        CHUNK=_CHUNK, GROUPS=_GROUPS,
        num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    _choose_kernel[(lines,)](
        *settings, last_token, peaks, sums, best, groups, keys, counts, out, logits.stride(0), vocab, chunks,
        CHUNK=_CHUNK, GROUPS=_GROUPS, CHUNKS=triton.next_power_of_2(chunks),
        ALL_GROUPS=triton.next_power_of_2(chunks * _GROUPS), CAPACITY=_CAPACITY,
        BLOCK=min(8192, triton.next_power_of_2(vocab)),
        num_warps=16, enable_fp_fusion=False,
    )  # fmt: skip
    return out
