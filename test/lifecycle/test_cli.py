"""The command line: a flag for each field of ServerArgs, refusals that name it, an option page that is fresh."""

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import lightllm
from lightllm.server import api_cli
from lightllm.server.api_cli import options_page, parse_server_args
from lightllm.server.core.server_args import ServerArgs

REPOSITORY = Path(__file__).parents[2]

GIVEN = {
    "model_dir": ("/models/a", "/models/a"),
    "model_name": ("mine", "mine"),
    "host": ("0.0.0.0", "0.0.0.0"),
    "port": ("8123", 8123),
    "httpserver_workers": ("2", 2),
    "tp": ("4", 4),
    "device": ("cpu", "cpu"),
    "data_type": ("bf16", "bf16"),
    "load_format": ("random", "random"),
    "trust_remote_code": (None, True),
    "nccl_timeout": ("5.5", 5.5),
    "enable_ep_moe": (None, True),
    "chat_template": ("/templates/chatml.jinja", "/templates/chatml.jinja"),
    "tool_call_parser": ("qwen3_coder", "qwen3_coder"),
    "reasoning_parser": ("deepseek-r1", "deepseek-r1"),
    "allow_special_tokens_in_prompt": (None, True),
    "allow_request_chat_template": (None, True),
    "api_key": ("one two", ["one", "two"]),
    "allowed_origins": ("http://a.example", ["http://a.example"]),
    "strict_fields": (None, True),
    "eos_id": ("2 32000", [2, 32000]),
    "max_total_token_num": ("100000", 100000),
    "mem_fraction": ("0.5", 0.5),
    "max_req_total_len": ("4096", 4096),
    "running_max_req_size": ("64", 64),
    "batch_max_tokens": ("1024", 1024),
    "chunked_prefill_size": ("256", 256),
    "graph_max_batch_size": ("8", 8),
    "graph_max_tokens": ("64", 64),
    "mixed_prefill_size": ("100", 100),
    "llm_kv_type": ("int8kv", "int8kv"),
    "disable_autotune": (None, True),
    "disable_cudagraph": (None, True),
    "schedule_policy": ("conservative", "conservative"),
    "ttft_slo": ("10", 10.0),
    "tpot_slo": ("0.05", 0.05),
    "fair_share": (None, True),
    "disable_dynamic_prompt_cache": (None, True),
    "max_queue": ("10", 10),
    "max_body_size": ("1", 1),
    "drain_timeout": ("2.5", 2.5),
    "use_tgi_api": (None, True),
    "profile_dir": ("traces", "traces"),
    "request_log": ("json", "json"),
    "grammar_backend": ("xgrammar", "xgrammar"),
    "otlp_traces_endpoint": ("http://localhost:4318/v1/traces", "http://localhost:4318/v1/traces"),
    "log_level": ("debug", "debug"),
}

WRONG = [
    ("httpserver_workers", "0"),
    ("httpserver_workers", "129"),
    ("tp", "0"),
    ("tp", "129"),
    ("tp", "two"),
    ("running_max_req_size", "0"),
    ("batch_max_tokens", "-1"),
    ("chunked_prefill_size", "0"),
    ("max_total_token_num", "1"),
    ("max_req_total_len", "1"),
    ("schedule_policy", "oracle"),
    ("ttft_slo", "0"),
    ("tpot_slo", "nan"),
    ("max_queue", "0"),
    ("max_body_size", "0"),
    ("grammar_backend", "outlines"),
    ("port", "65536"),
    ("port", "-1"),
    ("port", "8000.5"),
    ("mem_fraction", "0"),
    ("mem_fraction", "1.1"),
    ("mem_fraction", "nan"),
    ("nccl_timeout", "0"),
    ("drain_timeout", "-1"),
    ("drain_timeout", "inf"),
    ("drain_timeout", "nan"),
    ("eos_id", "-1"),
    ("eos_id", "</s>"),
    ("device", "tpu"),
    ("tool_call_parser", "xml"),
    ("reasoning_parser", "loud"),
    ("data_type", "int3"),
    ("load_format", "gguf"),
    ("log_level", "loud"),
]


