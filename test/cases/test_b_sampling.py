"""Cases b of the bug bank: sampling parameters. After p the scripted model has q .665, r .245, s .090."""

import json
import math
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from support.checkpoints import random_prompt, reference_model, token_id, token_ids
from support.server import RunningServer, assert_refused, text_of

P, Q, R, S = (token_id(character) for character in "pqrs")
TRUE = {"q": 0.66524, "r": 0.24473, "s": 0.09003}


def at_once(calls: list[dict[str, Any]], server: RunningServer, inputs: str = "p") -> list[str]:
    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(lambda parameters: server.text(inputs, **parameters), calls))


def assert_true_distribution(texts: list[str]) -> None:
    counts = Counter(text[0] for text in texts)
    assert set(counts) <= set(TRUE)
    for character, probability in TRUE.items():
        assert abs(counts[character] / len(texts) - probability) < 0.08, counts


@pytest.mark.parametrize("temperature", [0, 1e-12, 1e-6, 1e-5, 1e-4, 1e-3, 5e-324])
def test_case_16_tiny_temperatures(script: RunningServer, temperature: float) -> None:
    cold = dict(temperature=temperature, top_p=0.95, max_new_tokens=6)
    warm = dict(temperature=1.0, max_new_tokens=6)
    calls = [(cold if i % 2 else warm) | dict(seed=i) for i in range(40)]
    texts = at_once(calls, script)
    assert set(texts[1::2]) == {"qpqpqp"}
    assert len(set(texts[::2])) > 1


@pytest.mark.parametrize("parameters", [dict(top_k=1), dict(top_p=1e-4), dict(min_p=1.0), dict(top_p=0.5, top_k=2)])
def test_case_17_greedy_by_the_edge(script: RunningServer, parameters: dict[str, Any]) -> None:
    texts = at_once([dict(temperature=1.0, seed=i, max_new_tokens=4) | parameters for i in range(20)], script)
    assert set(texts) == {"qpqp"}


def test_case_17_off_is_off(script: RunningServer) -> None:
    """0 and -1 mean no top_k, as a number beyond the vocabulary does: the same draw for the same seed."""
    forms = [{}, dict(top_k=0), dict(top_k=-1), dict(top_k=10**9), dict(top_p=1.0), dict(min_p=0.0)]
    calls = [dict(temperature=1.0, seed=i, max_new_tokens=1) | form for i in range(40) for form in forms]
    texts = at_once(calls, script)
    for i in range(40):
        assert len(set(texts[i * len(forms) : (i + 1) * len(forms)])) == 1


def test_case_17_the_true_distribution(script: RunningServer) -> None:
    assert_true_distribution(at_once([dict(temperature=1.0, seed=i, max_new_tokens=1) for i in range(300)], script))
    unseeded = script.generate("p", temperature=1.0, max_new_tokens=1, n=8)["generated_text"]
    assert set(unseeded) <= set(TRUE)


@pytest.mark.parametrize(
    ("parameters", "left"),
    [(dict(top_k=2), "qr"), (dict(top_p=0.9), "qr"), (dict(top_p=0.95), "qrs"), (dict(min_p=0.2), "qr"), ({}, "qrs")],
)
def test_case_17_what_is_left(script: RunningServer, parameters: dict[str, Any], left: str) -> None:
    calls = [dict(temperature=1.0, seed=i, max_new_tokens=1) | parameters for i in range(60)]
    assert set(at_once(calls, script)) == set(left)


@pytest.mark.parametrize("parameters", [dict(top_p=0), dict(top_k=-5), dict(top_p=1.5), dict(min_p=2), dict(top_p=-1)])
def test_case_17_refused(script: RunningServer, parameters: dict[str, Any]) -> None:
    error = script.refusal("p", temperature=1.0, **parameters)
    assert error["param"] in parameters and error["param"] in error["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "1e400"),
        ("temperature", "NaN"),
        ("temperature", "-1"),
        ("temperature", "Infinity"),
        ("repetition_penalty", "0"),
        ("repetition_penalty", "-1"),
        ("repetition_penalty", "Infinity"),
        ("repetition_penalty", "1e-400"),
        ("presence_penalty", "1e308"),
        ("presence_penalty", "NaN"),
        ("frequency_penalty", "-Infinity"),
        ("top_p", "NaN"),
        ("min_p", "NaN"),
        ("temperature", '"hot"'),
        ("temperature", "[]"),
        ("top_k", "1.5"),
        ("seed", "1e30"),
    ],
)
def test_case_19_absurd_numbers(script: RunningServer, field: str, value: str) -> None:
    parameters = f'{{"do_sample":true,"max_new_tokens":2,"{field}":{value}}}'
    for path in ("/generate", "/generate_stream"):
        error = assert_refused(script.post(path, f'{{"inputs":"p","parameters":{parameters}}}'.encode()))
        assert field in error["message"]


