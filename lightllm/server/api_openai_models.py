"""Bodies of the OpenAI dialect, completions and chat completions, and what they ask in our words."""

from typing import Any, Literal

import msgspec
from msgspec import field

from lightllm.server.api_bodies import DialectBody, check_stream_options, sampling_of
from lightllm.server.api_chat import FunctionDefinition, check_number, tool_fields
from lightllm.server.chat_format import Chat
from lightllm.server.core.sampling_params import CONSTRAINTS, InvalidParameter, Priority, SamplingParams

MAX_PROMPTS = 256  # of one completions request
TEMPLATE_NAMES = {"messages", "tools", "add_generation_prompt"}
COMPLETION_TOKENS = 16  # of a completion that does not say how many


class StreamOptions(msgspec.Struct):
    """include_usage: a last chunk tells the usage. continuous_usage_stats: every chunk does."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchemaFormat(msgspec.Struct):
    name: str
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(msgspec.Struct):
    """vLLM's newer way to give one of the guided fields."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: list[str] | None = None
    json_object: bool | None = None

    def guided(self) -> dict[str, Any]:
        """What is given, as guided fields. Raises InvalidParameter."""
        named = {f"guided_{name}": getattr(self, name) for name in ("json", "regex", "grammar", "choice")}
        given = {name: value for name, value in named.items() if value is not None}
        if given and self.json_object:
            raise InvalidParameter("structured_outputs", "json_object and another constraint exclude each other")
        return given | ({"guided_json": {"type": "object"}} if self.json_object else {})


class GenerationFields(DialectBody, kw_only=True):
    """What completions and chat completions both take; null means not given."""

    idle = (
        "metadata", "prediction", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier",
        "store", "verbosity", "role_settings", "character_settings", "stream_reasoning",
    )  # fmt: skip
    refused = {
        "functions": "is the older name of tools, which take its place",
        "function_call": "is the older name of tool_choice, which takes its place",
        "audio": "this model writes text only",
        "web_search_options": "the server has no tools of its own",
        "suffix": "this model does not fill in the middle",
    }

    model: str | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop_sequences: str | list[str] | None = field(name="stop", default=None)
    user: str | None = None
    response_format: ResponseFormat | None = None
    # of LightLLM and vLLM
    do_sample: bool | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    min_new_tokens: int | None = field(name="min_tokens", default=None)
    stop_token_ids: list[int] | None = None
    allowed_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_spaces_between_special_tokens: bool | None = field(name="spaces_between_special_tokens", default=None)
    priority: Priority | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    guided_choice: list[str] | None = None
    structured_outputs: StructuredOutputs | None = None

    def guided(self) -> dict[str, Any]:
        """What structured_outputs or response_format asks for, as a guided field. Raises InvalidParameter."""
        given = {name for name in CONSTRAINTS if getattr(self, name) is not None}
        structured = self.structured_outputs.guided() if self.structured_outputs else {}
        formatted = self._response_format()
        for field_name, asked in ("structured_outputs", structured), ("response_format", formatted):
            if asked and given:
                raise InvalidParameter(field_name, f"and {min(given)} exclude each other")
            given |= asked.keys()
        return structured | formatted

    def _response_format(self) -> dict[str, Any]:
        match self.response_format:
            case None | ResponseFormat("text"):
                return {}
            case ResponseFormat("json_object"):
                return {"guided_json": {"type": "object"}}
            case ResponseFormat("json_schema", JsonSchemaFormat(schema=schema)):
                return {"guided_json": schema}
        raise InvalidParameter("response_format", "json_schema is required for the type json_schema")

    def names(self) -> dict[str, str]:
        """A constraint is named as the field that asked for it."""
        return super().names() | ({"guided_json": "response_format"} if self.response_format else {})

    @property
    def usage_of_chunks(self) -> tuple[bool, bool]:
        """Whether a stream ends with a chunk of its own that tells the usage, and whether every chunk tells it."""
        options = self.stream_options or StreamOptions()
        return bool(options.include_usage), bool(options.continuous_usage_stats)


class CompletionBody(GenerationFields, kw_only=True):
    """prompt: text, token ids, or a list of either. logprobs: likeliest tokens told beside each one."""

    words = {"inputs": "prompt", "prompt_logprobs": "logprobs"}

    prompt: Any
    max_new_tokens: int | None = field(name="max_tokens", default=None)
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = None

    def sampling(self, defaults: dict[str, Any]) -> SamplingParams:
        """How it asks. Raises InvalidParameter."""
        if self.max_new_tokens == 0 and not self.echo:
            raise InvalidParameter("max_tokens", "0 makes sense with echo only")
        longest = 1 if self.max_new_tokens == 0 else self.max_new_tokens
        scored = self.logprobs if self.echo else None
        return sampling_of(self, defaults, max_new_tokens=longest, prompt_logprobs=scored, **self.guided())

    def prompts(self) -> list[str | list[int]]:
        match self.prompt:
            case str():
                return [self.prompt]
            case list() if self.prompt and all(type(item) is int for item in self.prompt):
                return [self.prompt]
            case list() if self.prompt and all(isinstance(item, (str, list)) for item in self.prompt):
                prompts = self.prompt
            case _:
                raise InvalidParameter("prompt", "must be a text, a list of token ids, or a list of these; not empty")
        if len(prompts) > MAX_PROMPTS:
            raise InvalidParameter("prompt", f"{len(prompts)} prompts; at most {MAX_PROMPTS}")
        for prompt in prompts:
            if isinstance(prompt, list) and not all(type(item) is int for item in prompt):
                raise InvalidParameter("prompt", "token ids must be integers")
        return prompts


