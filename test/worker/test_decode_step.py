"""DecodeStep: padding changes no row's tokens, whatever the padded size."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from support.step_driver import StepDriver, make_runner, random_prompts, save_random_model

from lightllm.common.basemodel.cuda_graph import Runner, ladder, token_ladder, worth_having

NEW_TOKENS = 6


class PaddedRunner(Runner):
    """Always computes some lines more than are wanted, as a graph may."""

    def __init__(self, body, extra: int) -> None:
        super().__init__(body)
        self._extra = extra

    def padded(self, lines: int) -> int | None:
        return lines + self._extra


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    path = tmp_path_factory.mktemp("rand")
    save_random_model(path)
    return make_runner(path)


def tokens_of(runner, count: int, **wishes) -> list[list[int]]:
    driver = StepDriver(runner, seed=count)
    prompts = random_prompts([3 + i % 7 for i in range(count)], seed=count)
    sequences = [
        driver.sequence(prompt, max_new_tokens=NEW_TOKENS, seed=i, **wishes) for i, prompt in enumerate(prompts)
    ]
    driver.run(sequences)
    return [sequence.tokens for sequence in sequences]


@pytest.mark.parametrize("count", [1, 2, 3, 8, 13, 20])
@pytest.mark.parametrize(
    "wishes", [{"do_sample": False}, {"temperature": 1.0, "top_p": 0.9}, {"repetition_penalty": 1.3}]
)
def test_padding_changes_no_token(runner, monkeypatch, count, wishes):
    plain = tokens_of(runner, count, **wishes)
    for extra in (1, 12):
        monkeypatch.setattr(runner, "_draw", PaddedRunner(runner._decode.draw, extra))
        monkeypatch.setattr(runner, "_forward", PaddedRunner(runner._decode.forward, extra))
        assert tokens_of(runner, count, **wishes) == plain


def test_padding_writes_to_the_dump_slot_alone(runner):
    kv, step = runner._decode._parts.kv, runner._decode
    with torch.inference_mode():
        before = kv.layer(0).clone()
        step.stage(np.array([4], np.int32), np.array([0], np.int32), np.array([17], np.int32), 5)
        step.draw(5)
    changed = (before != kv.layer(0)).flatten(1).any(1) & ~(before.isnan() & kv.layer(0).isnan()).flatten(1).all(1)
    assert {17} <= set(changed.nonzero().squeeze(1).tolist()) <= {17, kv.num_slots}


@pytest.mark.parametrize("largest", [1, 2, 3, 8, 16, 17, 40, 64, 100, 128, 200, 256, 500, 512, 700, 2048, 5000])
@pytest.mark.parametrize(("steps", "first", "gap"), [(ladder, 1, 8), (token_ladder, 16, 64)])
def test_ladders_end_at_the_largest_and_waste_little(steps, first, gap, largest):
    sizes = steps(largest)
    assert sizes == sorted(set(sizes)) and sizes[0] == min(first, largest) and sizes[-1] == largest
    assert all(b - a <= max(gap, a / 4) for a, b in pairwise(sizes))


def test_sizes_that_a_larger_one_beats_are_not_worth_having() -> None:
    assert worth_having({8: 1.0, 16: 1.1, 32: 1.2}) == [8, 16, 32]
    assert worth_having({384: 8.2, 448: 13.5, 480: 10.25, 512: 10.2}) == [384, 480, 512]  # 480: as fast, but for noise
    assert worth_having({1: 3.0, 2: 3.0, 4: 2.0, 8: 4.0, 16: 2.5}) == [4, 16]
    assert worth_having({5: 9.0}) == [5]
