"""ModelRunner: plans in, results out, equal to transformers however the work is cut into steps."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.step_driver import (
    StepDriver,
    make_runner,
    random_prompts,
    reference_ids,
    reference_logprobs,
    save_random_model,
)

from lightllm.common.basemodel.attention import library_attention, token_backend
from lightllm.common.basemodel.layer_infer.template.feed_forward import GatedFeedForward
from lightllm.server.core.messages import StepPlan, pack, unpack

LENGTHS = [1, 2, 7, 15, 16, 17, 40, 90]
CHUNKS = [1, 7, 16, 10**6]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("rand")
    return path, save_random_model(path)


@pytest.fixture(scope="module")
def model(checkpoint):
    return checkpoint[1]


@pytest.fixture(scope="module")
def runner(checkpoint):
    return make_runner(checkpoint[0])


@pytest.fixture(scope="module")
def expected(model):
    return [reference_ids(model, prompt, 12) for prompt in random_prompts(LENGTHS)]


@pytest.mark.parametrize("chunk", CHUNKS)
def test_greedy_in_one_batch(runner, expected, chunk):
    driver = StepDriver(runner, chunk)
    sequences = [driver.sequence(prompt, max_new_tokens=12) for prompt in random_prompts(LENGTHS)]
    driver.run(sequences)
    assert [s.tokens for s in sequences] == expected


def test_the_last_layer_feeds_forward_the_sampled_tokens_alone(runner, monkeypatch):
    lines, feed_forward = [], GatedFeedForward.__call__

    def counted(self, x, w):
        lines.append(len(x))
        return feed_forward(self, x, w)

    monkeypatch.setattr(GatedFeedForward, "__call__", counted)
    driver = StepDriver(runner, chunk=30)
    driver.run([driver.sequence(random_prompts([40])[0], max_new_tokens=2)])
    assert lines == [30, 30, 10, 10, 1, 1, 1, 1]  # three layers


@pytest.mark.parametrize("library_from, neighbours", [(1, False), (16, False), (16, True)])
def test_chunks_of_some_length_go_to_the_library(checkpoint, expected, monkeypatch, library_from, neighbours):
    lengths, in_place = [], []

    def attend(q, kv, causal, scale):
        """What cuDNN does on GPUs."""
        k, v = (x.transpose(0, 1).repeat_interleave(q.shape[1] // kv.shape[1], 0) for x in kv.unbind(2))
        scores = scale * q[0] @ k.transpose(1, 2)
        if causal:
            lengths.append(q.shape[2])
            in_place.append(kv.untyped_storage().nbytes() > kv.nbytes)
            scores.masked_fill_(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
        return (scores.softmax(2) @ v)[None], scores.logsumexp(2)[None, :, :, None]

    monkeypatch.setattr(token_backend, "can_attend", lambda *shape: True)
    monkeypatch.setattr(library_attention, "_attend", attend)
    runner = make_runner(checkpoint[0])
    backend = token_backend.TokenAttentionBackend(library_from)
    monkeypatch.setattr(runner._builder, "_parts", replace(runner._builder._parts, backend=backend))
    prompts = random_prompts(LENGTHS)
    driver = StepDriver(runner, chunk=20)
    if neighbours:
        driver.slots.sort(reverse=True)
    sequences = [driver.sequence(prompt, max_new_tokens=12) for prompt in prompts]
    driver.run(sequences[:3], steps=2)
    driver.run(sequences)
    for sequence in sequences[3:]:  # alone
        driver.run([again := driver.sequence(sequence.prompt, max_new_tokens=12)])
        assert again.tokens == sequence.tokens
    assert [s.tokens for s in sequences] == expected
    assert lengths and min(lengths) >= library_from
    assert library_from == 1 or in_place == [neighbours] * len(lengths)


def test_rows_are_used_again(runner, expected):
    driver = StepDriver(runner, chunk=16, max_rows=1)
    for prompt, tokens in zip(random_prompts(LENGTHS), expected):
        sequence = driver.sequence(prompt, max_new_tokens=12)
        driver.run([sequence])
        assert sequence.tokens == tokens
        driver.ended.append(sequence.row)
        driver.rows.append(sequence.row)


def test_logprobs_are_those_of_transformers(runner, model):
    driver = StepDriver(runner, chunk=7)
    prompts = random_prompts([5, 30])
    wishes = dict(temperature=0.8, seed=3, repetition_penalty=1.3, logprobs=3, max_new_tokens=10)
    sequences = [driver.sequence(prompts[0], **wishes), driver.sequence(prompts[1], max_new_tokens=10)]
    driver.run(sequences)
    for s in sequences:
        theirs = reference_logprobs(model, s.prompt + s.tokens)[len(s.prompt) - 1 : -1]
        assert s.logprobs == pytest.approx(theirs[range(10), s.tokens].tolist(), abs=1e-3)
    theirs = reference_logprobs(model, prompts[0] + sequences[0].tokens)[4:-1].topk(3)
    assert [ids for ids, _ in sequences[0].top] == theirs.indices.tolist()
    assert np.allclose([values for _, values in sequences[0].top], theirs.values.numpy(), atol=1e-3)
    assert sequences[1].top == []


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("k", [0, 4])
def test_prompt_logprobs(runner, model, chunk, k):
    driver = StepDriver(runner, chunk)
    prompts = random_prompts([1, 2, 16, 33, 300])
    sequences = [driver.sequence(prompt, max_new_tokens=3, prompt_logprobs=k) for prompt in prompts]
    plain = driver.sequence(prompts[2], max_new_tokens=3)
    driver.run([*sequences, plain])
    assert plain.prompt_logprobs == {}
    for s in sequences:
        assert sorted(s.prompt_logprobs) == list(range(1, len(s.prompt)))
        theirs = reference_logprobs(model, s.prompt)
        for position, logprob in s.prompt_logprobs.items():
            assert logprob == pytest.approx(theirs[position - 1, s.prompt[position]].item(), abs=1e-3)
            ids, values = s.prompt_top[position]
            top = theirs[position - 1].topk(k)
            assert ids == top.indices.tolist()
            assert np.allclose(values, top.values.numpy(), atol=1e-3)


def test_prompt_logprobs_come_before_or_with_the_first_token(runner):
    driver = StepDriver(runner, chunk=16)
    sequence = driver.sequence(random_prompts([40])[0], max_new_tokens=2, prompt_logprobs=1)
    driver.run([sequence])
    first = next(i for i, result in enumerate(driver.results) if result.rows)
    assert not any(result.prompt for result in driver.results[first + 1 :])


def test_a_resumed_sequence_goes_on_as_if_nothing_had_happened(runner):
    wishes = dict(temperature=1.0, seed=5, repetition_penalty=1.5, frequency_penalty=0.3, max_new_tokens=20, logprobs=1)
    prompt = random_prompts([20])[0]
    driver = StepDriver(runner)
    whole, paused = (driver.sequence(prompt, prompt_logprobs=0, **wishes) for _ in range(2))
    driver.run([whole])
    driver.run([paused], steps=8)
    assert 0 < len(paused.tokens) < 20
    before = dict(paused.prompt_logprobs)
    driver.resume(paused)
    driver.run([paused])
    assert paused.tokens == whole.tokens
    assert paused.logprobs == pytest.approx(whole.logprobs, abs=1e-3)
    assert paused.prompt_logprobs == before


def test_same_seed_same_tokens_alone_and_in_a_batch(runner):
    prompts = random_prompts([3, 20, 50, 9])
    wishes = [dict(temperature=0.9, seed=i, top_p=0.9, max_new_tokens=16) for i in range(4)]
    alone = []
    for prompt, wish in zip(prompts, wishes):
        driver = StepDriver(runner)
        sequence = driver.sequence(prompt, **wish)
        driver.run([sequence])
        alone.append(sequence.tokens)
    driver = StepDriver(runner, chunk=16, seed=1)
    together = [driver.sequence(prompt, **wish) for prompt, wish in zip(prompts, wishes)]
    driver.run(together)
    assert [s.tokens for s in together] == alone


def test_a_step_that_raises_ends_its_rows_and_no_others(runner, expected):
    prompts = random_prompts(LENGTHS)
    bad = StepPlan(
        step=9,
        num_decode=0,
        rows=pack([30, 31], np.int32),
        starts=pack([0, 0], np.int32),
        lengths=pack([2, 2], np.int32),
        samples=pack([1, 1], np.uint8),
        slots=pack([0, 1, 2, 10**9], np.int32),
        ended=b"",
        new_rows=[],
    )
    result = runner.launch(bad).result()
    assert result.step == 9 and result.rows == b""
    assert [row for row, _ in result.failed] == [30, 31]
    assert all(reason for _, reason in result.failed)
    driver = StepDriver(runner)
    sequence = driver.sequence(prompts[3], max_new_tokens=12)
    driver.run([sequence])
    assert sequence.tokens == expected[3]


def test_a_step_without_samples_has_an_empty_result(runner):
    driver = StepDriver(runner, chunk=4)
    sequence = driver.sequence(random_prompts([10])[0], max_new_tokens=1)
    driver.run([sequence])
    assert [len(unpack(result.rows, np.int32)) for result in driver.results] == [0, 0, 1]
    assert torch.tensor(sequence.tokens).shape == (1,)
