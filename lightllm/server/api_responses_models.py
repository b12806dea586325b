"""Bodies and answers of /v1/responses: the text and tool subset of OpenAI's Responses API."""

from typing import Any, Literal

import msgspec

from lightllm.server.api_openai_models import FunctionDefinition

IDLE_FIELDS = (
    "metadata", "store", "service_tier", "prompt_cache_key", "prompt_cache_retention", "safety_identifier",
    "truncation",
)  # fmt: skip
NO_LOGPROBS = "this endpoint tells no logprobs; /v1/chat/completions does"
# Fields that are known, cannot be served, and must not be ignored.
REFUSED = {
    "previous_response_id": "responses are not stored; send the whole conversation",
    "conversation": "conversations are not stored; send the whole one as input",
    "prompt": "prompts are not stored; send the text as instructions and input",
    "background": "responses are not stored; ask in the foreground",
    "top_logprobs": NO_LOGPROBS,
}


class InputPart(msgspec.Struct):
    """The last fields come with earlier answers and change nothing."""

    type: str
    text: str | None = None
    refusal: str | None = None
    annotations: Any = None
    logprobs: Any = None


class InputItem(msgspec.Struct):
    """A message, a call that the model made earlier, its result, or a thought; `type` message may be left out.

    The last fields come with earlier answers and change nothing.
    """

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None
    id: Any = None
    status: Any = None
    summary: Any = None
    encrypted_content: Any = None


class FunctionTool(FunctionDefinition):
    type: Literal["function"] = "function"


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


class ResponsesBody(msgspec.Struct, kw_only=True):
    """input: text, or items. instructions: the system message."""

    input: str | list[InputItem]
    model: str | None = None
    instructions: str | None = None
    max_new_tokens: int | None = msgspec.field(name="max_output_tokens", default=None)
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: list[str] | None = None
    user: str | None = None


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