def test_case_19_a_huge_temperature_is_uniform(script: RunningServer) -> None:
    texts = script.generate("p", temperature=1e30, max_new_tokens=1, n=8, seed=1, ignore_eos=True)["generated_text"]
    assert len(texts) == 8


def test_case_19_bias_without_a_number(script: RunningServer) -> None:
    for value in ("NaN", "Infinity", "1e400"):
        body = f'{{"inputs":"p","parameters":{{"logit_bias":{{"{R}":{value}}}}}}}'
        assert "logit_bias" in assert_refused(script.post("/generate", body.encode()))["message"]


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({}, "LKLKLK"),
        (dict(repetition_penalty=3), "MKLKLK"),
        (dict(presence_penalty=1.5), "LKMKLK"),
        (dict(presence_penalty=1.5, input_penalty=True), "MKLKLK"),
        (dict(frequency_penalty=0.9), "LKLKMK"),
        (dict(frequency_penalty=0.9, input_penalty=True), "LKMKLK"),
        (dict(presence_penalty=-2), "LKLKLK"),
    ],
)
def test_case_21_what_the_penalties_count(script: RunningServer, parameters: dict[str, Any], text: str) -> None:
    """After K the logits are L 2, M 1, N 0. The prompt is LK; only repetition_penalty looks at it by itself."""
    assert script.text("LK", do_sample=False, max_new_tokens=6, **parameters) == text


def test_case_21_penalties_of_neighbours_stay_apart(script: RunningServer) -> None:
    calls = [{}, dict(repetition_penalty=3), dict(presence_penalty=1.5), dict(frequency_penalty=0.9)] * 8
    texts = at_once([dict(do_sample=False, max_new_tokens=6) | call for call in calls], script, "LK")
    assert texts == ["LKLKLK", "MKLKLK", "LKMKLK", "LKLKMK"] * 8


@pytest.mark.parametrize(
    ("bias", "text"),
    [
        ({str(S): 100}, "sssss"),
        ({str(Q): -100}, "rprpr"),
        ({str(Q): -100, str(R): -100.0}, "spsps"),
        ({str(R): 0.5}, "qpqpq"),
        ({str(R): 1.5}, "rprpr"),
        ({}, "qpqpq"),
    ],
)
def test_case_23_logit_bias(script: RunningServer, bias: dict[str, float], text: str) -> None:
    asked = dict(do_sample=False, max_new_tokens=5, logit_bias=bias)
    assert script.text("p", **asked) == text_of(script.stream("p", **asked)) == text


@pytest.mark.parametrize(
    "bias", [{"999999": 1}, {"-1": 1}, {"x": 1}, {"320": 1}, {str(Q): "x"}, {str(Q): 101}, [1], {"1.5": 1}]
)
def test_case_23_bias_of_what_is_no_token(script: RunningServer, bias: Any) -> None:
    assert "logit_bias" in script.refusal("p", logit_bias=bias)["message"]


@pytest.mark.parametrize(
    "parameters",
    [
        dict(top_k=1, temperature=1.0),
        dict(logit_bias={str(Q): -100}),
        dict(allowed_token_ids=[Q, R]),
        dict(allowed_token_ids=[S], temperature=0.5),
        dict(temperature=1e30, seed=3, ignore_eos=True),
        dict(prompt_logprobs=5),
    ],
)
def test_case_24_no_infinity_in_the_answer(script: RunningServer, parameters: dict[str, Any]) -> None:
    answer = script.generate("p", max_new_tokens=4, logprobs=5, return_details=True, **parameters)
    assert all(math.isfinite(logprob) for logprob in answer["logprobs"])
    assert all(math.isfinite(top["logprob"]) for token in answer["tokens"] for top in token["logprobs"])
    for event in script.stream("p", max_new_tokens=4, logprobs=5, **parameters):
        assert math.isfinite(event["token"]["logprob"])


