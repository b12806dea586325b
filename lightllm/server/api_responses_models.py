"""Bodies and answers of /v1/responses, OpenAI's Responses API for text and tools, and what bodies ask in our words."""

from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from lightllm.server.api_bodies import DialectBody, check_stream_options, sampling_of
from lightllm.server.api_chat import FunctionDefinition, check_number, tool_fields
from lightllm.server.chat_format import Chat
from lightllm.server.core.sampling_params import InvalidParameter, SamplingParams

THOUGHT = {"role", "reasoning_content"}  # a message that holds nothing else
NO_LOGPROBS = "this endpoint tells no logprobs; /v1/chat/completions does"


class InputPart(msgspec.Struct):
    """The last fields come with earlier answers and change nothing."""

    type: str
    text: str | None = None
    refusal: str | None = None
    annotations: Any = None
    logprobs: Any = None


class InputItem(msgspec.Struct):
    """A message, a call that the model made earlier, its result, or a thought; `type` message may be left out.

    item_reference: none of these, but what clients send that take the server to have stored its answers.

    The last fields come with earlier answers and change nothing.
    """

    type: Literal["message", "function_call", "function_call_output", "reasoning", "item_reference"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None
    id: Any = None
    status: Any = None
    summary: Any = None
    encrypted_content: Any = None


class FunctionTool(FunctionDefinition, tag_field="type", tag="function"):
    def functions(self) -> list[FunctionDefinition]:
        return [self]


class NamespaceTool(msgspec.Struct, tag_field="type", tag="namespace"):
    """Functions of one origin, as Codex tells those of an MCP server."""

    name: str
    tools: list[FunctionTool]
    description: str | None = None

    def functions(self) -> list[FunctionDefinition]:
        """As the model knows them."""
        return [replace(tool, name=function_name(tool.name, self.name)) for tool in self.tools]


class NamedChoice(msgspec.Struct):
    name: str
    type: Literal["function"] = "function"


class TextFormat(msgspec.Struct):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct):
    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningOptions(msgspec.Struct):
    effort: str | None = None
    summary: str | None = None


class ResponseStreamOptions(msgspec.Struct):
    """Changes nothing."""

    include_obfuscation: bool | None = None


