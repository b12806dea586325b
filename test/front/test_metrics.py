"""/metrics and the request log: what is counted is what happened."""

import json
import logging

import pytest
from front.scripted_engine import LONG, connect
from prometheus_client.parser import text_string_to_metric_families
from support.server import until


def samples(client) -> dict[str, float]:
    answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {
        sample.name + (str(sorted(sample.labels.items())) if sample.labels else ""): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def test_requests_are_counted(client, engine) -> None:
    before = samples(client)
    client.post("/generate", json={"inputs": "A", "parameters": {"max_new_tokens": 5}})
    client.post("/v1/completions", json={"prompt": "A", "max_tokens": 3, "n": 2})
    client.post("/generate", json={"inputs": "A", "parameters": {"top_k": -5}})
    engine.refusal = (429, "full")
    client.post("/generate", json={"inputs": "A", "parameters": {}})
    after = samples(client)

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0)

    assert grown("lightllm_requests_total[('outcome', 'length')]") == 2
    assert grown("lightllm_requests_total[('outcome', 'error 429')]") == 1
    assert grown("lightllm_http_requests_total[('path', '/generate'), ('status', '200')]") == 1
    assert grown("lightllm_http_requests_total[('path', '/generate'), ('status', '400')]") == 1
    assert grown("lightllm_http_requests_total[('path', '/generate'), ('status', '429')]") == 1
    for name in ("time_to_first_token", "request", "time_per_output_token"):
        assert grown(f"lightllm_{name}_seconds_count") == 2
    for stage in ("tokenize", "queue", "prefill", "decode", "detokenize"):
        ended = 3 if stage == "tokenize" else 2
        assert grown(f"lightllm_stage_seconds_count[('stage', '{stage}')]") == ended
    assert grown("lightllm_inter_token_seconds_count") >= 1


def test_the_routers_numbers(client) -> None:
    found = samples(client)
    assert found["lightllm_kv_tokens_used"] == 500 and found["lightllm_kv_tokens_predicted_peak"] == 2500
    assert found["lightllm_kv_tokens_capacity"] == 5000 and found["lightllm_sequences_waiting"] == 3


def test_a_client_that_leaves_is_counted(front, client, engine) -> None:
    engine.pace = 0.01
    name = "lightllm_requests_total[('outcome', 'abandoned')]"
    before = samples(client).get(name, 0)
    connection = connect(front, "/generate", LONG)
    until(lambda: engine.running == 1)
    connection.close()
    until(lambda: samples(client).get(name, 0) == before + 1)


@pytest.mark.parametrize("kind", ["human", "json"])
def test_a_line_for_every_request(kind, monkeypatch) -> None:
    from lightllm.server.core.messages import Finish
    from lightllm.server.core.sampling_params import SamplingParams
    from lightllm.server.httpserver import metrics
    from lightllm.server.httpserver.generation import Generation, Times, Token

    lines: list[str] = []
    monkeypatch.setattr(metrics.logger, "info", lambda form, line: lines.append(line))
    assert metrics.logger.isEnabledFor(logging.INFO)
    watch = metrics.RequestWatch(kind)
    generation = Generation(
        [1, 2, 3], SamplingParams(n=1), Times(10.0, 10.5), lambda closed: watch.ended(7, "me\ntoo", closed)
    )
    generation.start(2, at=11.5)
    generation.add(Token(0, 5, "x", -0.1, Finish.NONE), at=13.5)
    generation.add(Token(0, 6, "y", -0.1, Finish.STOP), at=17.5)
    generation.close()
    (line,) = lines
    if kind == "json":
        told = json.loads(line)
        assert (told["client"], told["outcome"], told["prompt_tokens"], told["output_tokens"]) == (
            "me\ntoo",
            "stop",
            3,
            2,
        )
        stages = (told["tokenize"], told["queue"], told["prefill"], told["decode"])
        assert stages == (0.5, 1.0, 2.0, 4.0) and told["detokenize"] > 0 and told["cached_tokens"] == 2
    else:
        assert line.startswith(
            r"request 7 of me\ntoo: stop; 3 prompt tokens (2 cached), 2 output tokens; tokenize 0.500 s, "
        )
        assert "queue 1.000 s, prefill 2.000 s, decode 4.000 s, detokenize " in line