@pytest.mark.parametrize("count", [0, 1, 2, 20])
def test_case_25_logprobs(script: RunningServer, count: int) -> None:
    """Of the raw logits, whatever the temperature, the bias or top_k is."""
    asked = dict(max_new_tokens=4, logprobs=count, temperature=0.3, top_k=1, repetition_penalty=1.05)
    answer = script.generate("p", return_details=True, **asked)
    assert answer["generated_text"] == ["qpqp"]
    assert len(answer["logprobs"]) == len(answer["tokens"]) == 4
    assert answer["logprobs"][0] == pytest.approx(math.log(TRUE["q"]), abs=1e-3)
    events = script.stream("p", **asked)
    for event, token, logprob in zip(events, answer["tokens"], answer["logprobs"], strict=True):
        assert event["token"]["logprob"] == token["logprob"] == logprob
        tops = event["token"]["logprobs"] or []
        assert tops == (token["logprobs"] or []) and len(tops) == count
        assert [top["logprob"] for top in tops] == sorted((top["logprob"] for top in tops), reverse=True)
    for top, (character, probability) in zip(events[0]["token"]["logprobs"] or [], TRUE.items()):
        assert (top["id"], top["text"]) == (token_id(character), character)
        assert top["logprob"] == pytest.approx(math.log(probability), abs=1e-3)


@pytest.mark.parametrize("count", [-1, 21, 10**9, True, "2", 1.5])
def test_case_25_refused(script: RunningServer, count: Any) -> None:
    assert "logprobs" in script.refusal("p", logprobs=count)["message"]


def prompt_logprobs(answer: dict[str, Any], prompt: tuple[int, ...], server: RunningServer, count: int) -> None:
    """Checks them against transformers."""
    with torch.inference_mode():
        expected = torch.log_softmax(reference_model(server.model_dir)(torch.tensor([prompt])).logits[0], -1)
    assert answer["prompt_token_ids"] == list(prompt)
    first, *rest = answer["prompt_logprobs"]
    assert first is None and len(rest) == len(prompt) - 1
    for place, entry in enumerate(rest):
        assert entry[str(prompt[place + 1])] == pytest.approx(expected[place, prompt[place + 1]].item(), abs=1e-3)
        best = expected[place].topk(max(count, 1)).values[:count].tolist()
        assert sorted(entry.values(), reverse=True)[:count] == pytest.approx(best, abs=1e-3)
        assert count <= len(entry) <= count + 1


@pytest.mark.parametrize(("length", "count", "new"), [(12, 1, 3), (12, 0, 1), (12, 20, 1), (1, 1, 3), (300, 2, 1)])
def test_case_27_prompt_logprobs(rand: RunningServer, length: int, count: int, new: int) -> None:
    prompt = random_prompt(length)
    asked = dict(do_sample=False, max_new_tokens=new, ignore_eos=True)
    answer = rand.generate(prompt, prompt_logprobs=count, **asked)
    prompt_logprobs(answer, prompt, rand, count)
    assert answer["generated_text"] == rand.generate(prompt, **asked)["generated_text"]
    assert answer["count_output_tokens"] == new


def test_case_27_prompt_logprobs_beside_others(rand: RunningServer) -> None:
    prompts = [random_prompt(length) for length in (200, 3, 150, 17, 90, 1)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda p: rand.generate(p, max_new_tokens=5, prompt_logprobs=3), prompts))
    for prompt, answer in zip(prompts, answers):
        prompt_logprobs(answer, prompt, rand, 3)


def test_case_27_refused(rand: RunningServer) -> None:
    for count in (21, -2, "1", True):
        assert "prompt_logprobs" in rand.refusal("abc", prompt_logprobs=count)["message"]
    assert "max_new_tokens" in rand.refusal("abc", prompt_logprobs=1, max_new_tokens=0)["message"]


