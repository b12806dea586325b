"""The sampler's meaning: against transformers' warpers, and the statistics and independence of its noise."""

import pytest
import torch
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from lightllm.common.basemodel.triton_kernel.sampling import gumbel_noise, sample


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def draw(
    logits: torch.Tensor,
    temperature: float = 1.0,
    top_k: int = -1,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seeds: torch.Tensor | None = None,
) -> torch.Tensor:
    count = len(logits)
    zeros = torch.zeros(count, dtype=torch.int32)
    temperatures, top_ks, top_ps, min_ps = (torch.full((count,), x) for x in (temperature, top_k, top_p, min_p))
    seeds = torch.arange(count) if seeds is None else seeds
    last_token = torch.zeros(count, dtype=torch.int64)
    columns = (temperatures, top_ks.int(), top_ps, min_ps, seeds, zeros, last_token)
    tokens, logprobs = sample(logits, torch.arange(count), zeros, *columns)
    assert last_token.tolist() == tokens.tolist()
    expected = logits.log_softmax(-1).gather(1, last_token[:, None]).squeeze(1)
    torch.testing.assert_close(logprobs.view(torch.float32), expected, atol=1e-5, rtol=1e-5)
    return last_token


def chi_square_bound(degrees: int) -> float:
    """A value that chi-square exceeds with probability about 1e-6 (Wilson-Hilferty)."""
    return degrees * (1 - 2 / (9 * degrees) + 4.75 * (2 / (9 * degrees)) ** 0.5) ** 3


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    expected = probabilities * counts.sum()
    return ((counts - expected) ** 2 / expected).sum().item()


@pytest.mark.parametrize("along", ["seed", "sample_index", "output_index", "high seed"])
def test_draws_follow_the_distribution_along_every_input(along: str) -> None:
    probabilities = torch.tensor([0.5, 0.2, 0.1, 0.1, 0.05, 0.03, 0.015, 0.005])
    count = 40_000
    running = torch.arange(count)
    seed = {"seed": running, "high seed": running << 32}.get(along, torch.full((count,), 7))
    zeros = torch.zeros(count, dtype=torch.int32)
    sample_index, output_index = (running.int() if along == x else zeros for x in ("sample_index", "output_index"))
    noise = gumbel_noise(seed, sample_index, output_index, 8)
    counts = (probabilities.log() + noise).argmax(1).bincount(minlength=8).double()
    assert chi_square(counts, probabilities.double()) < chi_square_bound(7)


def test_every_token_of_a_large_vocabulary_is_equally_likely() -> None:
    vocab, draws = 100_000, 200
    zeros = torch.zeros(1, dtype=torch.int32)
    noise = (gumbel_noise(torch.tensor([seed]), zeros, zeros, vocab) for seed in range(draws))
    best = [(*line.topk(2).values[0].tolist(), line.argmax().item()) for line in noise]
    assert all(first > second for first, second, _ in best)  # the winner is never decided by rounding
    counts = (torch.tensor([winner for *_, winner in best]) // (vocab // 10)).bincount(minlength=10).double()
    assert chi_square(counts, torch.full((10,), 1 / 10).double()) < chi_square_bound(9)


def test_noise_is_gumbel() -> None:
    zeros = torch.zeros(20, dtype=torch.int32)
    noise = gumbel_noise(torch.randint(-(2**63), 2**63 - 1, (20,)), zeros, zeros, 50_000)
    assert noise.isfinite().all()
    uniform = (-(-noise.double()).exp()).exp()
    counts = (uniform * 64).long().flatten().bincount(minlength=64).double()
    assert chi_square(counts, torch.full((64,), 1 / 64).double()) < chi_square_bound(63)
    pairs = (uniform * 8).long()  # neighbouring tokens, and the same token of two lines, are independent
    for left, right in ((pairs[:, :-1], pairs[:, 1:]), (pairs[:-1], pairs[1:])):
        table = (left * 8 + right).flatten().bincount(minlength=64).double()
        assert chi_square(table, torch.full((64,), 1 / 64).double()) < chi_square_bound(63)


def test_a_draw_does_not_depend_on_the_batch() -> None:
    logits = torch.randn(64, 1000)
    seeds = torch.randint(-(2**63), 2**63 - 1, (64,))
    together = draw(logits, 0.9, 50, 0.9, 0.01, seeds)
    order = torch.randperm(64)
    assert torch.equal(draw(logits[order], 0.9, 50, 0.9, 0.01, seeds[order]), together[order])
    for i in range(0, 64, 9):
        assert draw(logits[i : i + 1], 0.9, 50, 0.9, 0.01, seeds[i : i + 1]) == together[i]


SETTINGS = [(1.0, 5, 1.0, 0.0), (0.7, -1, 0.8, 0.0), (1.5, -1, 1.0, 0.1), (0.8, 40, 0.6, 0.05), (3.0, 700, 0.99, 0.0)]


@pytest.mark.parametrize("temperature, top_k, top_p, min_p", SETTINGS)
@pytest.mark.parametrize("spread", [0.1, 3.0])
def test_kept_tokens_are_those_of_transformers(
    temperature: float, top_k: int, top_p: float, min_p: float, spread: float
) -> None:
    vocab, count = 1000, 400
    line = spread * torch.randn(1, vocab)
    expected = TemperatureLogitsWarper(temperature)(None, line)
    if top_k > 0:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(None, expected)
    if min_p > 0:
        expected = MinPLogitsWarper(min_p)(None, expected)
    seeds = torch.arange(count)
    zeros = torch.zeros(count, dtype=torch.int32)
    noisy = expected + gumbel_noise(seeds, zeros, zeros, vocab)
    assert torch.equal(draw(line.repeat(count, 1), temperature, top_k, top_p, min_p, seeds), noisy.argmax(1))


def test_top_p_keeps_ties_together_and_the_likeliest_always() -> None:
    logits = torch.tensor([[0.4, 0.2, 0.2, 0.2]]).log().repeat(500, 1)
    assert set(draw(logits, top_p=0.3).tolist()) == {0}
    assert set(draw(logits, top_p=0.5).tolist()) == {0, 1, 2, 3}
    assert set(draw(logits, top_k=2).tolist()) == {0, 1, 2, 3}
    assert set(draw(logits, top_p=1e-6).tolist()) == {0}


@pytest.mark.parametrize("temperature", [1e-5, 1e-4, 1e-3])
def test_tiny_temperatures_are_greedy(temperature: float) -> None:
    logits = 10 * torch.randn(50, 300)
    for rest in ({}, {"top_k": 10}, {"top_p": 0.9}, {"min_p": 0.1}):
        assert torch.equal(draw(logits, temperature, **rest), logits.argmax(1))


def test_masked_tokens_are_never_drawn() -> None:
    logits = torch.full((500, 100), -torch.inf)
    logits[:, [3, 60]] = torch.tensor([-2.0, -1.0])
    for rest in ({}, {"top_k": 10}, {"top_p": 0.95}, {"min_p": 0.01}, {"temperature": 100.0}):
        assert set(draw(logits, **rest).tolist()) == {3, 60}


def test_greedy_takes_the_lowest_id_on_ties() -> None:
    logits = torch.randn(20, 5000).bfloat16().float()
    logits[:, [4000, 77, 1234]] = 9.0
    assert set(draw(logits, 0.0).tolist()) == {77}
