"""Sampling: every wish of a request holds for its row and for no other."""

import numpy as np
import pytest
import torch
from transformers import ExponentialDecayLengthPenalty

from lightllm.common.sampling.sampler import Sampler
from lightllm.common.sampling.sampling_batch import RowStart, SamplingBatch
from lightllm.server.core.messages import NewRow, pack
from lightllm.server.core.sampling_params import RequestLimits, SamplingParams
from lightllm.server.router.model_infer.batch_builder import row_sampling

CPU = torch.device("cpu")
VOCAB, ROWS = 97, 12
LIMITS = RequestLimits(max_total_tokens=1000, vocab_size=VOCAB, eos_token_ids=(5,))


def start(row: int, prompt: list[int], output: list[int] | None = None, sample: int = 0, **parameters) -> RowStart:
    resolved = SamplingParams(**parameters).resolve(LIMITS, len(prompt))
    ids = pack(prompt + (output or []), np.int32)
    new = NewRow(row, 8 + sample, ids, len(prompt), resolved)
    return RowStart(row, np.frombuffer(ids, np.int32), len(prompt), row_sampling(new))


def batch(rows: list[int], output_index: list[int]) -> SamplingBatch:
    host_rows, host_index = np.array(rows, np.int32), np.array(output_index, np.int32)
    return SamplingBatch(host_rows, host_index, torch.tensor(rows), torch.from_numpy(host_index))


