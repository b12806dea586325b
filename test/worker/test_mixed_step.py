"""MixedStep: a step padded to a fixed number of tokens and rows gives the tokens of the step as it is."""

import pytest
from model.harness import make_reference
from model.test_golden import CONFIGS
from support.sized_runner import SizedRunner
from support.step_driver import StepDriver, make_runner, random_prompts, save_random_model

from lightllm.server.router.model_infer import draw_step, mixed_step

SIZES = [16, 32, 64, 128]
NEW_TOKENS = 5


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("rand")
    save_random_model(path)
    return path


@pytest.fixture(autouse=True)
def no_graphs(monkeypatch):
    monkeypatch.setattr(mixed_step, "make_runner", SizedRunner)
    monkeypatch.setattr(draw_step, "make_runner", lambda body, sizes: SizedRunner(body, [2, 4, 8]))


def outcomes(runner, lengths: list[int], chunk: int, **wishes) -> list[tuple]:
    driver = StepDriver(runner, chunk, seed=len(lengths))
    prompts = random_prompts(lengths, seed=sum(lengths), vocab=runner._model.vocab_size)
    sequences = [
        driver.sequence(prompt, max_new_tokens=NEW_TOKENS, seed=i, **wishes) for i, prompt in enumerate(prompts)
    ]
    late = sequences[len(sequences) // 2 :]
    driver.run(sequences[: len(sequences) // 2], steps=2)  # so that chunks run beside decoding rows
    driver.run([*sequences[: len(sequences) // 2], *late])
    return [(s.tokens, s.prompt_logprobs) for s in sequences]


@pytest.mark.parametrize("lengths", [[1], [16], [5, 40], [1, 2, 33, 70, 3, 9], [100, 100, 8]])
@pytest.mark.parametrize(
    "wishes, only_draws",
    [
        ({"do_sample": False}, True),
        ({"temperature": 1.0, "top_p": 0.9}, True),
        ({"repetition_penalty": 1.3}, False),
        ({"prompt_logprobs": 2}, False),
    ],
)
@pytest.mark.parametrize("chunk", [7, 10**6])
def test_padding_changes_no_token(checkpoint, lengths, wishes, only_draws, chunk) -> None:
    plain = outcomes(make_runner(checkpoint), lengths, chunk, **wishes)
    runner = make_runner(checkpoint, mixed_sizes=SIZES)
    padded = outcomes(runner, lengths, chunk, **wishes)
    assert runner._mixed.run.ran and bool(runner._mixed.draw.run.ran) == only_draws
    for (tokens, logprobs), (expected_tokens, expected_logprobs) in zip(padded, plain, strict=True):
        assert tokens == expected_tokens
        assert logprobs == pytest.approx(expected_logprobs, abs=1e-4)


def test_padding_writes_to_the_dump_slot_alone(checkpoint) -> None:
    runner = make_runner(checkpoint, mixed_sizes=SIZES)
    kv = runner._mixed._parts.kv
    driver = StepDriver(runner)
    sequence = driver.sequence(random_prompts([21])[0], max_new_tokens=1)
    used = set(driver.slots[-21:])
    driver.run([sequence])
    written = (~kv.layer(0).isnan()).flatten(1).any(1).nonzero().squeeze(1).tolist()
    assert runner._mixed.run.ran == [32] and used <= set(written) <= used | {kv.num_slots}


def test_steps_that_fit_no_size_run_as_they_are(checkpoint) -> None:
    runner = make_runner(checkpoint, mixed_sizes=[16, 32])
    assert outcomes(runner, [200, 100], 10**6) == outcomes(make_runner(checkpoint), [200, 100], 10**6)
    many = [2] * 10  # more chunks than a step of 32 tokens has room for
    ran = list(runner._mixed.run.ran)
    driver = StepDriver(runner)
    driver.run([driver.sequence(prompt, max_new_tokens=1) for prompt in random_prompts(many)])
    assert runner._mixed.run.ran == ran


@pytest.mark.parametrize("lengths", [[1] * 20, [1] * 12 + [7, 9]])
def test_prompts_of_one_token_are_no_chunks(checkpoint, lengths) -> None:
    """As many as there are rows fit a step, as when all but the last token of each prompt is cached."""
    runner = make_runner(checkpoint, mixed_sizes=[16, 32])
    assert outcomes(runner, lengths, 10**6) == outcomes(make_runner(checkpoint), lengths, 10**6)
    driver = StepDriver(runner)
    driver.run([driver.sequence(prompt, max_new_tokens=1) for prompt in random_prompts(lengths)])
    assert runner._mixed.run.ran[-1] == 32


def test_the_padding_row_is_long_enough_for_the_padding(checkpoint) -> None:
    runner = make_runner(checkpoint, max_len=20, mixed_sizes=[16, 64])
    driver = StepDriver(runner)
    driver.run([driver.sequence(prompt, max_new_tokens=1) for prompt in random_prompts([18])])
    assert runner._mixed.run.ran == []


def test_latents_in_padded_steps_unless_the_contexts_are_long(tmp_path) -> None:
    make_reference(CONFIGS["deepseek_v3"]).save_pretrained(tmp_path)
    expected, ran = outcomes(make_runner(tmp_path), [5, 40, 1, 33, 100], 24, do_sample=False), []
    for most_keys in (1 << 22, 2000):
        runner = make_runner(tmp_path, mixed_sizes=SIZES)
        runner._model.most_graph_keys = most_keys
        assert outcomes(runner, [5, 40, 1, 33, 100], 24, do_sample=False) == expected
        ran.append(len(runner._mixed.run.ran))
    assert 0 < ran[1] < ran[0]
