"""What constrains an answer in a conversation: the calls that it must hold or may hold, and the thoughts before it."""

from dataclasses import replace
from typing import Any

import msgspec

from lightllm.common.grammar.forms import Calls, CallTag, Json, Thoughts, telling
from lightllm.server.chat_format import Chat, ChatFormat, Prompt
from lightllm.server.constraints import Constraint, constraint_of
from lightllm.server.core.sampling_params import InvalidParameter, SamplingParams
from lightllm.server.output_parsers.base import CallSyntax
from lightllm.server.output_parsers.reasoning import END_THINK, THINK


def constrained(format: ChatFormat, chat: Chat, sampling: SamplingParams) -> tuple[Chat, Constraint | None]:
    """The chat, told whether a grammar rules its answer from the first token on, and the constraint if there is one.

    A call that must be made is a list in plain JSON. Calls that may be made follow the schemas of strict tools in the
    model's own format; calls take the place of a constrained answer. Raises InvalidParameter.
    """
    asked = constraint_of(sampling)
    if chat.forces_call:
        name = chat.tool_choice.partition(":")[2] or None
        schema = calls_schema(chat.tools, name, chat.parallel_tool_calls)
        return replace(chat, constrained=True), Constraint("tools", Json(schema))
    if asked is not None:
        if chat.offers_tools and _syntax(format, chat) is not None:
            asked = asked._replace(form=msgspec.structs.replace(_calls(format, chat), answer=asked.form))
        return replace(chat, constrained=not format.thinks(chat)), asked
    return chat, Constraint("tools", _calls(format, chat)) if chat.strict_tools and chat.offers_tools else None


def after_thoughts(format: ChatFormat, prompt: Prompt, constraint: Constraint) -> Constraint:
    """The same behind the thoughts with which a model begins its answer to this prompt."""
    form = constraint.form
    if prompt.closes_reasoning or isinstance(form, Thoughts) or (isinstance(form, Calls) and form.answer is None):
        return constraint
    begin = None if prompt.opens_reasoning else format.pieces(THINK)[0]
    return constraint._replace(form=Thoughts(begin, format.pieces(END_THINK)[0], form))


def _syntax(format: ChatFormat, chat: Chat) -> CallSyntax | None:
    parser = format.tool_parser(chat)
    return None if parser is None else parser.syntax


def _calls(format: ChatFormat, chat: Chat) -> Calls:
    """Any text, in which a call of a strict tool follows its schema, and one of another tool has an object."""
    syntax = _syntax(format, chat)
    if syntax is None:
        raise InvalidParameter(
            "tools",
            "strict tools need a model whose calls hold JSON, or tool_choice required; this one's format "
            "(--tool_call_parser) holds none",
        )
    (trigger,) = format.pieces(syntax.trigger)
    tags = []
    for tool in chat.tools:
        function = tool["function"]
        schema = _parameters(function) if function["name"] in chat.strict_tools else {"type": "object"}
        begin = syntax.begin.replace("NAME", function["name"])
        tags.append(CallTag(format.pieces(begin), schema, format.pieces(syntax.end)))
    thinking = [piece for tag in (THINK, END_THINK) for piece in format.pieces(tag)] if format.reasons else []
    return Calls(trigger, tags, [piece for piece in thinking if not isinstance(piece, str)])


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
    return {"type": "object"} | telling(function.get("parameters") or {"properties": {}, "additionalProperties": False})


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
