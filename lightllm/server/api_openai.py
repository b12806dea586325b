"""What the endpoints of the OpenAI dialect share: its errors, its streams, its usage."""

import asyncio
from collections.abc import AsyncIterator, Sequence

from lightllm.server.api_errors import kind_of
from lightllm.server.api_openai_answers import CompletionDetails, OpenAIError, OpenAIErrorDetail, TokenDetails, Usage
from lightllm.server.httpserver.generation import Generation, RequestFailed, Token

DONE = b"data: [DONE]\n\n"


def error_body(problem: RequestFailed) -> OpenAIError:
    return OpenAIError(OpenAIErrorDetail(problem.reason, kind_of(problem), problem.param, problem.code))


def usage(generations: Sequence[Generation], completion_tokens: int, reasoning_tokens: int | None = None) -> Usage:
    """reasoning_tokens: of the completion; None for models without thoughts."""
    prompt_tokens = sum(len(generation.prompt_ids) for generation in generations)
    return Usage(
        prompt_tokens,
        completion_tokens,
        prompt_tokens + completion_tokens,
        TokenDetails(sum(generation.cached_tokens for generation in generations)),
        None if reasoning_tokens is None else CompletionDetails(reasoning_tokens),
    )


async def merged(generations: Sequence[Generation]) -> AsyncIterator[tuple[int, list[Token]]]:
    """(number of the generation, its next tokens) of several, as they come; the first failure is raised."""
    if len(generations) == 1:
        async for tokens in generations[0]:
            yield 0, tokens
        return
    queue: asyncio.Queue[tuple[int, list[Token] | Exception | None]] = asyncio.Queue()

    async def read(number: int, generation: Generation) -> None:
        try:
            async for tokens in generation:
                queue.put_nowait((number, tokens))
            queue.put_nowait((number, None))
        except Exception as error:
            queue.put_nowait((number, error))

    readers = [asyncio.create_task(read(*numbered)) for numbered in enumerate(generations)]
    try:
        running = len(readers)
        while running:
            number, news = await queue.get()
            if isinstance(news, Exception):
                raise news
            if news is None:
                running -= 1
            else:
                yield number, news
    finally:
        for reader in readers:
            reader.cancel()