class ResponsesBody(DialectBody, kw_only=True):
    """input: text, or items. instructions: the system message."""

    idle = (
        "metadata", "store", "service_tier", "prompt_cache_key", "prompt_cache_retention", "safety_identifier",
        "truncation",
    )  # fmt: skip
    refused = {
        "previous_response_id": "responses are not stored; send the whole conversation",
        "conversation": "conversations are not stored; send the whole one as input",
        "prompt": "prompts are not stored; send the text as instructions and input",
        "background": "responses are not stored; ask in the foreground",
        "top_logprobs": NO_LOGPROBS,
    }
    words = {"inputs": "input", "messages": "input", "guided_json": "text"}

    input: str | list[InputItem]
    model: str | None = None
    instructions: str | None = None
    max_new_tokens: int | None = msgspec.field(name="max_output_tokens", default=None)
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    tools: list[FunctionTool | NamespaceTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: list[str] | None = None
    user: str | None = None

    @classmethod
    def servable(cls, fields: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """Without tools that are no functions, which agents such as Codex list beside their own, whatever the server.

        Alone, they are what a request is about, and stay to be refused.
        """
        if not isinstance(tools := fields.get("tools"), list):
            return fields, []
        served, others = _callable_tools(tools, "tools")
        return (fields | {"tools": served}, others) if served else (fields, [])

    def calls_as_told(self) -> dict[str, dict[str, str]]:
        """Of functions in namespaces: the name by which the model knows one -> its fields in a call."""
        spaces = [tool for tool in self.tools or [] if isinstance(tool, NamespaceTool)]
        return {
            function_name(tool.name, space.name): {"name": tool.name, "namespace": space.name}
            for space in spaces
            for tool in space.tools
        }

    def sampling(self, defaults: dict[str, Any]) -> SamplingParams:
        return sampling_of(self, defaults, guided_json=self._schema())

    def _schema(self) -> dict[str, Any] | None:
        form = self.text.format if self.text else None
        if form is None or form.type == "text":
            return None
        if form.type == "json_object":
            return {"type": "object"}
        if form.schema is None:
            raise InvalidParameter("text", "schema is required for the format json_schema")
        return form.schema

    def chat(self) -> Chat:
        """What it asks to be answered, in the words of the chat dialect. Raises InvalidParameter."""
        check_stream_options(self)
        if "message.output_text.logprobs" in (self.include or ()):
            raise InvalidParameter("include", NO_LOGPROBS)
        messages = [{"role": "system", "content": self.instructions}] if self.instructions else []
        if isinstance(self.input, str):
            messages.append({"role": "user", "content": self.input})
        else:
            check_number("input", self.input, "items")
            for index, item in enumerate(self.input):
                _add_item(messages, item, f"input[{index}]")
        if not any(message["role"] in ("user", "tool") and message["content"] for message in messages):
            raise InvalidParameter("input", "holds nothing to answer")
        effort = {"reasoning_effort": self.reasoning.effort} if self.reasoning and self.reasoning.effort else {}
        return Chat(
            messages=messages,
            **tool_fields([each for tool in self.tools or [] for each in tool.functions()], self.tool_choice),
            parallel_tool_calls=self.parallel_tool_calls is not False,
            variables=effort,
        )


def _callable_tools(tools: list[Any], place: str) -> tuple[list[Any], list[str]]:
    """Of tools as JSON has them the functions, also those of namespaces, and the places of the others."""
    served, others = [], []
    for tool in tools:
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind not in ("function", "namespace"):
            others.append(f"{place}[type={kind}]")
            continue
        if kind == "namespace" and isinstance(tool.get("tools"), list):
            inner, more = _callable_tools(tool["tools"], f"{place}[].tools")
            tool, others = tool | {"tools": inner}, others + more
        served.append(tool)
    return served, others


def function_name(name: str, namespace: str | None) -> str:
    """By which a model knows a function."""
    return f"{namespace.rstrip('_')}__{name}" if namespace else name


def _add_item(messages: list[dict[str, Any]], item: InputItem, where: str) -> None:
    """Calls of one answer become one message; thoughts go with the message that follows them."""
    match item.type:
        case "message":
            if item.role is None or item.content is None:
                raise InvalidParameter("input", f"{where} needs role and content")
            message = {"role": item.role, "content": _text(item.content, where)}
            if item.role == "assistant" and messages and messages[-1].keys() == THOUGHT:
                message |= {"reasoning_content": messages.pop()["reasoning_content"]}
            messages.append(message)
        case "reasoning":
            if thoughts := _text(item.content or "", where):
                messages.append({"role": "assistant", "reasoning_content": thoughts})
        case "function_call":
            if item.call_id is None or item.name is None:
                raise InvalidParameter("input", f"{where} needs call_id and name")
            function = {"name": function_name(item.name, item.namespace), "arguments": item.arguments or "{}"}
            call = {"id": item.call_id.removeprefix("call_"), "type": "function", "function": function}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant"})
            messages[-1].setdefault("tool_calls", []).append(call)
        case "function_call_output":
            if item.call_id is None or item.output is None:
                raise InvalidParameter("input", f"{where} needs call_id and output")
            result = {"role": "tool", "tool_call_id": item.call_id.removeprefix("call_")}
            messages.append(result | {"content": _text(item.output, where)})
        case "item_reference":
            reason = f"{where} refers to an item, and items are not stored; send it whole (clients: store false)"
            raise InvalidParameter("input", reason)


def _text(content: str | list[InputPart], where: str) -> str:
    if isinstance(content, str):
        return content
    for part in content:
        if part.text is None and part.refusal is None:
            raise InvalidParameter("input", f"{where} holds a part of the type {part.type}; this model reads text only")
    return "".join([part.text or part.refusal or "" for part in content])


class InputDetails(msgspec.Struct):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(msgspec.Struct):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseAnswer(msgspec.Struct):
    """output: items of the types reasoning, message and function_call, in the order in which the model wrote them."""

    id: str
    created_at: int
    model: str
    status: str
    output: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    tool_choice: Any
    parallel_tool_calls: bool
    usage: ResponseUsage | None = None
    incomplete_details: dict[str, str] | None = None
    error: None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    user: str | None = None
    previous_response_id: None = None
    store: bool = False
    truncation: str = "disabled"
    metadata: dict[str, str] = {}
    object: Literal["response"] = "response"


class ResponseEvent(msgspec.Struct, omit_defaults=True):
    """One event of a stream; `type` says which of the fields it has."""

    type: str
    sequence_number: int = -1
    response: ResponseAnswer | None = None
    output_index: int | None = None
    content_index: int | None = None
    item_id: str | None = None
    item: dict[str, Any] | None = None
    part: dict[str, Any] | None = None
    delta: str | None = None
    text: str | None = None
    arguments: str | None = None
    name: str | None = None
    logprobs: list[Any] | None = None
