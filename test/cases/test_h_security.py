"""Cases h on real servers: what strangers send as templates, addresses, patterns, bytes, keys and code."""

import http.server
import json
import os
import pickle
import socket
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import SCRIPTED, Payload, edit_json
from support.http_background import in_background
from support.server import RunningServer, listening, start_server

ASK = [{"role": "user", "content": "hi"}]
POOL = ("--max_total_token_num", "2000")


@pytest.mark.parametrize("where", ["tokenizer_config.json", "chat_template.jinja", "--chat_template"])
def test_case_109_a_template_reaches_nothing(checkpoints, tmp_path: Path, where: str) -> None:
    touched = tmp_path / "touched"
    source = f"{{{{ cycler.__init__.__globals__.os.popen('touch {touched}').read() }}}}"
    model_dir = checkpoints.copy("script", tmp_path / "model")
    (model_dir / "chat_template.jinja").unlink(missing_ok=True)
    flags: tuple[str, ...] = ()
    if where == "tokenizer_config.json":
        edit_json(model_dir / where, chat_template=source)
    elif where == "chat_template.jinja":
        (model_dir / where).write_text(source)
    else:
        (tmp_path / "own.jinja").write_text(source)
        flags = ("--chat_template", str(tmp_path / "own.jinja"))
    with start_server(model_dir, *POOL, *flags) as server:
        refused = server.post("/v1/chat/completions", {"messages": ASK})
        assert refused.status == 400 and "unsafe" in refused.json()["error"]["message"]
        assert server.text("A", do_sample=False) == SCRIPTED
    assert not touched.exists()


