"""Bodies and answers of the Anthropic dialect, and what the bodies ask in our words."""

import json
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from lightllm.server.api_bodies import DialectBody, sampling_of
from lightllm.server.api_chat import FunctionDefinition, check_number, tool_fields
from lightllm.server.chat_format import Chat
from lightllm.server.core.sampling_params import InvalidParameter, SamplingParams

CHOICES = {"auto": "auto", "any": "required", "none": "none"}
CALL_ID = "toolu_"
TEXT = {"role", "content"}  # a message that holds nothing else
SIGNATURE = "unsigned"  # of thoughts: clients send those without one back as what the user said
BILLING = "x-anthropic-billing-header:"  # Claude Code's first block of the system prompt, another in each request


class Block(msgspec.Struct):
    """A content block of any type; the last fields are known and change nothing."""

    type: str
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: Any = None
    is_error: bool | None = None
    thinking: str | None = None
    source: Any = None
    signature: str | None = None
    data: str | None = None
    cache_control: Any = None
    citations: Any = None
    caller: Any = None


class Message(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class ToolDefinition(FunctionDefinition):
    parameters: dict[str, Any] | None = msgspec.field(name="input_schema", default=None)
    type: str | None = None
    cache_control: Any = None


class ToolChoice(msgspec.Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class JsonFormat(msgspec.Struct):
    schema: dict[str, Any]
    type: Literal["json_schema"] = "json_schema"


class OutputConfig(msgspec.Struct):
    """effort: what templates know as reasoning_effort."""

    effort: str | None = None
    format: JsonFormat | None = None


class Thinking(msgspec.Struct):
    """budget_tokens is read and changes nothing."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None


class Metadata(msgspec.Struct):
    user_id: str | None = None


class CountBody(DialectBody, kw_only=True):
    """A conversation whose tokens are counted."""

    idle = (
        "metadata", "service_tier", "context_management", "cache_control", "diagnostics", "inference_geo", "speed",
        "user_profile_id", "workspace_id",
    )  # fmt: skip
    refused = {"mcp_servers": "the server has no tools of its own", "container": "the server has no tools of its own"}
    words = {"inputs": "messages", "guided_json": "output_config"}

    messages: list[Message]
    model: str | None = None
    system: str | list[Block] | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    def chat(self) -> Chat:
        """What it asks to be answered, in the words of the OpenAI dialect. Raises InvalidParameter."""
        if not self.messages:
            raise InvalidParameter("messages", "is empty")
        check_number("messages", self.messages, "messages")
        if all(message.role != "user" for message in self.messages):
            raise InvalidParameter("messages", "holds nothing to answer: none is of the user")
        messages: list[dict[str, Any]] = []
        if system := self._told_system():
            messages.append({"role": "system", "content": _text(system, "system")})
        for index, message in enumerate(self.messages):
            for part in _messages_of(message, f"messages[{index}]"):
                _add(messages, part)
        choice = self.tool_choice
        return Chat(
            messages=messages,
            **_tools(self),
            parallel_tool_calls=not (choice and choice.disable_parallel_tool_use),
            continues=messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1],
            variables=self._variables(),
        )

    def _told_system(self) -> str | list[Block]:
        """The system prompt without what makes the beginning of each request another, which no cache could hold."""
        if isinstance(self.system, list):
            return [block for block in self.system if not (block.text or "").startswith(BILLING)]
        return self.system or ""

    def _variables(self) -> dict[str, Any]:
        """For the chat template."""
        variables: dict[str, Any] = {}
        if self.thinking is not None:
            variables["enable_thinking"] = self.thinking.type != "disabled"
        if self.output_config is not None and self.output_config.effort is not None:
            variables["reasoning_effort"] = self.output_config.effort
        return variables


class MessagesBody(CountBody, kw_only=True):
    max_new_tokens: int = msgspec.field(name="max_tokens")
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: Metadata | None = None

    @property
    def user(self) -> str | None:
        return self.metadata.user_id if self.metadata else None

    def sampling(self, defaults: dict[str, Any]) -> SamplingParams:
        form = self.output_config.format if self.output_config else None
        return sampling_of(self, defaults, guided_json=form.schema if form else None)


def _add(messages: list[dict[str, Any]], message: dict[str, Any]) -> None:
    """Texts of one role that follow one another are one turn, as this dialect has it: many templates want turns."""
    last = messages[-1] if messages else {}
    if last.keys() == message.keys() == TEXT and last["role"] == message["role"]:
        last["content"] += f"\n\n{message['content']}"
    else:
        messages.append(message)


def _messages_of(message: Message, where: str) -> list[dict[str, Any]]:
    """One message of theirs: results of tools are messages of their own, before the text."""
    if isinstance(message.content, str):
        if message.role == "user" and not message.content:
            raise InvalidParameter("messages", f"the content of {where} is empty")
        return [{"role": message.role, "content": message.content}]
    if not message.content or all(block.type == "text" and not block.text for block in message.content):
        raise InvalidParameter("messages", f"the content of {where} is empty")
    results = [_result(block, where) for block in message.content if block.type == "tool_result"]
    calls = [_call(block, where) for block in message.content if block.type == "tool_use"]
    thoughts = "".join([block.thinking or "" for block in message.content if block.type == "thinking"])
    told = ("tool_result", "tool_use", "thinking", "redacted_thinking")
    rest = [block for block in message.content if block.type not in told]
    own: dict[str, Any] = {"role": message.role, "content": _text(rest, where)}
    if calls:
        own["tool_calls"] = calls
    if thoughts:
        own["reasoning_content"] = thoughts
    return [*results, *([own] if rest or calls or not results else [])]


def _text(content: str | Sequence[Block], where: str) -> str:
    return content if isinstance(content, str) else "".join([_text_of(block, where) for block in content])


def _text_of(block: Block, where: str) -> str:
    match block:
        case Block("text", str(text)) | Block("document", source={"type": "text", "data": str(text)}):
            return text
    raise InvalidParameter("messages", f"{where} holds a block of the type {block.type}; this model reads text only")


def _result(block: Block, where: str) -> dict[str, Any]:
    if block.tool_use_id is None:
        raise InvalidParameter("messages", f"{where} holds a tool_result without tool_use_id")
    try:
        content = _text(msgspec.convert(block.content or "", str | list[Block]), where)
    except msgspec.ValidationError:
        reason = f"{where} holds a tool_result whose content is neither text nor blocks"
        raise InvalidParameter("messages", reason) from None
    text = f"Error: {content}" if block.is_error else content
    return {"role": "tool", "content": text, "tool_call_id": block.tool_use_id.removeprefix(CALL_ID)}


def _call(block: Block, where: str) -> dict[str, Any]:
    if block.id is None or block.name is None:
        raise InvalidParameter("messages", f"{where} holds a tool_use without id or name")
    arguments = json.dumps(block.input or {}, ensure_ascii=False)
    function = {"name": block.name, "arguments": arguments}
    return {"id": block.id.removeprefix(CALL_ID), "type": "function", "function": function}


def _tools(body: CountBody) -> dict[str, Any]:
    """The fields of a `Chat` that tell of its tools."""
    tools, choice = body.tools or [], body.tool_choice
    for tool in tools:
        if tool.type not in (None, "custom"):
            raise InvalidParameter("tools", f"{tool.name} is of the type {tool.type}; only custom tools are known")
        if tool.parameters is None:
            raise InvalidParameter("tools", f"{tool.name} needs an input_schema")
    if choice is None or choice.type == "tool":
        return tool_fields(tools, choice)
    if choice.type == "auto" and not tools:
        raise InvalidParameter("tool_choice", "there are no tools to choose from")
    return tool_fields(tools, CHOICES[choice.type])


class AnswerUsage(msgspec.Struct):
    """input_tokens are all of the prompt's, whether the prefix cache had them or not."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    thinking: str
    signature: str = SIGNATURE


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


AnswerBlock = TextBlock | ThinkingBlock | ToolUseBlock


class MessageAnswer(msgspec.Struct):
    id: str
    model: str
    content: list[AnswerBlock]
    stop_reason: str | None
    stop_sequence: str | None
    usage: AnswerUsage
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"


class MessageEvent(msgspec.Struct, omit_defaults=True):
    """One event of a stream; `type` says which of the fields it has."""

    type: str
    index: int | None = None
    message: MessageAnswer | None = None
    content_block: AnswerBlock | None = None
    delta: dict[str, Any] | None = None
    usage: dict[str, int] | None = None


class TokenCount(msgspec.Struct):
    input_tokens: int


class AnthropicErrorDetail(msgspec.Struct):
    type: str
    message: str


class AnthropicError(msgspec.Struct):
    error: AnthropicErrorDetail
    type: Literal["error"] = "error"
