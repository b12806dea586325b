"""200 schemas at temperature 1 on the embedded model: what is finished validates; neighbours do not notice."""

import json
import math
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import openai
import pytest
from support.sdk import openai_sdk
from support.server import RunningServer, start_server

from lightllm.server.bench_serving import Load, summary

NUM_SCHEMAS = 200
CONCURRENT = 16
RECURSIVE = 0.04  # a share of the schemas: a small model likes to go on in a node that may hold a node
NAMES = ["name", "city", "größe", "年齢", "tags", "id", "price", "active", "kind", "next", "items", "émoji 🫠"]


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """Nested objects and lists, enums, patterns, references, unions, bounded numbers, unicode."""
    simple: list[dict[str, Any]] = [
        {"type": "boolean"},
        {"type": "null"},
        {"type": "integer", "minimum": rng.randint(-50, 0), "maximum": rng.randint(1, 5000)},
        {"type": "number", "minimum": 0, "maximum": 1000},
        {"enum": rng.sample(["red", "grün", "青", 1, 2.5, None, True], 3)},
        {"const": rng.choice(["v1", "龜", 7])},
        {"type": "string", "maxLength": rng.randint(5, 40)},
        {"type": "string", "pattern": rng.choice(["^[A-Z]{2}[0-9]{3}$", "^(ja|nein|vielleicht)$", "^[a-zé]{1,12}$"])},
        {"type": "string", "format": rng.choice(["date", "uuid", "ipv4"])},
        {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 9}, {"type": "null"}]},
        {"type": ["boolean", "null"]},
    ]
    if depth == 3 or (depth and rng.random() < 0.5):
        return rng.choice(simple)
    if depth and rng.random() < 0.3:
        return {"type": "array", "items": random_schema(rng, depth + 1), "minItems": rng.randint(0, 1), "maxItems": 3}
    names = rng.sample(NAMES, rng.randint(1, 4))
    properties = {name: random_schema(rng, depth + 1) for name in names}
    required = [name for name in names if rng.random() < 0.8]
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    if depth == 0 and rng.random() < 0.4:
        properties["first"] = properties["second"] = {"$ref": "#/$defs/shared"}
        schema["$defs"] = {"shared": random_schema(rng, 2)}
    if depth == 0 and rng.random() < RECURSIVE:
        properties["child"] = {"$ref": "#/$defs/node"}
        numbers = {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "node": {"$ref": "#/$defs/node"}}
        node = {"type": "object", "properties": numbers, "required": ["n"], "additionalProperties": False}
        schema.setdefault("$defs", {})["node"] = node
    return schema


@pytest.fixture(scope="module")
def server():
    with start_server(None, "--max_total_token_num", "30000", "--request_log", "none") as server:
        yield server


def ask(sdk: openai.OpenAI, number: int, schema: dict[str, Any]) -> tuple[str, str]:
    question = "Write one JSON object that describes an invented thing."
    answer = sdk.chat.completions.create(
        model="SmolLM2-135M-Instruct",
        messages=[{"role": "user", "content": question}],
        response_format={"type": "json_schema", "json_schema": {"name": "thing", "schema": schema}},
        temperature=1,
        seed=number,
        max_tokens=512,
    )
    return answer.choices[0].message.content or "", answer.choices[0].finish_reason


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_two_hundred_schemas(server: RunningServer) -> None:
    schemas = [random_schema(random.Random(seed)) for seed in range(NUM_SCHEMAS)]
    prompts = ["The capital of France is", "Once upon a time", "def fibonacci(n):"]
    alone = [server.text(prompt, do_sample=False, max_new_tokens=24) for prompt in prompts]
    with (
        openai_sdk(server.url) as sdk,
        ThreadPoolExecutor(CONCURRENT) as pool,
    ):
        running = [pool.submit(ask, sdk, *numbered) for numbered in enumerate(schemas)]
        beside = [server.text(prompt, do_sample=False, max_new_tokens=24) for prompt in prompts]
        answers = [future.result() for future in running]
    finished = 0
    for schema, (text, reason) in zip(schemas, answers):
        if reason == "stop":
            jsonschema.validate(json.loads(text), schema)
            finished += 1
    print(f"{finished} of {NUM_SCHEMAS} finished")
    assert finished >= 0.95 * NUM_SCHEMAS
    assert beside == alone


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_time_that_a_constraint_adds_to_a_step(server: RunningServer) -> None:
    """Printed, not judged: the median time between tokens of 1, 16 and 64 rows with and without a grammar."""
    schema = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 999}, "minItems": 100}
    vocab_size = server.get("/get_server_info").json()["engine"]["vocab_size"]
    for rows in (1, 16, 64):
        steps = {}
        for name, wishes in (("free", {}), ("constrained", {"guided_json": json.dumps(schema)})):
            streams = Load(server.url, vocab_size, **wishes).run([(8, 32)] * rows)
            steps[name] = summary(*streams, math.inf, math.inf)["between_p50_ms"]
        print(f"{rows} rows: {steps['free']:.1f} ms a step, constrained {steps['constrained']:.1f} ms")