class Trap(http.server.HTTPServer):
    """hits: requests that came, which none should."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
        self.hits = 0

    def get_request(self):
        self.hits += 1
        return super().get_request()


@pytest.fixture
def trap() -> Iterator[Trap]:
    with in_background(Trap()) as trap:
        yield trap


def test_case_110_nothing_is_fetched(script: RunningServer, trap: Trap, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("sesame")
    port = trap.server_port
    hosts = ("127.0.0.1", "localhost", "[::ffff:127.0.0.1]", "2130706433")
    urls = [f"http://{host}:{port}/x.png" for host in hosts] + [f"file://{secret}", str(secret), "data:image/png,x"]
    for url in urls:
        part = {"type": "image_url", "image_url": {"url": url}}
        image = {"type": "image", "source": {"type": "url", "url": url}}
        bodies = {
            "/v1/chat/completions": {"messages": [{"role": "user", "content": [part]}]},
            "/v1/responses": {
                "input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}],
            },
            "/v1/messages": {"max_tokens": 3, "messages": [{"role": "user", "content": [image]}]},
            "/generate": {
                "inputs": "A", "parameters": {}, "multimodal_params": {"images": [{"type": "url", "data": url}]},
            },
        }  # fmt: skip
        for path, body in bodies.items():
            answer = script.post(path, body)
            assert answer.status == 400 and b"sesame" not in answer.body, (path, answer.body)
    assert trap.hits == 0


BAD_PATTERNS = ["(", "[", "(?<=x)+", "a{1000000000}", "(a+)+$" * 10000, r"\p{Foo}"]


@pytest.mark.parametrize("backend", ["llguidance", pytest.param("xgrammar", marks=pytest.mark.slow)])
def test_case_111_bad_constraints_disturb_nobody(checkpoints, backend: str) -> None:
    flags = ("--grammar_backend", backend, *POOL)
    with start_server(checkpoints("llama"), *flags) as server:
        alone = server.text("A", do_sample=False, max_new_tokens=300, ignore_eos=True)
        body = {"inputs": "A", "parameters": {"do_sample": False, "max_new_tokens": 300, "ignore_eos": True}}
        with server.open_stream(body) as stream:
            for pattern in BAD_PATTERNS:
                for wish in ({"guided_regex": pattern}, {"guided_json": {"type": "string", "pattern": pattern}}):
                    assert server.refusal("A", **wish)["param"] in wish
            for grammar in ("start: nowhere", "", "start", "root ::= nowhere"):
                assert server.refusal("A", guided_grammar=grammar)["param"] == "guided_grammar"
            assert "".join(event["token"]["text"] for event in stream) == alone
        server.wait_idle()


def chained_schema(link: dict[str, Any], length: int) -> dict[str, Any]:
    """Definitions that each refer to the next one where `link` says NEXT."""
    text = json.dumps(link)
    links = {f"d{i}": json.loads(text.replace("NEXT", f"#/$defs/d{i + 1}")) for i in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": links | {f"d{length}": {"type": "integer"}}}


DEEP_FORMS = {
    "references": {"guided_json": chained_schema({"$ref": "NEXT"}, 5000)},
    "objects": {"guided_json": chained_schema({"properties": {"a": {"$ref": "NEXT"}}, "required": ["a"]}, 2500)},
    "choices": {"guided_json": chained_schema({"anyOf": [{"$ref": "NEXT"}, {"type": "null"}]}, 3000)},
    "rules": {"guided_grammar": "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(1990)) + 'r1990: "b"'},
    "too many rules": {"guided_grammar": "start: R0\n" + "".join(f'R{i}: R{i + 1} "a"\n' for i in range(12000))},
    "nested": {"guided_grammar": "start: " + "(" * 50_000 + '"a"' + ")" * 50_000},
}


def test_case_111_no_form_is_too_deep_for_the_stack(script: RunningServer) -> None:
    for name, wish in DEEP_FORMS.items():
        answer = script.post("/generate", {"inputs": "A", "parameters": {"max_new_tokens": 3, **wish}})
        told = answer.error()["message"] if answer.status != 200 else ""
        assert answer.status == 200 or any(word in told for word in (*wish, "grammar")), (name, told)


def test_a_form_that_turns_out_to_be_too_much_is_the_requests_fault(script: RunningServer) -> None:
    assert "nowhere" in script.refusal("A", guided_grammar="start: <|nowhere|>")["message"]
    wish = dict(guided_regex="(a{1,900}){1,900}", max_new_tokens=400, min_new_tokens=400)
    for _ in range(2):
        with script.start_stream("A", **wish) as stream:
            *events, last = stream
        assert len(events) > 50, "the second one begins anew"
    answer = script.post("/generate", {"inputs": "A", "parameters": wish})
    assert answer.status == 400 and "too many expressions" in answer.error()["message"]
    assert last["error"] == answer.error()


def test_case_113_nothing_but_the_port_listens_and_no_pickle_is_read(checkpoints, tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    garbage = [pickle.dumps(Payload(touched)), os.urandom(5000), b"\x00" * 100, b"GET / HTTP/9.9\r\n\r\n"]
    flags = (*POOL, "--tp", "2", "--host", "0.0.0.0")
    with start_server(checkpoints("script"), *flags) as server:
        pids = server.pids()
        addresses = set().union(*map(listening, pids.values()))
        outside = {address for address in addresses if "0100007F:" not in address}
        assert outside == {f"00000000:{server.port:04X}"}
        (folder,) = [path for path in server.tmp.iterdir() if path.is_dir()]
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        sockets = [path for path in folder.iterdir() if stat.S_ISSOCK(path.stat().st_mode)]
        assert len(sockets) >= 4, "router, detokenizer, workers and fronts"
        for data in garbage:
            for path in sockets:
                with socket.socket(socket.AF_UNIX) as connection:
                    assert connection.connect_ex(str(path)) == 0, f"{path.name} does not listen: {server.log[-3000:]}"
                    with suppress(BrokenPipeError, ConnectionResetError):  # the other side may hang up on it
                        connection.sendall(data)
            with socket.create_connection(("127.0.0.1", server.port)) as connection:
                connection.sendall(data)
            server.post("/generate", data)
        assert server.text("A", do_sample=False) == SCRIPTED
        assert server.pids() == pids, "garbage ends no process"
    assert not touched.exists()


def test_case_114_the_key_is_in_no_log_and_opens_every_door(checkpoints) -> None:
    key = "k" * 20 + "-sesame"
    with start_server(checkpoints("script"), *POOL, "--api_key", key, "--log_level", "debug", key=key) as server:
        wrong = {"Authorization": f"Bearer {key}x"}
        paths = server.get("/openapi.json").json()["paths"]
        for path, methods in paths.items():
            for method in methods:
                answer = server.request(method.upper(), path.replace("{name}", "x"), {}, wrong)
                assert answer.status == (200 if path == "/liveness" else 401), path
        assert server.text("A", do_sample=False) == SCRIPTED
        assert server.post("/v1/messages", {"messages": ASK, "max_tokens": 2}, {"x-api-key": key}).status == 200
        assert "sesame" not in server.log
        assert "sesame" not in json.dumps(server.get("/get_server_info").json())


def test_case_117_code_of_the_checkpoint_runs_in_no_process(checkpoints, tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    model_dir = checkpoints.copy("script", tmp_path / "model")
    code = f"open({str(touched)!r}, 'w')\nfrom transformers import *\nclass Own(LlamaConfig): pass\n"
    for name in ("own.py", "modeling_own.py", "configuration_own.py", "tokenization_own.py"):
        (model_dir / name).write_text(code)
    mapping = {name: f"own.{name}" for name in ("AutoConfig", "AutoModelForCausalLM", "AutoProcessor")}
    edit_json(model_dir / "config.json", auto_map=mapping, model_file="own.py")
    edit_json(model_dir / "tokenizer_config.json", auto_map={"AutoTokenizer": ["own.Own", None]}, tokenizer_class="Own")
    with start_server(model_dir, *POOL) as server:
        assert server.text("A", do_sample=False) == SCRIPTED
        assert server.post("/v1/chat/completions", {"messages": ASK, "max_tokens": 2}).status == 200
    assert not touched.exists()