class FunctionCall(msgspec.Struct):
    name: str
    arguments: str = ""


class ToolCall(msgspec.Struct):
    function: FunctionCall
    id: str = ""
    type: Literal["function"] = "function"


class ContentPart(msgspec.Struct):
    """Text is what this model reads; `refusal` parts are earlier answers."""

    type: str
    text: str | None = None
    refusal: str | None = None


class ChatMessage(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    annotations: Any = None  # of an earlier answer: changes nothing

    def for_template(self, where: str) -> dict[str, Any]:
        """As chat templates know messages. Raises InvalidParameter for what is missing or no text."""
        message = {
            "role": self.role,
            "content": self._text(where),
            "name": self.name,
            "tool_calls": msgspec.to_builtins(self.tool_calls) if self.tool_calls else None,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": self.reasoning_content or self.reasoning,
        }
        return {name: value for name, value in message.items() if value is not None}

    def _text(self, where: str) -> str | None:
        if self.content is None:
            if self.role == "assistant":
                return self.refusal
            raise InvalidParameter("messages", f"{where} of the role {self.role} needs content")
        if isinstance(self.content, str):
            text = self.content
        else:
            text = "".join([_text_of(part, where) for part in self.content])
        if self.role == "user" and not text:
            raise InvalidParameter("messages", f"the content of {where} is empty")
        return text


def _text_of(part: ContentPart, where: str) -> str:
    text = part.text if part.type in ("text", "input_text", "output_text") else None
    if part.type == "refusal":
        text = part.refusal
    if text is None:
        raise InvalidParameter("messages", f"{where} holds a part of the type {part.type}; this model reads text only")
    return text


class Tool(msgspec.Struct):
    function: FunctionDefinition
    type: Literal["function"] = "function"


class FunctionName(msgspec.Struct):
    name: str


class NamedToolChoice(msgspec.Struct):
    function: FunctionName
    type: Literal["function"] = "function"

    @property
    def name(self) -> str:
        return self.function.name


class ChatBody(GenerationFields, kw_only=True):
    """logprobs, top_logprobs: whether logprobs are told, and of how many likeliest tokens."""

    words = {"inputs": "messages"}

    messages: list[ChatMessage]
    max_new_tokens: int | None = field(name="max_tokens", default=None)
    max_completion_tokens: int | None = None
    tells_logprobs: bool | None = field(name="logprobs", default=None)
    logprobs: int | None = field(name="top_logprobs", default=None)
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    modalities: list[str] | None = None
    # of LightLLM and vLLM
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    separate_reasoning: bool | None = None

    def sampling(self, defaults: dict[str, Any]) -> SamplingParams:
        if self.logprobs is not None and not self.tells_logprobs:
            raise InvalidParameter("top_logprobs", "needs logprobs true")
        longest = self.max_completion_tokens
        if None not in (longest, self.max_new_tokens) and longest != self.max_new_tokens:
            raise InvalidParameter("max_completion_tokens", "and the older max_tokens say different numbers")
        return sampling_of(self, defaults, max_new_tokens=longest, **self.guided())

    def chat(self) -> Chat:
        """What it asks to be answered. Raises InvalidParameter."""
        if not self.messages:
            raise InvalidParameter("messages", "is empty")
        check_number("messages", self.messages, "messages")
        if all(message.role == "assistant" for message in self.messages):
            raise InvalidParameter("messages", "holds nothing to answer: all are of the assistant")
        check_stream_options(self)
        if taken := TEMPLATE_NAMES & (self.chat_template_kwargs or {}).keys():
            raise InvalidParameter("chat_template_kwargs", f"{min(taken)} is what the request says elsewhere")
        if self.modalities not in (None, [], ["text"]):
            raise InvalidParameter("modalities", "this model writes text only")
        continues = bool(self.continue_final_message) or self.add_generation_prompt is False
        if continues and self.messages[-1].role != "assistant":
            raise InvalidParameter("continue_final_message", "the last message must be of the assistant")
        effort = {"reasoning_effort": self.reasoning_effort} if self.reasoning_effort is not None else {}
        return Chat(
            messages=[message.for_template(f"messages[{i}]") for i, message in enumerate(self.messages)],
            **tool_fields([tool.function for tool in self.tools or []], self.tool_choice),
            parallel_tool_calls=self.parallel_tool_calls is not False,
            continues=continues,
            variables=effort | (self.chat_template_kwargs or {}),
            template=self.chat_template,
            separate_reasoning=self.separate_reasoning is not False,
        )
