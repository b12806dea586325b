"""Constraints on the form of an output: what a request asks for, compiled into the grammar that the worker enforces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from lightllm.common.grammar.compiler import (
    GrammarRefused,
    compile_choice,
    compile_json,
    compile_lark,
    compile_regex,
)
from lightllm.server.core.sampling_params import InvalidParameter, SamplingParams

COMPILERS: dict[str, Callable[[Any], str]] = {
    "guided_json": compile_json,
    "guided_regex": compile_regex,
    "guided_grammar": compile_lark,
    "guided_choice": compile_choice,
}


def with_grammar(resolved: SamplingParams) -> SamplingParams:
    """A copy whose one constraint is compiled into `guided_grammar`; the same if there is none.

    May take a second; compiled grammars are kept. Raises InvalidParameter naming the field.
    """
    names = resolved.constraints()
    if not names:
        return resolved
    (name,) = names
    try:
        grammar = COMPILERS[name](getattr(resolved, name))
    except GrammarRefused as error:
        raise InvalidParameter(name, str(error)) from None
    return msgspec.structs.replace(resolved, **dict.fromkeys(COMPILERS, None) | {"guided_grammar": grammar})


def calls_schema(tools: list[dict[str, Any]], name: str | None, parallel: bool) -> dict[str, Any]:
    """JSON schema of a list of calls: of any of the tools, or of the one called `name` and only once."""
    chosen = [tool["function"] for tool in tools if name in (None, tool["function"]["name"])]
    definitions = {f"tool{i}": _moved(_parameters(function), f"#/$defs/tool{i}") for i, function in enumerate(chosen)}
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": function["name"]}, "arguments": {"$ref": f"#/$defs/tool{i}"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for i, function in enumerate(chosen)
    ]
    once = {"maxItems": 1} if name is not None or not parallel else {}
    return {"type": "array", "minItems": 1, "items": {"anyOf": calls}, "$defs": definitions} | once


def _parameters(function: dict[str, Any]) -> dict[str, Any]:
    """Arguments are an object, whatever the schema leaves open; a tool without parameters takes none."""
    return {"type": "object"} | (function.get("parameters") or {"properties": {}, "additionalProperties": False})


def _moved(schema: Any, place: str) -> Any:
    """A schema that stands somewhere in another one: references to its own root point there."""
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(item, place) for key, item in schema.items()}
    if isinstance(reference := schema.get("$ref"), str) and reference.startswith("#"):
        moved["$ref"] = place + reference[1:]
    return moved
