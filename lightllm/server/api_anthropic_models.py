"""Bodies and answers of the Anthropic dialect."""

from typing import Any, Literal

import msgspec

IDLE_FIELDS = (
    "metadata", "service_tier", "context_management", "cache_control", "diagnostics", "inference_geo", "speed",
    "user_profile_id", "workspace_id",
)  # fmt: skip
# Fields that are known, cannot be served, and must not be ignored.
REFUSED = {
    "mcp_servers": "the server has no tools of its own",
    "container": "the server has no tools of its own",
}


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
    source: dict[str, Any] | None = None
    signature: str | None = None
    data: str | None = None
    cache_control: Any = None
    citations: Any = None
    caller: Any = None


class Message(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class ToolDefinition(msgspec.Struct):
    name: str
    parameters: dict[str, Any] | None = msgspec.field(name="input_schema", default=None)
    description: str | None = None
    type: str | None = None
    strict: bool | None = None
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


class CountBody(msgspec.Struct, kw_only=True):
    """A conversation whose tokens are counted."""

    messages: list[Message]
    model: str | None = None
    system: str | list[Block] | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    @property
    def schema(self) -> dict[str, Any] | None:
        """What the output must match; None if that is left open."""
        config = self.output_config
        return config.format.schema if config is not None and config.format is not None else None


class MessagesBody(CountBody, kw_only=True):
    max_new_tokens: int = msgspec.field(name="max_tokens")
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: Metadata | None = None


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
    signature: str = ""


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
