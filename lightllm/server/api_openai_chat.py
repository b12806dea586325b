"""/v1/chat/completions: conversations answered."""

import time
from collections.abc import AsyncGenerator, Iterator

import msgspec

from lightllm.server.api_bodies import sampling_of, words_of
from lightllm.server.api_chat import Asked, ChatEndpoints, check_number, tool_fields
from lightllm.server.api_connection import event
from lightllm.server.api_openai import DONE, check_stream_options, error_body, new_id, usage
from lightllm.server.api_openai_answers import (
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
from lightllm.server.api_openai_models import IDLE_FIELDS, REFUSED, ChatBody, FunctionCall, NamedToolChoice, ToolCall
from lightllm.server.chat_format import Chat
from lightllm.server.core.sampling_params import InvalidParameter, SamplingParams
from lightllm.server.httpserver.chat import TOOL_CALLS, Answer, CallPart, ChatRun, Part
from lightllm.server.httpserver.generation import RequestFailed, Token
from lightllm.server.tokenizer import Tokenizer

TEMPLATE_NAMES = {"messages", "tools", "add_generation_prompt"}
WORDS = words_of(ChatBody) | {"inputs": "messages"}


class ChatApi(ChatEndpoints[ChatBody]):
    kind = ChatBody
    answers = ChatCompletion
    events = ChatChunk
    idle = IDLE_FIELDS
    refused = REFUSED

    def _words(self, body: ChatBody) -> dict[str, str]:
        return WORDS | body.format_words

    def _chat(self, body: ChatBody) -> Chat:
        return chat_of(body, self._args.allow_request_chat_template)

    def _error_event(self, problem: RequestFailed) -> bytes:
        return event(error_body(problem))

    def _sampling(self, body: ChatBody) -> SamplingParams:
        if body.logprobs is not None and not body.tells_logprobs:
            raise InvalidParameter("top_logprobs", "needs logprobs true")
        longest = body.max_completion_tokens
        if None not in (longest, body.max_new_tokens) and longest != body.max_new_tokens:
            raise InvalidParameter("max_completion_tokens", "and the older max_tokens say different numbers")
        return sampling_of(body, self._defaults, max_new_tokens=longest, **body.guided())

    async def _complete(self, asked: Asked[ChatBody]) -> ChatCompletion:
        body = asked.body
        with await self._start(asked, body.priority or 0) as run:
            answers = await run.answers()
        choices = [self._choice(index, answer, body) for index, answer in enumerate(answers)]
        return ChatCompletion(new_id("chatcmpl-"), int(time.time()), self.name, choices, _usage(run, answers))

    def _choice(self, index: int, answer: Answer, body: ChatBody) -> ChatChoice:
        message = AnswerMessage(
            role="assistant",
            content=answer.text if answer.text or not answer.calls else None,
            reasoning_content=answer.reasoning or None,
            tool_calls=[ToolCall(FunctionCall(c.name, c.arguments), c.id) for c in answer.calls] or None,
        )
        logprobs = None
        if body.tells_logprobs:
            logprobs = ChatLogprobs([token_logprob(self._manager.tokenizer, token) for token in answer.tokens])
        return ChatChoice(index, message, logprobs, _told(answer.finish, body))

    async def _events(self, asked: Asked[ChatBody]) -> AsyncGenerator[bytes, None]:
        """A chunk for every token that shows something, those that are there at once in one write."""
        with await self._start(asked, asked.body.priority or 0) as run:
            stream = _ChunkStream(asked.body, self.name, run, self._manager.tokenizer)
            async for parts in run:
                if chunks := [event(chunk) for part in parts for chunk in stream.chunks(part)]:
                    yield b"".join(chunks)
        if stream.tells_usage:
            yield event(stream.usage_chunk())
        yield DONE


class _ChunkStream:
    """The chunks of one streamed request. tells_usage: the last one, without choices, does."""

    def __init__(self, body: ChatBody, model: str, run: ChatRun, tokenizer: Tokenizer):
        self.tells_usage, self._every_usage = body.usage_of_chunks
        self._id = new_id("chatcmpl-")
        self._created = int(time.time())
        self._model = model
        self._run = run
        self._body = body
        self._tokenizer = tokenizer
        self._answers = [Answer() for _ in range(run.generation.sampling.n or 1)]

    def chunks(self, part: Part) -> Iterator[ChatChunk]:
        """What a token shows, each kind in a chunk of its own; the last has the logprobs. The finish comes alone."""
        answer = self._answers[part.sample]
        begins = not answer.tokens
        answer.add(part)
        if begins:
            yield self._chunk(ChunkChoice(part.sample, MessageDelta(role="assistant", content="")))
        logprobs = ChatLogprobs([token_logprob(self._tokenizer, part.token)]) if self._body.tells_logprobs else None
        deltas = []
        if part.reasoning:
            deltas.append(MessageDelta(reasoning_content=part.reasoning))
        if part.text:
            deltas.append(MessageDelta(content=part.text))
        if part.calls:
            deltas.append(MessageDelta(tool_calls=[_call_delta(call) for call in part.calls]))
        if logprobs and not deltas:
            deltas.append(MessageDelta())
        for delta in deltas[:-1]:
            yield self._chunk(ChunkChoice(part.sample, delta))
        for delta in deltas[-1:]:
            yield self._chunk(ChunkChoice(part.sample, delta, logprobs))
        if part.finish:
            yield self._chunk(ChunkChoice(part.sample, MessageDelta(), finish_reason=_told(part.finish, self._body)))

    def usage_chunk(self) -> ChatChunk:
        return ChatChunk(self._id, self._created, self._model, [], _usage(self._run, self._answers))

    def _chunk(self, choice: ChunkChoice) -> ChatChunk:
        told: Usage | msgspec.UnsetType | None = None if self.tells_usage else msgspec.UNSET
        if self._every_usage:
            told = _usage(self._run, self._answers)
        return ChatChunk(self._id, self._created, self._model, [choice], told)


def _told(finish: str, body: ChatBody) -> str:
    """Why an answer ended, as OpenAI tells it: with the call of the tool that the request names it has just stopped."""
    return "stop" if finish == TOOL_CALLS and isinstance(body.tool_choice, NamedToolChoice) else finish


def _call_delta(call: CallPart) -> ToolCallDelta:
    if call.starts:
        return ToolCallDelta(call.index, FunctionDelta(call.arguments, call.call.name), call.call.id, "function")
    return ToolCallDelta(call.index, FunctionDelta(call.arguments))


def _usage(run: ChatRun, answers: list[Answer]) -> Usage:
    reasoning = sum(answer.reasoning_tokens for answer in answers) if run.thinks else None
    return usage([run.generation], sum(len(answer.tokens) for answer in answers), reasoning)


def chat_of(body: ChatBody, allow_template: bool) -> Chat:
    """What a body asks to be answered. Raises InvalidParameter."""
    if not body.messages:
        raise InvalidParameter("messages", "is empty")
    check_number("messages", body.messages, "messages")
    if all(message.role == "assistant" for message in body.messages):
        raise InvalidParameter("messages", "holds nothing to answer: all are of the assistant")
    if body.chat_template is not None and not allow_template:
        raise InvalidParameter("chat_template", "the server takes none from requests (--allow_request_chat_template)")
    check_stream_options(body)
    if taken := TEMPLATE_NAMES & (body.chat_template_kwargs or {}).keys():
        raise InvalidParameter("chat_template_kwargs", f"{min(taken)} is what the request says elsewhere")
    if body.modalities not in (None, [], ["text"]):
        raise InvalidParameter("modalities", "this model writes text only")
    continues = bool(body.continue_final_message) or body.add_generation_prompt is False
    if continues and body.messages[-1].role != "assistant":
        raise InvalidParameter("continue_final_message", "the last message must be of the assistant")
    effort = {"reasoning_effort": body.reasoning_effort} if body.reasoning_effort is not None else {}
    return Chat(
        messages=[message.for_template(f"messages[{i}]") for i, message in enumerate(body.messages)],
        **tool_fields([tool.function for tool in body.tools or []], body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        continues=continues,
        variables=effort | (body.chat_template_kwargs or {}),
        template=body.chat_template,
        separate_reasoning=body.separate_reasoning is not False,
    )


def token_logprob(tokenizer: Tokenizer, token: Token) -> TokenLogprob:
    top = [TopLogprob(tokenizer.token_text(id), logprob, tokenizer.token_bytes(id)) for id, logprob in token.top or []]
    return TokenLogprob(tokenizer.token_text(token.id), token.logprob, tokenizer.token_bytes(token.id), top)
