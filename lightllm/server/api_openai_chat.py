"""/v1/chat/completions: conversations answered."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncGenerator

import msgspec

from lightllm.server.api_chat import Asked, ChatEndpoints
from lightllm.server.api_errors import Problem
from lightllm.server.api_openai import DONE, NAMES, event, new_id, told, usage
from lightllm.server.api_openai_answers import (
    AnsweredCall,
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatLogprobs,
    ChunkChoice,
    FunctionDelta,
    MessageDelta,
    TokenLogprob,
    ToolCallDelta,
    TopLogprob,
    Usage,
)
from lightllm.server.api_openai_models import (
    IDLE_FIELDS,
    MAX_MESSAGES,
    MAX_TOOLS,
    REFUSED,
    ChatBody,
    FunctionCall,
    NamedToolChoice,
    Tool,
)
from lightllm.server.chat_format import Chat
from lightllm.server.core.sampling_params import InvalidParameter, SamplingParams
from lightllm.server.httpserver.chat import Answer, Call, CallPart, ChatRun, Part
from lightllm.server.httpserver.generation import Generation, Token
from lightllm.server.tokenizer import Tokenizer

WORDS = NAMES | {"inputs": "messages", "logprobs": "top_logprobs"}
FUNCTION_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")


class ChatApi(ChatEndpoints[ChatBody]):
    kind = ChatBody
    idle = IDLE_FIELDS

    def _words(self, body: ChatBody) -> dict[str, str]:
        return WORDS | body.format_words

    def _chat(self, body: ChatBody) -> Chat:
        return chat_of(body, self._args.allow_request_chat_template)

    def _user(self, body: ChatBody) -> str | None:
        return body.user

    def _error_event(self, problem: Problem) -> bytes:
        return event(told(problem))

    def _sampling(self, body: ChatBody) -> SamplingParams:
        if body.top_logprobs is not None and not body.logprobs:
            raise InvalidParameter("top_logprobs", "needs logprobs true")
        if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
            raise InvalidParameter("max_completion_tokens", "and the older max_tokens say different numbers")
        longest = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        return body.sampling(self._defaults, max_new_tokens=longest, logprobs=body.top_logprobs)

    async def _complete(self, asked: Asked[ChatBody]) -> ChatCompletion:
        body = asked.body
        with await self._start(asked, body.priority or 0) as run:
            answers = [Answer() for _ in range(run.generation.sampling.n or 1)]
            async for tokens in run.generation:
                for part in run.parts(tokens):
                    answers[part.sample].add(part)
        choices = [self._choice(index, answer, bool(body.logprobs)) for index, answer in enumerate(answers)]
        count = sum(len(answer.tokens) for answer in answers)
        reasoning = sum(answer.reasoning_tokens for answer in answers) if run.thinks else None
        return ChatCompletion(
            new_id("chatcmpl"), int(time.time()), self.name, choices, usage([run.generation], count, reasoning)
        )

    def _choice(self, index: int, answer: Answer, with_logprobs: bool) -> ChatChoice:
        message = AnswerMessage(
            role="assistant",
            content=answer.text if answer.text or not answer.calls else None,
            reasoning_content=answer.reasoning or None,
            tool_calls=[_answered(call) for call in answer.calls] or None,
        )
        logprobs = None
        if with_logprobs:
            logprobs = ChatLogprobs([token_logprob(self._manager.tokenizer, token) for token in answer.tokens])
        return ChatChoice(index, message, logprobs, answer.finish)

    async def _events(self, asked: Asked[ChatBody]) -> AsyncGenerator[bytes, None]:
        """A chunk for every token that shows something, those that are there at once in one write."""
        body = asked.body
        last_usage, every_usage = body.usage_of_chunks
        stream = _ChunkStream(self.name, bool(body.logprobs), self._manager.tokenizer, last_usage, every_usage)
        with await self._start(asked, body.priority or 0) as run:
            async for tokens in run.generation:
                if chunks := stream.chunks(run, tokens):
                    yield chunks
        if last_usage:
            yield stream.usage_chunk(run.generation)
        yield DONE


class _ChunkStream:
    """The chunks of one streamed request."""

    def __init__(self, model: str, logprobs: bool, tokenizer: Tokenizer, tells_usage: bool, every_usage: bool):
        self._id = new_id("chatcmpl")
        self._created = int(time.time())
        self._model = model
        self._logprobs = logprobs
        self._tokenizer = tokenizer
        self._every_usage = every_usage
        self._no_usage = None if tells_usage else msgspec.UNSET
        self._started: set[int] = set()
        self._num_tokens = 0
        self._thoughts: int | None = None

    def chunks(self, run: ChatRun, tokens: list[Token]) -> bytes:
        written = []
        for part in run.parts(tokens):
            self._num_tokens += 1
            if run.thinks:
                self._thoughts = (self._thoughts or 0) + bool(part.reasoning)
            if part.sample not in self._started:
                self._started.add(part.sample)
                written.append(self._chunk(run.generation, part.sample, MessageDelta(role="assistant", content="")))
            written += self._part(run.generation, part)
        return b"".join(written)

    def _part(self, generation: Generation, part: Part) -> list[bytes]:
        logprobs = ChatLogprobs([token_logprob(self._tokenizer, part.token)]) if self._logprobs else None
        deltas = []
        if part.reasoning:
            deltas.append(MessageDelta(reasoning_content=part.reasoning))
        if part.text:
            deltas.append(MessageDelta(content=part.text))
        if part.calls:
            deltas.append(MessageDelta(tool_calls=[self._call_delta(call) for call in part.calls]))
        if not deltas and (logprobs or part.finish):
            deltas.append(MessageDelta())
        written = []
        for number, delta in enumerate(deltas, 1):
            last = number == len(deltas)
            written.append(
                self._chunk(generation, part.sample, delta, logprobs if last else None, part.finish if last else None)
            )
        return written

    @staticmethod
    def _call_delta(call: CallPart) -> ToolCallDelta:
        if call.starts:
            function = FunctionDelta(call.arguments, call.call.name)
            return ToolCallDelta(call.index, function, call.call.id, "function")
        return ToolCallDelta(call.index, FunctionDelta(call.arguments))

    def _chunk(
        self,
        generation: Generation,
        index: int,
        delta: MessageDelta,
        logprobs: ChatLogprobs | None = None,
        finish: str | None = None,
    ) -> bytes:
        told = self._usage(generation) if self._every_usage else self._no_usage
        choice = ChunkChoice(index, delta, logprobs, finish)
        return event(ChatChunk(self._id, self._created, self._model, [choice], told))

    def usage_chunk(self, generation: Generation) -> bytes:
        return event(ChatChunk(self._id, self._created, self._model, [], self._usage(generation)))

    def _usage(self, generation: Generation) -> Usage:
        return usage([generation], self._num_tokens, self._thoughts)


def chat_of(body: ChatBody, allow_template: bool) -> Chat:
    """What a body asks to be answered. Raises InvalidParameter."""
    if not body.messages:
        raise InvalidParameter("messages", "is empty")
    if len(body.messages) > MAX_MESSAGES:
        raise InvalidParameter("messages", f"{len(body.messages)} messages; at most {MAX_MESSAGES}")
    if all(message.role == "assistant" for message in body.messages):
        raise InvalidParameter("messages", "holds nothing to answer: all are of the assistant")
    if body.chat_template is not None and not allow_template:
        raise InvalidParameter("chat_template", "the server takes none from requests (--allow_request_chat_template)")
    for name, reason in REFUSED.items():
        if getattr(body, name) is not None:
            raise InvalidParameter(name, reason)
    if body.modalities not in (None, [], ["text"]):
        raise InvalidParameter("modalities", "this model writes text only")
    continues = bool(body.continue_final_message) or body.add_generation_prompt is False
    if continues and body.messages[-1].role != "assistant":
        raise InvalidParameter("continue_final_message", "the last message must be of the assistant")
    effort = {"reasoning_effort": body.reasoning_effort} if body.reasoning_effort is not None else {}
    return Chat(
        messages=[message.for_template(f"messages[{i}]") for i, message in enumerate(body.messages)],
        tools=tools_of(body.tools or []),
        tool_choice=_tool_choice(body),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        strict_tools=frozenset(tool.function.name for tool in body.tools or [] if tool.function.strict),
        continues=continues,
        variables=effort | (body.chat_template_kwargs or {}),
        template=body.chat_template,
        separate_reasoning=body.separate_reasoning is not False,
    )


def tools_of(tools: list[Tool]) -> list[dict]:
    """Tools as chat templates know them. Raises InvalidParameter."""
    check_tools([tool.function.name for tool in tools])
    given = msgspec.to_builtins(tools)
    for tool in given:
        del tool["function"]["strict"]
        tool["function"] = {name: value for name, value in tool["function"].items() if value is not None}
    return given


def check_tools(names: list[str]) -> None:
    """Raises InvalidParameter for too many tools, and for names that are none or there twice."""
    if len(names) > MAX_TOOLS:
        raise InvalidParameter("tools", f"{len(names)} tools; at most {MAX_TOOLS}")
    for index, name in enumerate(names):
        if not FUNCTION_NAME.fullmatch(name):
            raise InvalidParameter("tools", f"{name!r} is no function name: 1 to 64 letters, digits, _ . -")
        if name in names[:index]:
            raise InvalidParameter("tools", f"{name} is there twice")


def _tool_choice(body: ChatBody) -> str:
    choice = body.tool_choice or ("auto" if body.tools else "none")
    if choice == "none" or (choice == "auto" and not body.tools):
        return "none"
    if not body.tools:
        raise InvalidParameter("tool_choice", "there are no tools to choose from")
    if isinstance(choice, NamedToolChoice):
        if choice.function.name not in {tool.function.name for tool in body.tools}:
            raise InvalidParameter("tool_choice", f"there is no tool {choice.function.name!r}")
        return f"name:{choice.function.name}"
    return choice


def _answered(call: Call) -> AnsweredCall:
    return AnsweredCall(call.id, FunctionCall(call.name, call.arguments))


def token_logprob(tokenizer: Tokenizer, token: Token) -> TokenLogprob:
    top = [TopLogprob(tokenizer.token_text(id), logprob, tokenizer.token_bytes(id)) for id, logprob in token.top or []]
    return TokenLogprob(tokenizer.token_text(token.id), token.logprob, tokenizer.token_bytes(token.id), top)
