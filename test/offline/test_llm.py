"""LLM in one process: what transformers generates, texts as over HTTP, errors before anything runs."""

import gc
import subprocess
import sys
from array import array
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from support.checkpoints import (
    SCRIPTED,
    Checkpoints,
    assert_same_tokens,
    random_prompt,
    reference,
    reference_model,
    token_id,
)
from support.invariants import check_scheduler

import lightllm.llm as llm_module
from lightllm import LLM, SamplingParams
from lightllm.server.core.messages import Finish
from lightllm.server.core.sampling_params import InvalidParameter
from lightllm.server.detokenization.incremental import IncrementalDetokenizer

FAMILIES = ["llama", "qwen2", "qwen3", "mistral"]
LENGTHS = [1, 2, 7, 15, 16, 17, 32, 33, 120, 200]
NEW = 24
GREEDY = SamplingParams(max_new_tokens=NEW, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module")
def script(checkpoints) -> LLM:
    return LLM(str(checkpoints("script")), device="cpu")


@pytest.mark.parametrize("chunk", [1, 7, 16, 10**6])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_transformers(checkpoints, family, chunk):
    path = checkpoints(family)
    expected = [reference(path, random_prompt(length), NEW) for length in LENGTHS]
    llm = LLM(str(path), device="cpu", chunked_prefill_size=chunk, running_max_req_size=6)
    outputs = llm.generate([greedy.prompt for greedy in expected], GREEDY, use_tqdm=False)
    for greedy, output in zip(expected, outputs, strict=True):
        assert output.prompt is None and output.prompt_token_ids == list(greedy.prompt)
        (completion,) = output.outputs
        assert_same_tokens(greedy, completion.token_ids)
        assert completion.finish_reason == "length"
    (alone,) = llm.generate([expected[-1].prompt], GREEDY, use_tqdm=False)
    assert_same_tokens(expected[-1], alone.outputs[0].token_ids)


def test_text_stops_and_finish_reasons(script):
    wishes = [
        SamplingParams(),
        SamplingParams(max_new_tokens=5),
        SamplingParams(stop_sequences=["yz"]),
        SamplingParams(stop_sequences=["yz"], include_stop_str_in_output=True),
        SamplingParams(stop_token_ids=[token_id("x")]),
        SamplingParams(ignore_eos=True, max_new_tokens=40),
    ]
    outputs = script.generate(["A"] * len(wishes), wishes)
    completions = [output.outputs[0] for output in outputs]
    emoji = SCRIPTED[0]
    assert [c.text for c in completions[:5]] == [SCRIPTED, f"{emoji} ", f"{emoji} x", f"{emoji} xyz", f"{emoji} "]
    assert [c.finish_reason for c in completions] == ["stop", "length", "stop", "stop", "stop", "length"]
    assert len(completions[5].token_ids) == 40
    assert outputs[0].prompt == "A" and outputs[0].prompt_token_ids == [token_id("A")]
    assert all(c.logprobs is None and c.error is None for c in completions)


def test_tokens_become_text_several_steps_at_a_time(script, monkeypatch):
    """Unless a text may end its sequence; either way everything is there, up to where it ends."""
    batches = []
    add = llm_module._Answers.add
    monkeypatch.setattr(
        llm_module._Answers, "add", lambda self, batch: batches.append(batch.tokens) or add(self, batch)
    )
    endless = SamplingParams(ignore_eos=True, max_new_tokens=50, logprobs=1)
    (alone,) = script.generate(["A"], endless, use_tqdm=False)[0].outputs
    assert len(list(filter(None, batches))) == -(-50 // llm_module.TEXT_STEPS)
    assert len(alone.token_ids) == len(alone.logprobs) == 50
    assert [next(iter(entry)) for entry in alone.logprobs] == alone.token_ids
    batches.clear()
    stopped = SamplingParams(ignore_eos=True, max_new_tokens=50, logprobs=1, stop_sequences=["yz"])
    outputs = script.generate(["A", "A"], [stopped, endless], use_tqdm=False)
    assert len(list(filter(None, batches))) == 50
    first, second = (output.outputs[0] for output in outputs)
    assert second == alone
    assert alone.text.startswith(first.text + "yz") and first.finish_reason == "stop"
    assert (
        first.token_ids == alone.token_ids[: len(first.logprobs)]
        and first.logprobs == alone.logprobs[: len(first.logprobs)]
    )


def test_a_text_that_fails_ends_its_prompt_alone(script, monkeypatch):
    push = IncrementalDetokenizer.push

    def broken(self, token_id, finish):
        if finish == Finish.LENGTH:
            raise ValueError("half a character")
        return push(self, token_id, finish)

    monkeypatch.setattr(IncrementalDetokenizer, "push", broken)
    wishes = [SamplingParams(ignore_eos=True, max_new_tokens=20), SamplingParams()]
    failed, whole = (output.outputs[0] for output in script.generate(["A", "A"], wishes, use_tqdm=False))
    assert (failed.finish_reason, failed.error) == ("error", "detokenization failed: ValueError: half a character")
    assert (whole.text, whole.finish_reason, whole.error) == (SCRIPTED, "stop", None)
    assert not script._scheduler.has_work


def test_the_longest_run_first_and_results_are_in_the_order_of_the_prompts(checkpoints):
    """With fewer rows than prompts each outcome is that of the prompt alone, wherever it ran."""
    llm = LLM(str(checkpoints("llama")), device="cpu", running_max_req_size=2)
    prompts = [random_prompt(length) for length in (9, 30, 4, 17, 2, 25)]
    asked = [
        SamplingParams(max_new_tokens=count, ignore_eos=True, n=n)
        for count, n in zip((3, 7, 1, 7, 12, 2), (1, 1, 2, 1, 1, 1))
    ]
    started, add = [], llm._scheduler.add
    llm._scheduler.add = lambda request, now: (started.append(request.sampling.max_new_tokens), add(request, now))
    together = llm.generate(prompts, asked, use_tqdm=False)
    assert started == [12, 7, 7, 3, 2, 1]
    for prompt, params, output in zip(prompts, asked, together, strict=True):
        (alone,) = llm.generate([prompt], params, use_tqdm=False)
        assert output.prompt_token_ids == list(prompt)
        assert [c.token_ids for c in output.outputs] == [c.token_ids for c in alone.outputs]
        assert all(len(c.token_ids) == params.max_new_tokens for c in output.outputs)


def test_samples_seeds_and_logprobs(script):
    wish = SamplingParams(n=4, temperature=1.0, seed=7, max_new_tokens=32, logprobs=2)
    first, second = (script.generate(["p"], wish, use_tqdm=False)[0] for _ in range(2))
    assert [c.token_ids for c in first.outputs] == [c.token_ids for c in second.outputs]
    assert [c.index for c in first.outputs] == [0, 1, 2, 3]
    assert len({tuple(c.token_ids) for c in first.outputs}) > 1
    logprob = first.outputs[0].logprobs[0]
    assert logprob[token_id("q")] == pytest.approx(-0.408, abs=2e-3)
    assert len(first.outputs[0].logprobs) == len(first.outputs[0].token_ids)


def test_prompt_logprobs(checkpoints):
    path = checkpoints("llama")
    prompt = random_prompt(40)
    llm = LLM(str(path), device="cpu", chunked_prefill_size=16)
    wish = SamplingParams(prompt_logprobs=2, max_new_tokens=2)
    (output,) = llm.generate([prompt], wish, use_tqdm=False)
    import torch

    with torch.no_grad():
        theirs = reference_model(path)(torch.tensor([prompt])).logits[0].log_softmax(-1)
    assert output.prompt_logprobs[0] is None
    for i in range(1, 40):
        entry = output.prompt_logprobs[i]
        assert next(iter(entry)) == prompt[i]
        for token, logprob in entry.items():
            assert logprob == pytest.approx(theirs[i - 1, token].item(), abs=1e-3)
        assert set(theirs[i - 1].topk(2).indices.tolist()) <= set(entry)


def test_what_cannot_be_served_is_refused_before_anything_runs(script):
    for prompts, params, field in [
        (["A", "A" * 600], SamplingParams(), "inputs"),
        (["A"], SamplingParams(max_new_tokens=512), "max_new_tokens"),
        (["A"], SamplingParams(top_p=2.0), "top_p"),
        ([[1, 320]], None, "prompts"),
        ([[1, -1]], None, "prompts"),
        ([[1.5]], None, "prompts"),
        ([[1, "A"]], None, "prompts"),
        ([[]], None, "inputs"),
        ([[1, 1 << 70]], None, "prompts"),
        (["A", ""], None, "inputs"),
        (["A", "A"], [SamplingParams()], "params"),
    ]:
        with pytest.raises(InvalidParameter) as refused:
            script.generate(prompts, params, use_tqdm=False)
        assert refused.value.field == field
    assert script.generate(["A"], use_tqdm=False)[0].outputs[0].text == SCRIPTED


def test_ids_come_in_any_sequence_and_are_told_as_ints_of_the_answers_own(script):
    ids = [72, 105, 33]
    given = [ids, tuple(ids), bytes(ids), array("h", ids), np.array(ids, np.int64)]
    answers = script.generate(given, SamplingParams(max_new_tokens=2), use_tqdm=False)
    for answer in answers:
        assert answer.prompt is None and answer.prompt_token_ids == ids and answer.prompt_token_ids is not ids
        assert {type(id) for id in answer.prompt_token_ids} == {int}
        assert answer.outputs[0].token_ids == answers[0].outputs[0].token_ids


def test_an_interrupt_leaves_it_usable(script, monkeypatch):
    launch, calls = script._runner.launch, []

    def interrupted(plan):
        calls.append(plan)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return launch(plan)

    monkeypatch.setattr(script._runner, "launch", interrupted)
    thresholds = gc.get_threshold()
    with pytest.raises(KeyboardInterrupt):
        script.generate(["G"] * 3, SamplingParams(max_new_tokens=100), use_tqdm=False)
    monkeypatch.undo()
    assert script.generate(["A"], use_tqdm=False)[0].outputs[0].text == SCRIPTED
    check_scheduler(script._scheduler)
    assert script._scheduler.used_tokens == 0
    assert gc.get_threshold() == thresholds


def test_threads_take_turns(script):
    prompts = [list(random_prompt(length)) for length in (3, 20, 50)]
    ids = lambda: [output.outputs[0].token_ids for output in script.generate(prompts, GREEDY, use_tqdm=False)]
    expected = ids()
    with ThreadPoolExecutor(4) as threads:
        assert all(task.result() == expected for task in [threads.submit(ids) for _ in range(8)])
    check_scheduler(script._scheduler)


def test_the_collector_is_as_before_when_all_are_done():
    thresholds = gc.get_threshold()
    one, other = llm_module._heap_at_rest(), llm_module._heap_at_rest()
    for step in (one.__enter__, other.__enter__):
        step()
        assert gc.get_threshold()[2] == llm_module.NO_FULL_COLLECTION
    for batch in (one, other):
        batch.__exit__(None, None, None)
    assert gc.get_threshold() == thresholds


def test_tensor_parallel_is_refused(checkpoints):
    with pytest.raises(ValueError, match="tp"):
        LLM(str(checkpoints("llama")), tp=2)


def test_importing_lightllm_is_light():
    code = "import sys, lightllm; lightllm.SamplingParams; lightllm.__version__; print('torch' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "False"
