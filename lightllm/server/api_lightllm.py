"""The LightLLM dialect: /generate, /generate_stream, / and /tokens."""

from collections.abc import AsyncGenerator
from contextlib import closing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from lightllm.server.api_bodies import sampling_of
from lightllm.server.api_connection import JSON, event, while_connected
from lightllm.server.api_errors import kind_of
from lightllm.server.api_generate import Asked, GenerateEndpoints
from lightllm.server.api_models import (
    ErrorAnswer,
    ErrorDetail,
    GenerateAnswer,
    GenerateBody,
    RootBody,
    StreamEvent,
    TokenDetail,
    TokensAnswer,
    TokensBody,
    TopToken,
)
from lightllm.server.core.sampling_params import InvalidParameter
from lightllm.server.httpserver.generation import Generation, RequestFailed, Token


class LightLLMApi(GenerateEndpoints):
    kind = GenerateBody
    root_kind = RootBody
    answers = GenerateAnswer
    events = StreamEvent

    async def tokens(self, request: Request) -> Response:
        body = (await self._read(request, TokensBody)).body
        special = body.parameters is None or body.parameters.add_special_tokens
        ids = await while_connected(request.receive, self._manager.tokenize(body.text, special, "text"))
        return JSON(TokensAnswer(len(ids)))

    def _user(self, body: GenerateBody | TokensBody) -> str | None:
        return body.parameters.user if body.parameters else None

    def _error_event(self, problem: RequestFailed) -> bytes:
        return event(error_body(problem))

    async def _start(self, asked: Asked) -> closing[Generation]:
        body: GenerateBody = asked.body
        if (media := body.multimodal_params) and (media.images or media.audios):
            raise InvalidParameter("multimodal_params", "this model reads text only")
        parameters = body.parameters
        sampling = sampling_of(parameters, guided_regex=parameters.regular_constraint or None)
        return closing(
            await self._manager.generate(body.inputs, sampling, client=asked.client, priority=parameters.priority)
        )

    async def _complete(self, asked: Asked) -> GenerateAnswer:
        with await self._start(asked) as generation:
            outputs = await generation.outputs()
        prompt_logprobs = await generation.prompt_logprobs()
        details, top = asked.body.parameters.return_details, generation.sampling.logprobs or 0
        size = generation.num_output_tokens * (details + top)
        return await self._manager.off_loop(lambda: self._answer(generation, outputs, prompt_logprobs, details), size)

    def _answer(
        self,
        generation: Generation,
        outputs: list[list[Token]],
        prompt_logprobs: list[dict[int, float] | None],
        details: bool,
    ) -> GenerateAnswer:
        answer = GenerateAnswer(
            generated_text=["".join([token.text for token in output]) for output in outputs],
            count_output_tokens=_one_or_all([len(output) for output in outputs]),
            finish_reason=_one_or_all([output[-1].finish.reason or "" for output in outputs]),
            prompt_tokens=len(generation.prompt_ids),
            cached_tokens=generation.cached_tokens,
            logprobs=_one_or_all([[token.logprob for token in output] for output in outputs]),
        )
        if generation.sampling.logprobs:
            answer.top_logprobs = _one_or_all([[self._top(token) or [] for token in output] for output in outputs])
        if details:
            answer.tokens = _one_or_all([[self._detail(t, generation) for t in output] for output in outputs])
        if generation.sampling.prompt_logprobs is not None:
            answer.prompt_token_ids = list(generation.prompt_ids)
            answer.prompt_logprobs = prompt_logprobs
        return answer

    async def _events(self, asked: Asked) -> AsyncGenerator[bytes, None]:
        """One event per token, those that are there at once in one chunk."""
        parameters = asked.body.parameters
        if (parameters.n or parameters.best_of or 1) > 1:
            raise InvalidParameter("n", "a stream holds one output; use /generate for more")
        with await self._start(asked) as generation:
            async for tokens in generation:
                yield b"".join([event(self._stream_event(token, generation)) for token in tokens])

    def _stream_event(self, token: Token, generation: Generation) -> StreamEvent:
        detail = self._detail(token, generation)
        return StreamEvent(detail, finished=bool(token.finish), finish_reason=token.finish.reason)

    def _detail(self, token: Token, generation: Generation) -> TokenDetail:
        return TokenDetail(
            id=token.id,
            text=token.text,
            logprob=token.logprob,
            special=token.id in self._manager.tokenizer.special_ids,
            count_output_tokens=token.count,
            prompt_tokens=len(generation.prompt_ids),
            cached_tokens=generation.cached_tokens,
            logprobs=self._top(token),
        )

    def _top(self, token: Token) -> list[TopToken] | None:
        if token.top is None:
            return None
        text = self._manager.tokenizer.token_text
        return [TopToken(token_id, text(token_id), logprob) for token_id, logprob in token.top]


def error_body(problem: RequestFailed) -> ErrorAnswer:
    return ErrorAnswer(ErrorDetail(problem.reason, kind_of(problem), problem.param, problem.status))


def _one_or_all(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else values
