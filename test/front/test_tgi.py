"""--use_tgi_api: the shapes of text-generation-inference on /generate, /generate_stream and /."""

import json
from collections.abc import Iterator

import pytest
from front.scripted_engine import Front, ScriptedEngine, serving
from huggingface_hub import InferenceClient


@pytest.fixture(scope="module")
def served(tokenizer, model_dir) -> Iterator[tuple[Front, ScriptedEngine]]:
    with serving(tokenizer, model_dir=str(model_dir), use_tgi_api=True) as front_and_engine:
        yield front_and_engine


def ask(client, path="/generate", **parameters):
    return client.post(path, json={"inputs": "hello", "parameters": parameters})


def test_generate(client, engine) -> None:
    assert ask(client, max_new_tokens=3).json() == {"generated_text": "abc"}
    assert ask(client, max_new_tokens=3, return_full_text=True).json() == {"generated_text": "helloabc"}
    answer = ask(client, max_new_tokens=2, details=True, top_n_tokens=2, seed=5, typical_p=1.0, truncate=9).json()
    token = {"id": 64, "text": "a", "logprob": -0.5, "special": False}
    details = answer["details"]
    assert (details["finish_reason"], details["generated_tokens"], details["prompt_tokens"]) == ("length", 2, 5)
    assert details["seed"] == 5 and details["tokens"][0] == token and details["top_tokens"][0][0] == token
    engine.says = "ok"
    assert ask(client, details=True).json()["details"]["finish_reason"] == "eos_token"


def test_the_best_of_several_outputs_is_the_likeliest(client, engine) -> None:
    engine.likeliest = 1
    details = ask(client, max_new_tokens=2, details=True, best_of=3).json()["details"]
    assert details["tokens"][0]["logprob"] == pytest.approx(-0.1)
    assert [other["generated_text"] for other in details["best_of_sequences"]] == ["ab", "ab"]
    assert [other["tokens"][0]["logprob"] for other in details["best_of_sequences"]] == [-0.5, -0.5]


def test_without_details_no_token_is_looked_at(client, front, monkeypatch) -> None:
    monkeypatch.setattr(front.tokenizer, "token_text", None)
    assert ask(client, max_new_tokens=2, best_of=3, top_n_tokens=2).json() == {"generated_text": "ab"}


@pytest.mark.parametrize("path", ["/generate_stream", "/"])
def test_stream(client, path) -> None:
    body = {"inputs": "hello", "parameters": {"max_new_tokens": 3}, "stream": True}
    frames = client.post(path, json=body).text.split("\n\n")[:-1]
    events = [json.loads(frame.removeprefix("data:")) for frame in frames]
    assert [event["token"]["text"] for event in events] == ["a", "b", "c"]
    assert [event["generated_text"] for event in events] == [None, None, "abc"]
    assert events[-1]["details"]["finish_reason"] == "length"


def test_what_hugging_faces_client_reads(client, front) -> None:
    """Its types have all that text-generation-inference tells; what is missing would be None."""
    asked = {"prompt": "hello", "max_new_tokens": 2, "details": True, "top_n_tokens": 2}
    hub = InferenceClient(front.url)
    details = hub.text_generation(**asked).details
    assert details.prefill == [] and len(details.top_tokens[1]) == 2
    events = list(hub.text_generation(**asked, stream=True))
    assert [token.text for token in events[1].top_tokens] == ["a", "b"]
    assert (events[1].details.input_length, events[1].generated_text) == (5, "ab")


def test_no_line_ends_inside_an_event(client, engine) -> None:
    """The Hugging Face client reads lines as Python's str.splitlines tells them."""
    engine.says = "a\u2028b\x85c"
    lines = client.post("/generate_stream", json={"inputs": "A", "parameters": {"max_new_tokens": 9}}).text.splitlines()
    told = [json.loads(line.removeprefix("data:")) for line in lines if line]
    assert told[-1]["generated_text"] == engine.says


def test_what_is_mapped_reaches_the_engine(client, engine) -> None:
    grammar = {"type": "regex", "value": "[a-z]+"}
    ask(client, max_new_tokens=1, stop=["zz"], temperature=0.5, grammar=grammar)
    sampling = engine.requests[0].sampling
    assert (sampling.stop_sequences, sampling.temperature) == (["zz"], 0.5) and sampling.guided_grammar


def test_a_prompt_is_truncated_on_its_left(client, engine, front) -> None:
    assert ask(client, max_new_tokens=1, truncate=3, details=True).json()["details"]["prompt_tokens"] == 3
    assert front.tokenizer.decode(engine.prompt()) == "llo"


def test_unknown_fields_of_the_body_are_refused(client) -> None:
    answer = client.post("/generate", json={"inputs": "A", "colour": 1})
    assert answer.status_code == 400 and "colour" in answer.json()["error"]


def test_any_name_of_a_model_is_taken(client) -> None:
    """huggingface_hub calls it `dummy`."""
    answer = client.post("/v1/completions", json={"model": "dummy", "prompt": "A", "max_tokens": 1})
    assert answer.status_code == 200 and answer.json()["model"] == "scripted"


def test_refusals(client) -> None:
    refused = [
        ({"top_k": -5}, "top_k"), ({"stop": [""]}, "stop"), ({"colour": 1}, "colour"), ({"truncate": 0}, "truncate"),
        ({"typical_p": 0.5}, "typical_p"), ({"watermark": True}, "watermark"),
        ({"decoder_input_details": True}, "decoder_input_details"),
    ]  # fmt: skip
    for parameters, word in refused:
        answer = ask(client, **parameters)
        assert answer.status_code == 400 and answer.json()["error_type"] == "validation"
        assert word in answer.json()["error"]
