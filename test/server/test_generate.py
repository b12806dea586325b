"""The LightLLM dialect of a real server, and what else it tells; every field: test/front/test_lightllm_api.py."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.checkpoints import SCRIPTED, token_ids
from support.server import RunningServer, ids_of, start_server, text_of

GREEDY = dict(do_sample=False, max_new_tokens=20)


def test_generate(script: RunningServer) -> None:
    answer = script.generate("A", **GREEDY)
    assert answer["generated_text"] == [SCRIPTED]
    assert (answer["count_output_tokens"], answer["finish_reason"], answer["prompt_tokens"]) == (13, "stop", 1)
    assert len(answer["logprobs"]) == 13


def test_generate_with_details(script: RunningServer) -> None:
    tokens = script.generate("A", return_details=True, **GREEDY)["tokens"]
    assert [token["id"] for token in tokens] == [*token_ids(SCRIPTED), 256]
    assert "".join(token["text"] for token in tokens) == SCRIPTED
    assert [token["special"] for token in tokens] == [False] * 12 + [True]


def test_generate_stream(script: RunningServer) -> None:
    """One event per token with its real id and count."""
    events = script.stream("xA", **GREEDY)
    assert ids_of(events) == [*token_ids(SCRIPTED), 256]
    assert {event["token"]["prompt_tokens"] for event in events} == {2}
    assert text_of(events) == SCRIPTED


def test_a_connection_is_kept(script: RunningServer) -> None:
    import http.client
    import json

    connection = http.client.HTTPConnection(script.host, script.port, timeout=60)
    for path in ("/generate", "/generate_stream", "/generate"):
        body = json.dumps({"inputs": "A", "parameters": GREEDY})
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200 and response.read()
    connection.close()


def test_text_and_ids_are_the_same_prompt(script: RunningServer) -> None:
    text = "<|im_start|>user\nA"
    ids = [257, *token_ids("user\nA")]
    assert script.post("/tokens", {"text": text, "parameters": {}}).json() == {"ntokens": len(ids)}
    by_text, by_ids = script.generate(text, prompt_logprobs=0), script.generate(ids, prompt_logprobs=0)
    assert by_text["prompt_token_ids"] == ids and by_text == by_ids


def test_what_the_server_tells_about_itself(script: RunningServer) -> None:
    name = Path(str(script.model_dir)).name
    for method in ("GET", "POST"):
        assert script.request(method, "/get_model_name").json() == {"model_name": name}
        info = script.request(method, "/get_server_info").json()
        assert (info["max_total_token_num"], info["tp"], info["port"]) == (4096, 1, script.port)
    (model,) = script.get("/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"]) == (name, 512)
    assert isinstance(model["created"], int) and model["owned_by"]


def test_a_model_goes_by_the_path_that_was_given(checkpoints, tmp_path: Path) -> None:
    link = tmp_path / "chain"
    link.symlink_to(checkpoints("script"))
    with start_server(link, "--max_total_token_num", "1000") as server:
        assert server.get("/get_model_name").json() == {"model_name": "chain"}
        for model in ("chain", str(link)):
            assert server.post("/v1/completions", {"model": model, "prompt": "A"}).status == 200


def test_two_fronts_share_the_port(serve) -> None:
    server = serve("script", "--model_name", "chain", "--httpserver_workers", "2")
    assert {"lightllm-http0", "lightllm-http1"} <= set(server.pids())
    assert server.get("/get_model_name").json() == {"model_name": "chain"}
    with ThreadPoolExecutor(16) as pool:
        assert set(pool.map(lambda _: server.text("A", **GREEDY), range(64))) == {SCRIPTED}


def test_token_load(serve) -> None:
    server = serve("slow")
    assert server.load()["current_load"] == 0
    with server.start_stream("abcd", do_sample=False, ignore_eos=True, max_new_tokens=1000) as stream:
        for _, event in zip(range(20), stream):
            count = event["token"]["count_output_tokens"]
        load = server.load()
        capacity = 4096
        assert load["running"] == 1
        assert (4 + count - 1) / capacity <= load["current_load"] <= 1004 / capacity
        assert load["current_load"] <= load["dynamic_max_load"] == load["logical_max_load"]
        assert load["dynamic_max_load"] == pytest.approx(1004 / capacity, abs=4 / capacity)
    server.wait_idle()


def test_the_router_maps_no_torch(script: RunningServer) -> None:
    maps = Path(f"/proc/{script.pids()['lightllm-router']}/maps").read_text()
    assert "libtorch" not in maps and "site-packages/torch/" not in maps


def test_all_parameters_in_one_batch(serve) -> None:
    """Requests with and without everything run together, and each gets what it would get alone."""
    server = serve("llama")
    asked = [
        dict(do_sample=False),
        dict(do_sample=False, repetition_penalty=1.5),
        dict(do_sample=False, logit_bias={"70": 8.0, "71": -8.0}),
        dict(do_sample=False, allowed_token_ids=[65, 66, 67]),
        dict(do_sample=False, stop_token_ids=[300, 301], min_new_tokens=10),
        dict(temperature=0.7, seed=1),
        dict(temperature=1.2, top_k=5, seed=2, n=2),
        dict(temperature=1.0, top_p=0.8, seed=3, presence_penalty=0.5),
        dict(temperature=1.0, min_p=0.1, seed=4, frequency_penalty=0.5, input_penalty=True),
        dict(do_sample=False, logprobs=3, prompt_logprobs=2),
        dict(do_sample=False, exponential_decay_length_penalty=[5, 1.5]),
        dict(do_sample=False, stop_sequences=["e", [70]], include_stop_str_in_output=True),
    ]
    asked = [dict(max_new_tokens=24, ignore_eos=True) | one for one in asked]
    prompts = [f"prompt {i} " * (i + 1) for i in range(len(asked))]
    alone = [server.generate(prompt, **one)["generated_text"] for prompt, one in zip(prompts, asked)]
    with ThreadPoolExecutor(36) as pool:
        calls = [pool.submit(server.generate, prompt, **one) for prompt, one in zip(prompts, asked) for _ in range(3)]
        together = [call.result()["generated_text"] for call in calls]
    assert together == [text for text in alone for _ in range(3)]


def test_exponential_decay_brings_the_end(script: RunningServer) -> None:
    """After 10 tokens the logit of eos, 0 here and so unmoved by a factor, grows as transformers makes it grow."""
    loops = script.generate("G", do_sample=False, max_new_tokens=40)
    assert loops["count_output_tokens"] == 40
    ended = script.generate("p", do_sample=False, max_new_tokens=200, exponential_decay_length_penalty=[10, 1.5])
    assert ended["finish_reason"] == "stop" and 10 < ended["count_output_tokens"] < 40


@pytest.mark.parametrize("data_type", ["bf16", *(pytest.param(d, marks=pytest.mark.slow) for d in ("fp32", "fp16"))])
def test_data_types(checkpoints, data_type: str) -> None:
    """The script's margins survive any of them; a random model's first token does in fp32."""
    with start_server(checkpoints("script"), "--max_total_token_num", "4096", "--data_type", data_type) as server:
        assert server.text("A", **GREEDY) == SCRIPTED
        dtype = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[data_type]
        assert dtype in str(server.get("/get_server_info").json())


def test_the_measured_pool(checkpoints) -> None:
    """Without a size the pool is measured, sane, and the arithmetic is printed."""
    with start_server(checkpoints("script")) as server:
        assert server.load()["max_total_token_num"] >= 512
        assert "KV" in server.log and "GiB" in server.log
        assert server.text("A", **GREEDY) == SCRIPTED


def test_a_start_from_any_folder_by_the_old_name(checkpoints, tmp_path) -> None:
    """`python -m server.api_server`, as the folder that setup.py installs makes it."""
    import subprocess
    import sys

    shim = Path(__file__).parents[2] / "lightllm" / "_server_shim"
    (tmp_path / "server").symlink_to(shim)
    path = os.pathsep.join((str(tmp_path), str(shim.parents[1])))
    done = subprocess.run(
        [sys.executable, "-m", "server.api_server", "--help"], cwd=tmp_path, env=os.environ | {"PYTHONPATH": path},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "--max_total_token_num" in done.stdout


def test_a_stopped_process_goes_on_later(checkpoints) -> None:
    """A worker that stands still for a while (SIGSTOP) delays answers and breaks none."""
    with start_server(checkpoints("script"), "--max_total_token_num", "4096") as server:
        for name in ("lightllm-tp0", "lightllm-router", "lightllm-detok"):
            pid = server.pids()[name]
            os.kill(pid, signal.SIGSTOP)
            with ThreadPoolExecutor(4) as pool:
                waiting = [pool.submit(server.text, "A", **GREEDY) for _ in range(4)]
                assert server.get("/health").status == 200
                os.kill(pid, signal.SIGCONT)
                assert {one.result() for one in waiting} == {SCRIPTED}
