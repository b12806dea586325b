"""CUDA graphs: bit-equal to the same step launched eagerly, and no row's tokens depend on the padding."""

from pathlib import Path

import numpy as np
import pytest
import torch
from model.harness import make_reference
from model.test_golden import CONFIGS
from support.step_driver import StepDriver, make_runner, random_prompts, save_random_model

from lightllm.common.basemodel import cuda_graph
from lightllm.common.basemodel.cuda_graph import ladder, token_ladder
from lightllm.server.core.messages import unpack

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CUDA = torch.device("cuda", 0)
BATCHES = range(1, 41)
NEW_TOKENS = 8


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("rand")
    save_random_model(path)
    return path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_graph_is_bit_equal_to_the_eager_step_of_its_size(checkpoint, dtype) -> None:
    runner = make_runner(checkpoint, max_rows=64, device=CUDA, dtype=dtype, graph_sizes=ladder(64))
    step = runner._decode
    driver = StepDriver(runner, max_rows=64)
    sequences = [driver.sequence(prompt, max_new_tokens=400) for prompt in random_prompts(range(1, 41))]
    driver.run(sequences, steps=3)
    free = np.array(driver.slots, np.int32)
    for count in BATCHES:
        lines = runner._draw.padded(count)
        rows = np.array([s.row for s in sequences[:count]], np.int32)
        positions = np.array([len(s.prompt) + 3 for s in sequences[:count]], np.int32)
        outcomes, fed = [], runner._sampler.table.last_token.clone()
        for run, draws in ((runner._draw, True), (step.draw, True), (runner._forward, False), (step.forward, False)):
            with torch.inference_mode():
                runner._sampler.table.last_token.copy_(fed)  # a draw changes what the next step feeds
                drawn = step.stage(rows, positions, free[:count], lines)
                outcome = (drawn if draws else step.logits(lines).T).fill_(-1)
                run(lines)
                torch.cuda.synchronize()
                outcomes.append(outcome[:, :count].clone())
        assert torch.equal(outcomes[0], outcomes[1])
        assert torch.equal(outcomes[2], outcomes[3])


def test_slow_sizes_are_dropped_and_the_tokens_stay(checkpoint, monkeypatch) -> None:
    times = iter([1.0, 9.0, 2.0, 9.0, 9.0, 3.0])
    monkeypatch.setattr(cuda_graph, "milliseconds", lambda work, repeats: next(times))
    runner = make_runner(checkpoint, max_rows=64, device=CUDA, graph_sizes=[1, 2, 4], mixed_sizes=[16, 32, 64])
    runner._drop_slow_graphs()
    for runs in (runner._draw, runner._forward):
        assert [runs.padded(lines) for lines in (1, 2, 4)] == [1, 4, 4]
    assert [runner._mixed.run.padded(lines) for lines in (1, 64)] == [64, 64]
    prompts = random_prompts([5, 20])
    assert tokens(runner, prompts) == tokens(make_runner(checkpoint, max_rows=64, device=CUDA), prompts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mixed_graph_is_bit_equal_to_the_eager_step_of_its_size(checkpoint, dtype) -> None:
    sizes = dict(graph_sizes=ladder(64), mixed_sizes=token_ladder(128))
    runner = make_runner(checkpoint, max_rows=64, device=CUDA, dtype=dtype, **sizes)
    mixed = runner._mixed
    driver = StepDriver(runner, chunk=30, max_rows=64)
    sequences = [driver.sequence(prompt, max_new_tokens=400) for prompt in random_prompts(range(1, 41))]
    driver.run(sequences[:20], steps=3)
    for count in BATCHES:
        active = sequences[20 - count // 2 : 20 + (count + 1) // 2]
        plan = driver.plan([s for s in active if s.room])
        with torch.inference_mode():
            if starts := runner._builder.start_rows(plan):
                runner._sampler.start(starts)
            step = runner._builder.arrays(plan)
            if (size := mixed.padded(step)) is None:
                continue
            outcomes, lines = [], mixed.draw.run.padded(len(step.sampled_rows))
            for run in (mixed.run, mixed.body):
                drawn = mixed.stage(step, size, lines)
                for part in mixed.attended.tensors:
                    part.fill_(-1)
                run(size)
                outcomes.append([part[: len(step.slots)].clone() for part in mixed.attended.tensors])
            assert all(torch.equal(*pair) for pair in zip(*outcomes))
            if count := len(step.sampled_rows):
                answers = []
                for run in (mixed.draw.run, mixed.draw.body):
                    drawn.fill_(-1)
                    run(lines)
                    torch.cuda.synchronize()
                    answers.append(drawn[:, :count].clone())
                assert torch.equal(*answers) and (answers[0][0] >= 0).all()


def tokens(runner, prompts: list[list[int]], **wishes) -> list[list[int]]:
    driver = StepDriver(runner, max_rows=64, seed=len(prompts))
    sequences = [driver.sequence(prompt, max_new_tokens=NEW_TOKENS, **wishes) for prompt in prompts]
    driver.run(sequences)
    assert all(len(unpack(result.rows, np.int32)) for result in driver.results)
    return [sequence.tokens for sequence in sequences]


@pytest.mark.parametrize("wishes", [{"do_sample": False}, {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 5}])
def test_a_victim_gets_the_same_tokens_in_every_batch(checkpoint, wishes) -> None:
    eager = make_runner(checkpoint, max_rows=64, device=CUDA)
    graphs = make_runner(checkpoint, max_rows=64, device=CUDA, graph_sizes=ladder(40), mixed_sizes=token_ladder(640))
    victim = random_prompts([33], seed=9)[0]
    (alone,) = tokens(eager, [victim], **wishes)
    for count in BATCHES:
        others = random_prompts([5 + i % 20 for i in range(count - 1)], seed=count)
        assert tokens(graphs, [victim, *others], **wishes)[0] == alone, count
        assert tokens(graphs, [*others, victim], **wishes)[-1] == alone, count


FAMILIES = {config.model_type: config for config in reversed(CONFIGS.values())}  # the first of each kind


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_can_be_captured(family, tmp_path) -> None:
    make_reference(FAMILIES[family]).save_pretrained(tmp_path)
    prompts = random_prompts([9, 1, 20], vocab=FAMILIES[family].vocab_size)
    eager = make_runner(tmp_path, max_rows=64, device=CUDA)
    graphs = make_runner(tmp_path, max_rows=64, device=CUDA, graph_sizes=[1, 4, 8], mixed_sizes=[16, 32])
    assert tokens(graphs, prompts, do_sample=False) == tokens(eager, prompts, do_sample=False)