def argv(name: str) -> list[str]:
    text, _ = GIVEN[name]
    return [f"--{name}", *(text.split() if text else [])]


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        parse_server_args(words)
    assert ended.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_nothing_given() -> None:
    assert parse_server_args([]) == ServerArgs()


def test_every_flag_at_once() -> None:
    assert GIVEN.keys() == {field.name for field in fields(ServerArgs)}
    args = parse_server_args([word for name in GIVEN for word in argv(name)])
    assert args == ServerArgs(**{name: value for name, (_, value) in GIVEN.items()})


@pytest.mark.parametrize("name", GIVEN)
def test_one_flag_alone(name: str) -> None:
    assert parse_server_args(argv(name)) == ServerArgs(**{name: GIVEN[name][1]})
    assert GIVEN[name][1] != getattr(ServerArgs(), name), "it would show nothing"


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_wrong_value_is_refused_by_its_name(capsys: pytest.CaptureFixture[str], name: str, value: str) -> None:
    assert f"--{name}" in refusal(capsys, f"--{name}={value}")


@pytest.mark.parametrize("word", ["--no_such_flag", "--por=1", "--max-queue=3", "surplus", "--trust_remote_code=yes"])
def test_an_unknown_word_is_refused(capsys: pytest.CaptureFixture[str], word: str) -> None:
    assert word.split("=")[0] in refusal(capsys, word)


@pytest.mark.parametrize(
    "flag, instead", [("router_token_ratio", "--schedule_policy"), ("router_max_wait_tokens", "--tpot_slo")]
)
def test_flags_of_the_original_are_refused_with_what_does_their_work(
    capsys: pytest.CaptureFixture[str], flag: str, instead: str
) -> None:
    assert instead in refusal(capsys, f"--{flag}", "0.5")


def test_a_flag_without_its_value_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--port" in refusal(capsys, "--port")


def test_serve_takes_the_same_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[ServerArgs] = []
    monkeypatch.setattr("lightllm.server.api_start.serve", lambda args: served.append(args) or 7)
    with pytest.raises(SystemExit) as ended:
        api_cli.main(["serve", *argv("port"), *argv("eos_id")])
    assert ended.value.code == 7
    assert served == [ServerArgs(port=8123, eos_id=[2, 32000])]


def test_a_command_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        api_cli.main([])
    assert ended.value.code == 2 and "command" in capsys.readouterr().err


def test_the_option_page_is_fresh() -> None:
    page = (REPOSITORY / "docs/options.md").read_text()
    assert page == options_page(), "run: lightllm options"
    for field in fields(ServerArgs):
        (line,) = (line for line in page.splitlines() if line.startswith(f"| `--{field.name}` |"))
        assert field.metadata["help"] in line
        assert line.count("|") == 4, "a bar in the help would break the table"


def test_options_writes_the_page(tmp_path: Path) -> None:
    api_cli.main(["options", "--path", str(tmp_path / "options.md")])
    assert (tmp_path / "options.md").read_text() == options_page()


def test_options_has_nowhere_to_write(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        api_cli.main(["options", "--path", str(tmp_path / "nowhere" / "options.md")])
    assert ended.value.code == 2 and "--path" in capsys.readouterr().err


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        api_cli.main(["--version"])
    assert (ended.value.code, capsys.readouterr().out) == (0, f"{lightllm.__version__}\n")


def test_help_loads_neither_torch_nor_the_server() -> None:
    heavy = "{'torch', 'transformers', 'uvicorn'} & sys.modules.keys()"
    code = f"import sys, lightllm.server.api_cli; print(*({heavy}))"
    ended = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "\n", "")


def test_a_user_without_a_home_can_start_it() -> None:
    """As containers may have them; the history of `lightllm chat` alone lives there."""
    script = """
import os, pwd
os.environ.pop("HOME", None)
pwd.getpwuid = lambda uid: {}[uid]
from lightllm.server.api_cli import parse_server_args
print(parse_server_args(["--port", "8123"]).port)
"""
    assert subprocess.check_output([sys.executable, "-c", script], cwd=REPOSITORY, text=True) == "8123\n"
