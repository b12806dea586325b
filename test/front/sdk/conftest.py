"""A front that serves a chat model under the name `scripted`, and the SDKs that ask it."""

from collections.abc import Iterator

import anthropic
import openai
import pytest
from front.scripted_engine import Front, ScriptedEngine, serving
from support.sdk import anthropic_sdk, openai_sdk


@pytest.fixture(scope="module")
def served(chat_tokenizer, chat_dir) -> Iterator[tuple[Front, ScriptedEngine]]:
    with serving(chat_tokenizer, model_dir=str(chat_dir), model_name="scripted") as front_and_engine:
        yield front_and_engine


@pytest.fixture
def sdk(front, engine) -> Iterator[openai.OpenAI]:
    with openai_sdk(front.url) as sdk:
        yield sdk


@pytest.fixture
def claude(front, engine) -> Iterator[anthropic.Anthropic]:
    with anthropic_sdk(front.url) as sdk:
        yield sdk