def logits_of(lines: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(lines, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def first_token(logits: torch.Tensor, **parameters) -> int:
    sampler = Sampler(ROWS, VOCAB, CPU)
    sampler.start([start(0, [1, 2], **parameters)])
    return int(sampler(logits[None], batch([0], [0])).tokens[0])


def test_greedy_takes_the_lowest_id_of_a_tie():
    logits = torch.zeros(VOCAB)
    logits[[40, 70]] = 9.0
    assert first_token(logits) == 40


def test_draws_follow_the_distribution():
    logits = torch.full((VOCAB,), -torch.inf)
    logits[10:13] = torch.tensor([0.665, 0.245, 0.090]).log()
    sampler, rows = Sampler(ROWS, VOCAB, CPU), list(range(ROWS))
    sampler.start([start(row, [1], temperature=1.0, seed=row) for row in rows])
    tokens = torch.cat([sampler(logits.expand(ROWS, -1), batch(rows, [i] * ROWS)).tokens for i in range(400)])
    shares = torch.bincount(tokens, minlength=13)[10:13] / len(tokens)
    assert torch.allclose(shares, torch.tensor([0.665, 0.245, 0.090]), atol=0.03)


def test_same_seed_same_tokens_alone_and_in_a_batch():
    wishes = [
        {},
        dict(temperature=0.7, seed=1),
        dict(temperature=1.5, top_p=0.8, seed=2),
        dict(temperature=1.0, top_k=5, seed=1),
        dict(temperature=1.0, min_p=0.1, seed=1, repetition_penalty=1.3),
        dict(temperature=1.0, seed=9, logit_bias={3: 4.0}, presence_penalty=1.0),
        dict(temperature=1.0, seed=9, allowed_token_ids=[7, 8, 9]),
        dict(do_sample=False, min_new_tokens=20, frequency_penalty=0.5),
    ]
    steps = [logits_of(len(wishes), seed) for seed in range(16)]
    together = Sampler(ROWS, VOCAB, CPU)
    together.start([start(row, [1, 2, 3], **wish) for row, wish in enumerate(wishes)])
    rows = list(range(len(wishes)))
    expected = torch.stack([together(logits, batch(rows, [i] * len(rows))).tokens for i, logits in enumerate(steps)])
    for line, wish in enumerate(wishes):
        alone = Sampler(ROWS, VOCAB, CPU)
        alone.start([start(11, [1, 2, 3], **wish)])
        tokens = [int(alone(logits[line : line + 1], batch([11], [i])).tokens[0]) for i, logits in enumerate(steps)]
        assert tokens == expected[:, line].tolist(), wish
    reversed_rows = Sampler(ROWS, VOCAB, CPU)
    reversed_rows.start([start(row, [1, 2, 3], **wish) for row, wish in enumerate(wishes)])
    for i, logits in enumerate(steps):
        tokens = reversed_rows(logits.flip(0), batch(rows[::-1], [i] * len(rows))).tokens.flip(0)
        assert torch.equal(tokens, expected[i])


def test_samples_of_one_request_differ():
    sampler = Sampler(ROWS, VOCAB, CPU)
    sampler.start([start(i, [1], sample=i, n=8, temperature=2.0, seed=4) for i in range(8)])
    tokens = [sampler(logits_of(1).expand(8, -1), batch(list(range(8)), [i] * 8)).tokens for i in range(8)]
    assert len({tuple(column) for column in torch.stack(tokens, 1).tolist()}) == 8


def penalised(
    logits: torch.Tensor,
    prompt: list[int],
    output: list[int],
    repetition=1.0,
    presence=0.0,
    frequency=0.0,
    inputs=False,
) -> torch.Tensor:
    """Brute force, token by token."""
    result = logits.clone()
    for token in range(VOCAB):
        if token in prompt + output:
            result[token] = result[token] / repetition if result[token] > 0 else result[token] * repetition
        n = output.count(token) + (inputs and token in prompt)
        result[token] -= presence * (n > 0) + frequency * n
    return result


@pytest.mark.parametrize("inputs", [False, True])
def test_penalties_equal_brute_force_also_after_a_resume(inputs):
    wish = dict(repetition_penalty=1.7, presence_penalty=0.9, frequency_penalty=0.4, input_penalty=inputs)
    prompt, output = [4, 4, 9, 30], [9, 11]
    sampler = Sampler(ROWS, VOCAB, CPU)
    sampler.start([start(3, prompt, output, **wish), start(5, prompt)])
    for i in range(2, 30):
        logits = logits_of(1, i)[0]
        tokens = sampler(torch.stack((logits, logits)), batch([3, 5], [i, i])).tokens.tolist()
        expected = penalised(logits, prompt, output, 1.7, 0.9, 0.4, inputs)
        assert tokens == [int(expected.argmax()), int(logits.argmax())]
        output.append(tokens[0])
    sampler.start([start(3, [50], **wish)])  # the next sequence of the row starts from nothing
    logits = logits_of(1, 99)[0]
    expected = penalised(logits, [50], [], 1.7, 0.9, 0.4)
    assert int(sampler(logits[None], batch([3], [0])).tokens[0]) == int(expected.argmax())


def test_penalties_of_the_bug_bank():
    """Case 21: repetition covers the prompt, presence and frequency do not (F2r: A -> B 2, C 1, D 0; others -> A)."""
    a, b, c, d = 32, 33, 34, 35
    scores = torch.zeros(VOCAB, VOCAB)
    scores[a, [b, c, d]] = torch.tensor([2.0, 1.0, 0.0])
    scores[[b, c, d], a] = 8.0

    def generate(n: int, **wish) -> list[int]:
        sampler, last, tokens = Sampler(ROWS, VOCAB, CPU), a, []
        sampler.start([start(0, [b, a], **wish)])
        for i in range(n):
            last = int(sampler(scores[last][None], batch([0], [i])).tokens[0])
            tokens.append(last)
        return tokens

    assert generate(6) == [b, a, b, a, b, a]
    assert generate(6, repetition_penalty=3.0) == [c, a, b, a, b, a]
    assert generate(3, presence_penalty=1.5) == [b, a, c]


def test_min_new_tokens_masks_stop_ids_until_the_last_of_them():
    logits = torch.zeros(VOCAB)
    logits[5], logits[6], logits[7] = 9.0, 8.0, 7.0
    sampler = Sampler(ROWS, VOCAB, CPU)
    sampler.start([start(0, [1], min_new_tokens=3, stop_token_ids=[6]), start(1, [1])])
    tokens = [sampler(torch.stack((logits, logits)), batch([0, 1], [i, i])).tokens.tolist() for i in range(4)]
    assert tokens == [[7, 5], [7, 5], [5, 5], [5, 5]]


def test_bias_and_allowed_ids():
    logits = logits_of(1)[0]
    assert first_token(logits, logit_bias={50: 100.0}) == 50
    best = int(logits.argmax())
    assert first_token(logits, logit_bias={best: -100.0}) == int(logits.topk(2).indices[1])
    assert first_token(logits, allowed_token_ids=[60, 61, 62]) == 60 + int(logits[60:63].argmax())
    assert first_token(logits, allowed_token_ids=[60, 61], logit_bias={61: 100.0, 62: 100.0}) == 61


def test_length_decay_is_that_of_transformers():
    prompt, wish = [1, 2, 3], (4, 1.3)
    theirs = ExponentialDecayLengthPenalty(wish, [5], len(prompt))
    sampler = Sampler(ROWS, VOCAB, CPU)
    sampler.start([start(0, prompt, exponential_decay_length_penalty=wish)])
    for i in range(40):
        logits = logits_of(1, i)
        expected = theirs(torch.zeros(1, len(prompt) + i, dtype=torch.long), logits.clone())
        assert torch.equal(sampler(logits, batch([0], [i])).tokens, expected.argmax(-1))


def test_length_decay_never_overflows():
    sampler = Sampler(ROWS, VOCAB, CPU)
    wish = dict(exponential_decay_length_penalty=(0, 1e300), min_new_tokens=900, max_new_tokens=990)
    sampler.start([start(0, [1], **wish)])
    for index, expected in ((500, False), (950, True)):
        token = int(sampler(logits_of(1), batch([0], [index])).tokens[0])
        assert (token == 5) == expected


def test_logprobs_are_those_of_the_raw_logits():
    sampler = Sampler(ROWS, VOCAB, CPU)
    wish = dict(logit_bias={3: 50.0}, repetition_penalty=2.0, allowed_token_ids=[3, 4], logprobs=4)
    sampler.start([start(0, [4, 5], **wish), start(1, [1], logprobs=2), start(2, [1])])
    logits = logits_of(3)
    raw = logits.clone()
    sampled = sampler(logits, batch([0, 1, 2], [0, 0, 0]))
    expected = raw.log_softmax(-1)
    assert torch.equal(logits, raw)
    assert torch.allclose(sampled.logprobs, expected.gather(1, sampled.tokens[:, None])[:, 0])
    assert sampled.tokens[0] == 3
    assert sampled.top is not None and sampled.top.lines == [0, 1] and sampled.top.counts == [4, 2]
    assert torch.equal(sampled.top.ids, expected[:2].topk(4).indices)
