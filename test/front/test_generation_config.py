"""What a checkpoint's generation_config.json recommends holds alike in every dialect whose users expect it."""

import json
import shutil
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from front.scripted_engine import Front, ScriptedEngine, serving

RECOMMENDED = {"temperature": 0.25, "top_p": 0.875, "top_k": 7, "min_p": 0.125, "repetition_penalty": 1.25}
ASK = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": ASK},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": ASK, "max_tokens": 5},
}
OWN = {"inputs": "hi", "parameters": {"max_new_tokens": 5}}


@pytest.fixture(scope="module", params=[False, True], ids=["own", "tgi"])
def served(request, chat_tokenizer, chat_dir, tmp_path_factory) -> Iterator[tuple[Front, ScriptedEngine]]:
    folder = tmp_path_factory.mktemp("recommended")
    shutil.copytree(chat_dir, folder, dirs_exist_ok=True)
    (folder / "generation_config.json").write_text(json.dumps(RECOMMENDED))
    with serving(chat_tokenizer, model_dir=str(folder), use_tgi_api=request.param) as front_and_engine:
        yield front_and_engine


def asked(client: httpx.Client, engine: ScriptedEngine, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """What reaches the engine."""
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return {name: getattr(engine.requests[-1].sampling, name) for name in RECOMMENDED}


@pytest.mark.parametrize("path", BODIES)
def test_it_is_followed_where_a_request_says_nothing(client, engine, path) -> None:
    assert asked(client, engine, path, BODIES[path]) == RECOMMENDED
    assert asked(client, engine, path, BODIES[path] | {"top_p": 0.5}) == RECOMMENDED | {"top_p": 0.5}
    assert asked(client, engine, path, BODIES[path] | {"temperature": 0})["temperature"] == 0


@pytest.mark.parametrize("path", ["/generate", "/generate_stream", "/"])
def test_prompts_are_continued_greedily_where_a_request_says_nothing(client, engine, path) -> None:
    plain = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    assert asked(client, engine, path, OWN) == plain
