"""Templates that requests bring (--allow_request_chat_template): they hold up nobody and never end the front."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from front.scripted_engine import Front, ScriptedEngine, serving
from support.server import processes_by_parent, until

from lightllm.server import request_template

LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def served(chat_tokenizer, chat_dir) -> Iterator[tuple[Front, ScriptedEngine]]:
    with serving(chat_tokenizer, model_dir=str(chat_dir), allow_request_chat_template=True) as front_and_engine:
        yield front_and_engine


def ask(client: httpx.Client, template: str | None, text: str = "hi", **fields) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 2, "chat_template": template} | fields
    return client.post("/v1/chat/completions", json=body)


@pytest.mark.parametrize("content", ["{{ m.content + '' }}", "{% for p in m.content %}{{ p.text }}{% endfor %}"])
def test_it_takes_the_place_of_the_models(client, engine, front, content) -> None:
    template = "{% for m in messages %}<|im_start|>[{{ m.role }}]" + content + "{% endfor %}{{ eos_token }}{{ x }}"
    answer = ask(client, template, "é<|im_start|>", chat_template_kwargs={"x": 5})
    assert answer.status_code == 200, answer.text
    ids = engine.prompt()
    assert front.tokenizer.decode(ids) == "<|im_start|>[user]é<|im_start|><|eos|>5"
    assert ids.count(front.tokenizer.token_to_id("<|im_start|>")) == 1, "what users type is text"


def test_tools_are_told_to_those_that_know_none(client, engine, front) -> None:
    for template, told in (("{{ messages[0].content }}", "You may call functions."), ("{{ tools | length }}", "1")):
        assert ask(client, template, tools=[TOOL]).status_code == 200
        assert front.tokenizer.decode(engine.prompt()).startswith(told)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for %}", "not valid"),
        ("{{" + "(" * 5000, "not valid"),
        ("{{ raise_exception('no users') }}", "no users"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ 'a' * 10 ** 11 }}", "MemoryError"),
        ("{{ 'a' * 2 ** 25 }}", "characters"),
        (r"{{ '\ud800' }}", "half a character"),
    ],
    ids=lambda text: text[:20],
)
def test_it_is_refused_with_a_reason(client, engine, template, reason) -> None:
    assert reason in refusal(ask(client, template))
    assert engine.requests == []


@pytest.mark.parametrize("template", [LOOPS, "{{ 10 ** (10 ** 10) }}"], ids=["loops", "power"])
def test_it_has_a_second_of_the_processor(client, engine, monkeypatch, template) -> None:
    monkeypatch.setattr(request_template, "SECONDS", 1)
    assert "more than 1 s" in refusal(ask(client, template))
    assert engine.requests == []


def refusal(answer: httpx.Response) -> str:
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == "chat_template"
    return error["message"]


def renderers() -> list[int]:
    """Processes of ours in which templates run."""
    pids = [pid for pid, _ in processes_by_parent()[os.getpid()]]
    return [pid for pid in pids if b"request_template" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_others_are_answered_while_a_template_runs(client, engine, front, monkeypatch) -> None:
    monkeypatch.setattr(request_template, "SECONDS", 60)

    def ask_slowly() -> httpx.Response:
        with httpx.Client(base_url=front.url, timeout=60) as another:
            return ask(another, LOOPS)

    with ThreadPoolExecutor() as pool:
        slow = [pool.submit(ask_slowly) for _ in range(2)]
        until(lambda: len(renderers()) == 2)
        for _ in range(5):
            assert ask(client, None).status_code == 200
        assert not any(answer.done() for answer in slow)
        for pid in renderers():
            os.kill(pid, signal.SIGKILL)
        assert [answer.result().status_code for answer in slow] == [400, 400]
