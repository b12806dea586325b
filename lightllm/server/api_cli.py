"""The command line: flags out of ServerArgs, and the `lightllm` command: serve, chat, generate, bench, options."""

import argparse
import sys
import typing
from collections.abc import Sequence
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lightllm import __version__
from lightllm.server import terminal
from lightllm.server.core.server_args import ServerArgs

# Flags of the original LightLLM that mean nothing here, and what does their work.
REPLACED = {
    "router_token_ratio": "--schedule_policy says how freely requests are admitted",
    "router_max_wait_tokens": "prompts are computed beside the tokens of running requests; --tpot_slo bounds how much",
}
OPTIONS_PAGE = Path("docs/options.md")

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")


def parse_server_args(argv: Sequence[str] | None = None) -> ServerArgs:
    """The flags of the server; ends the process with a message if they are wrong."""
    parser = argparse.ArgumentParser(prog="lightllm.server.api_server", allow_abbrev=False)
    _add_server_flags(parser)
    return _server_args(parser, parser.parse_args(argv))


def _add_server_flags(parser: argparse.ArgumentParser) -> None:
    _add_flags(parser, ServerArgs)
    for name in REPLACED:
        parser.add_argument(f"--{name}", action=_Refuse, help=argparse.SUPPRESS)


def _add_flags(parser: argparse.ArgumentParser, options_class: type) -> None:
    """One flag for each field."""
    types = typing.get_type_hints(options_class)
    for field in fields(options_class):
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


class _Refuse(argparse.Action):
    """Ends the process with what to use instead."""

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        parser.error(f"{option_string} is not a flag of this server: {REPLACED[self.dest]}")


def _server_args(parser: argparse.ArgumentParser, values: argparse.Namespace) -> ServerArgs:
    args = _read(ServerArgs, values)
    try:
        args.check()
    except ValueError as error:
        parser.error(str(error))
    return args


def _read(options_class: type[T], values: argparse.Namespace) -> T:
    return options_class(**{field.name: getattr(values, field.name) for field in fields(options_class)})


def _default(field: Field) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _scalar(kind: Any) -> type:
    """int of `int | None`."""
    return next((part for part in typing.get_args(kind) if part is not type(None)), kind)


def _word(kind: Any) -> str:
    return {int: "N", float: "X", str: "TEXT", Path: "FILE"}[_scalar(kind)]


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
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    commands.add_parser("serve", help="start a server", allow_abbrev=False)
    chat = commands.add_parser("chat", help="talk to a model in the terminal", allow_abbrev=False)
    chat.add_argument("--system", help="system prompt")
    generate = commands.add_parser("generate", help="continue one prompt", allow_abbrev=False)
    generate.add_argument("prompt", help="text to continue")
    bench = commands.add_parser("bench", help="measure a server under load", allow_abbrev=False)
    for client in (chat, generate, bench):
        client.add_argument("--url", help="a running server, for instance http://127.0.0.1:8000; default: an own model")
    _add_flags(bench, terminal.BenchOptions)
    for client in (chat, generate):
        _add_flags(client, terminal.OutputOptions)
    for command in commands.choices.values():
        _add_server_flags(command)
    options = commands.add_parser("options", help="write docs/options.md")
    options.add_argument("--path", type=Path, default=OPTIONS_PAGE, help="where to write it")
    values = parser.parse_args(argv)
    if values.command == "options":
        try:
            values.path.write_text(options_page())
        except OSError as error:
            options.error(f"{error}; --path says where to write")
        return
    args = _server_args(commands.choices[values.command], values)
    match values.command:
        case "serve":
            from lightllm.server.api_start import serve

            sys.exit(serve(args))
        case "bench":
            terminal.bench(values.url, args, _read(terminal.BenchOptions, values))
        case "chat":
            terminal.chat(values.url, args, values.system, _read(terminal.OutputOptions, values))
        case "generate":
            terminal.generate(values.prompt, values.url, args, _read(terminal.OutputOptions, values))


if __name__ == "__main__":
    main()