def test_case_28_ignore_eos_against_the_eos_list(serve) -> None:
    server = serve("script", eos_token_id=[256, 258])
    assert server.generate("g", do_sample=False)["count_output_tokens"] == 3
    for prompt in ("g", "A", "x"):
        answer = server.generate(prompt, do_sample=False, ignore_eos=True, max_new_tokens=40)
        assert (answer["count_output_tokens"], answer["finish_reason"]) == (40, "length")
    stopped = server.generate("g", do_sample=False, ignore_eos=True, stop_token_ids=[258], max_new_tokens=40)
    assert (stopped["generated_text"], stopped["count_output_tokens"]) == (["hi"], 3)


def test_case_30_several_outputs(script: RunningServer) -> None:
    asked = dict(temperature=1.0, seed=7, max_new_tokens=6, n=4)
    first, again = (script.generate("p", **asked) for _ in range(2))
    assert first["generated_text"] == again["generated_text"]
    assert len(first["generated_text"]) == 4 and len(set(first["generated_text"])) > 1
    assert first["count_output_tokens"] == [6] * 4 and first["finish_reason"] == ["length"] * 4
    assert first["prompt_tokens"] == 1
    assert [len(logprobs) for logprobs in first["logprobs"]] == [6] * 4
    other_name = script.generate("p", temperature=1.0, seed=7, max_new_tokens=6, best_of=4)
    assert other_name["generated_text"] == first["generated_text"]


def test_case_30_the_first_of_n_is_the_only_one(script: RunningServer) -> None:
    for seed in range(10):
        one = script.text("p", temperature=1.0, seed=seed, max_new_tokens=8)
        assert script.generate("p", temperature=1.0, seed=seed, max_new_tokens=8, n=3)["generated_text"][0] == one


def test_case_30_greedy_outputs_are_equal(script: RunningServer) -> None:
    answer = script.generate("A", do_sample=False, n=8, return_details=True)
    assert len(set(answer["generated_text"])) == 1 and answer["finish_reason"] == ["stop"] * 8
    assert len(answer["tokens"]) == 8 and len({json.dumps(tokens) for tokens in answer["tokens"]}) == 1


def test_case_30_outputs_that_end_at_different_times(script: RunningServer) -> None:
    answer = script.generate("p", temperature=1.0, seed=3, n=8, max_new_tokens=30, stop_sequences=["s"])
    texts, counts, reasons = (answer[name] for name in ("generated_text", "count_output_tokens", "finish_reason"))
    assert set(reasons) == {"stop", "length"}
    for text, count, reason in zip(texts, counts, reasons):
        assert "s" not in text and len(text) == count - (reason == "stop")


@pytest.mark.parametrize(
    "parameters", [dict(n=0), dict(n=9), dict(n=-1), dict(n="2"), dict(n=2, best_of=3), dict(n=True)]
)
def test_case_30_refused(script: RunningServer, parameters: dict[str, Any]) -> None:
    error = assert_refused(script.post("/generate", {"inputs": "A", "parameters": parameters}))
    assert error["param"] in parameters


def test_case_30_same_seed_whatever_else_runs(rand: RunningServer) -> None:
    asked = dict(temperature=0.8, seed=11, max_new_tokens=24, n=2, ignore_eos=True)
    alone = rand.generate("same seed", **asked)["generated_text"]
    noise = [dict(temperature=1.0, max_new_tokens=30, ignore_eos=True, top_k=5, repetition_penalty=1.2)] * 12
    with ThreadPoolExecutor(16) as pool:
        others = [pool.submit(rand.generate, "noise" * i, **parameters) for i, parameters in enumerate(noise, 1)]
        again = [pool.submit(rand.generate, "same seed", **asked) for _ in range(4)]
        assert all(future.result()["generated_text"] == alone for future in again)
        assert all(future.result()["count_output_tokens"] == 30 for future in others)


def test_case_30_ids_that_are_allowed(script: RunningServer) -> None:
    assert script.text("p", do_sample=False, max_new_tokens=4, allowed_token_ids=[R, P]) == "rprp"
    assert (
        script.text("A", do_sample=False, max_new_tokens=3, allowed_token_ids=list(token_ids("WV"))) == "VVV"
    )  # a tie
