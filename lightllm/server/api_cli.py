"""The command line: flags out of ServerArgs, and the `lightllm` command: serve, chat, generate, bench, options."""

from __future__ import annotations

import argparse
import sys
import typing
from collections.abc import Sequence
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

from lightllm.server.core.server_args import ServerArgs
from lightllm.server.workloads import SETS

# Flags of the original LightLLM that mean nothing here, and what does their work.
REPLACED = {
    "router_token_ratio": "--schedule_policy says how freely requests are admitted",
    "router_max_wait_tokens": "prompts are computed beside the tokens of running requests; --tpot_slo bounds how much",
}
OPTIONS_PAGE = Path("docs/options.md")


def parse_server_args(argv: Sequence[str] | None = None) -> ServerArgs:
    """The flags of the server; ends the process with a message if they are wrong."""
    parser = argparse.ArgumentParser(prog="lightllm.server.api_server", allow_abbrev=False)
    add_server_flags(parser)
    return _server_args(parser, parser.parse_args(argv))


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """One flag for each field of ServerArgs."""
    types = typing.get_type_hints(ServerArgs)
    for field in fields(ServerArgs):
        options: dict[str, Any] = {"help": field.metadata["help"], "default": _default(field)}
        kind = types[field.name]
        if kind is bool:
            options["action"] = "store_true"
        elif typing.get_origin(kind) is list:
            options |= {"nargs": "+", "type": typing.get_args(kind)[0], "metavar": field.metadata.get("metavar", "ID")}
        else:
            choices = field.metadata.get("choices")
            options |= {"type": _scalar(kind), "choices": choices, "metavar": None if choices else _word(kind)}
        parser.add_argument(f"--{field.name}", **options)
    for name in REPLACED:
        parser.add_argument(f"--{name}", action=_Refuse, help=argparse.SUPPRESS)


class _Refuse(argparse.Action):
    """Ends the process with what to use instead."""

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        parser.error(f"{option_string} is not a flag of this server: {REPLACED[self.dest]}")


def _server_args(parser: argparse.ArgumentParser, values: argparse.Namespace) -> ServerArgs:
    args = ServerArgs(**{field.name: getattr(values, field.name) for field in fields(ServerArgs)})
    try:
        args.check()
    except ValueError as error:
        parser.error(str(error))
    return args


def _default(field: Field) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _scalar(kind: Any) -> type:
    """int of `int | None`."""
    return next((part for part in typing.get_args(kind) if part is not type(None)), kind)


def _word(kind: Any) -> str:
    return {int: "N", float: "X", str: "TEXT"}[_scalar(kind)]


def options_page() -> str:
    """docs/options.md: one line for each flag."""
    lines = [
        "# Options of the server",
        "",
        "Written by `lightllm options` from `lightllm/server/core/server_args.py`; do not edit.",
        "",
        "| flag | default | meaning |",
        "|---|---|---|",
    ]
    for field in fields(ServerArgs):
        default = _default(field)
        shown = "" if default is None or default == [] else f"`{default}`"
        choices = ", ".join(f"`{choice}`" for choice in field.metadata.get("choices", ()))
        meaning = field.metadata["help"] + (f" ({choices})" if choices else "")
        lines.append(f"| `--{field.name}` | {shown} | {meaning} |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    """The `lightllm` command."""
    parser = argparse.ArgumentParser(prog="lightllm", description="serve and use open language models")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    commands.add_parser("serve", help="start a server", allow_abbrev=False)
    chat = commands.add_parser("chat", help="talk to a model in the terminal", allow_abbrev=False)
    chat.add_argument("--system", help="system prompt")
    generate = commands.add_parser("generate", help="continue one prompt", allow_abbrev=False)
    generate.add_argument("prompt", help="text to continue")
    bench = commands.add_parser("bench", help="measure a server under load", allow_abbrev=False)
    for client in (chat, generate, bench):
        client.add_argument("--url", help="a running server, for instance http://127.0.0.1:8000; default: an own model")
    _add_bench_flags(bench)
    for client in (chat, generate):
        client.add_argument("--max_new_tokens", type=int, help="output tokens at most", metavar="N")
        client.add_argument("--temperature", type=float, help="0 takes the likeliest token", metavar="X")
        client.add_argument("--seed", type=int, help="the same seed gives the same text", metavar="N")
    for command in commands.choices.values():
        add_server_flags(command)
    options = commands.add_parser("options", help="write docs/options.md")
    options.add_argument("--path", type=Path, default=OPTIONS_PAGE, help="where to write it")
    values = parser.parse_args(argv)
    if values.command == "options":
        values.path.write_text(options_page())
        return
    args = _server_args(commands.choices[values.command], values)
    if values.command == "serve":
        from lightllm.server.api_start import serve

        sys.exit(serve(args))
    from lightllm.server import terminal

    if values.command == "bench":
        named = {name: getattr(values, name) for name in terminal.BenchOptions._fields}
        terminal.bench(values.url, args, terminal.BenchOptions(**named))
        return
    given = {name: getattr(values, name) for name in ("max_new_tokens", "temperature", "seed")}
    parameters = {name: value for name, value in given.items() if value is not None}
    if values.command == "chat":
        terminal.chat(values.url, args, values.system, parameters)
    else:
        terminal.generate(values.prompt, values.url, args, parameters)


def _add_bench_flags(bench: argparse.ArgumentParser) -> None:
    bench.add_argument("--api", choices=["lightllm", "openai"], default="lightllm", help="dialect of the requests")
    bench.add_argument("--set", choices=SETS, default="sharegpt", help="lengths of prompts and outputs")
    bench.add_argument("--requests", type=int, help="how many; default: all of the set, or 64", metavar="N")
    bench.add_argument("--prompt_tokens", type=int, help="of every prompt, instead of a set", metavar="N")
    bench.add_argument("--output_tokens", type=int, default=128, help="of every output, with it", metavar="N")
    bench.add_argument("--rate", type=float, default=0, help="requests a second; 0: all at once", metavar="X")
    bench.add_argument("--concurrency", type=int, default=0, help="how many run at most; 0: all", metavar="N")
    bench.add_argument("--schema", type=Path, help="file with a JSON schema that outputs must match", metavar="FILE")
    bench.add_argument("--most_ttft", type=float, default=1000, help="ms to the first token, for goodput", metavar="X")
    bench.add_argument("--most_tpot", type=float, default=50, help="ms a token, for goodput", metavar="X")
    bench.add_argument("--json", type=Path, help="where to write the results", metavar="FILE")


if __name__ == "__main__":
    main()
