"""/generate, /generate_stream and / in the shapes of text-generation-inference (--use_tgi_api)."""

from collections.abc import AsyncGenerator
from contextlib import closing
from typing import Annotated, Any, Literal

import msgspec
from msgspec import field

from lightllm.server.api_bodies import in_words_of, sampling_of, words_of
from lightllm.server.api_connection import event
from lightllm.server.api_generate import Asked, GenerateEndpoints
from lightllm.server.core.messages import Finish
from lightllm.server.core.sampling_params import InvalidParameter
from lightllm.server.httpserver.generation import Generation, RequestFailed, Token

ERROR_TYPES = {401: "unauthorized", 429: "overloaded", 500: "generation", 503: "overloaded"}


class TgiGrammar(msgspec.Struct):
    type: Literal["json", "regex"]
    value: Any


class TgiParameters(msgspec.Struct, forbid_unknown_fields=True):
    """null means not given. truncate: of the prompt, only so many last tokens are read."""

    best_of: int | None = None
    decoder_input_details: bool | None = None
    details: bool | None = None
    do_sample: bool | None = None
    frequency_penalty: float | None = None
    grammar: TgiGrammar | None = None
    max_new_tokens: int | None = None
    repetition_penalty: float | None = None
    return_full_text: bool | None = None
    seed: int | None = None
    stop_sequences: list[str] | None = field(name="stop", default=None)
    temperature: float | None = None
    top_k: int | None = None
    logprobs: int | None = field(name="top_n_tokens", default=None)
    top_p: float | None = None
    truncate: Annotated[int, msgspec.Meta(ge=1)] | None = None
    typical_p: float | None = None
    watermark: bool | None = None


# What cannot be served and must not be ignored, with the values that ask for nothing.
REFUSED = {"decoder_input_details": (None, False), "typical_p": (None, 1), "watermark": (None, False)}
WORDS = words_of(TgiParameters) | {"guided_json": "grammar", "guided_regex": "grammar"}


class TgiBody(msgspec.Struct, forbid_unknown_fields=True):
    inputs: str
    parameters: TgiParameters = field(default_factory=TgiParameters)
    stream: bool | None = None


class TgiToken(msgspec.Struct):
    id: int
    text: str
    logprob: float
    special: bool


class TgiDetails(msgspec.Struct, omit_defaults=True):
    """prefill: empty, as it is where decoder_input_details asks for nothing."""

    finish_reason: str
    generated_tokens: int
    prompt_tokens: int
    seed: int | None
    tokens: list[TgiToken]
    prefill: list[TgiToken]
    top_tokens: list[list[TgiToken]] | None = None
    best_of_sequences: list[dict[str, Any]] | None = None


class TgiAnswer(msgspec.Struct, omit_defaults=True):
    generated_text: str
    details: TgiDetails | None = None


class TgiEvent(msgspec.Struct):
    """generated_text and details come with the last token. top_tokens: with top_n_tokens."""

    index: int
    token: TgiToken
    generated_text: str | None = None
    details: dict[str, Any] | None = None
    top_tokens: list[TgiToken] | msgspec.UnsetType = msgspec.UNSET


class TgiError(msgspec.Struct):
    error: str
    error_type: str


def error_body(problem: RequestFailed) -> TgiError:
    return TgiError(problem.reason, ERROR_TYPES.get(problem.status, "validation"))


class TgiApi(GenerateEndpoints):
    kind = root_kind = TgiBody
    answers = TgiAnswer
    events = TgiEvent

    def _error_event(self, problem: RequestFailed) -> bytes:
        return event(error_body(problem))

    async def _start(self, asked: Asked) -> closing[Generation]:
        parameters: TgiParameters = asked.body.parameters
        for name, idle in REFUSED.items():
            if getattr(parameters, name) not in idle:
                raise InvalidParameter(name, "is not served")
        grammar = parameters.grammar
        form = {f"guided_{grammar.type}": grammar.value} if grammar is not None else {}
        prompt: str | list[int] = asked.body.inputs
        if parameters.truncate is not None:
            prompt = (await self._manager.tokenize(asked.body.inputs))[-parameters.truncate :]
        with in_words_of(WORDS):
            return closing(await self._manager.generate(prompt, sampling_of(parameters, **form), client=asked.client))

    async def _complete(self, asked: Asked) -> TgiAnswer:
        with await self._start(asked) as generation:
            outputs = await generation.outputs()
        told = 1 + (generation.sampling.logprobs or 0) if asked.body.parameters.details else 0
        size = generation.num_output_tokens * told
        return await self._manager.off_loop(lambda: self._answer(asked.body, generation, outputs), size)

    def _answer(self, body: TgiBody, generation: Generation, outputs: list[list[Token]]) -> TgiAnswer:
        outputs.sort(key=_likelihood, reverse=True)
        before = body.inputs if body.parameters.return_full_text else ""
        texts = [before + "".join([token.text for token in output]) for output in outputs]
        if not body.parameters.details:
            return TgiAnswer(texts[0])
        details = [self._details(generation, output) for output in outputs]
        if len(outputs) > 1:
            details[0].best_of_sequences = [
                {"generated_text": text} | msgspec.to_builtins(detail) for text, detail in zip(texts[1:], details[1:])
            ]
        return TgiAnswer(texts[0], details[0])

    async def _events(self, asked: Asked) -> AsyncGenerator[bytes, None]:
        body: TgiBody = asked.body
        if (body.parameters.best_of or 1) > 1:
            raise InvalidParameter("best_of", "a stream holds one output")
        text = body.inputs if body.parameters.return_full_text else ""
        with await self._start(asked) as generation:
            async for tokens in generation:
                written = []
                for token in tokens:
                    text += token.text
                    told = TgiEvent(token.count, self._token(token))
                    if generation.sampling.logprobs:
                        told.top_tokens = self._top_tokens(token)
                    if token.finish:
                        told.generated_text = text
                        told.details = {
                            "finish_reason": _reason(generation, token),
                            "generated_tokens": token.count,
                            "prompt_tokens": len(generation.prompt_ids),
                            "input_length": len(generation.prompt_ids),
                            "seed": generation.sampling.seed,
                        }
                    written.append(event(told))
                yield b"".join(written)

    def _details(self, generation: Generation, output: list[Token]) -> TgiDetails:
        top = None
        if generation.sampling.logprobs:
            top = [self._top_tokens(token) for token in output]
        return TgiDetails(
            finish_reason=_reason(generation, output[-1]),
            generated_tokens=len(output),
            prompt_tokens=len(generation.prompt_ids),
            seed=generation.sampling.seed,
            tokens=[self._token(token) for token in output],
            prefill=[],
            top_tokens=top,
        )

    def _token(self, token: Token) -> TgiToken:
        return TgiToken(token.id, token.text, token.logprob, token.id in self._manager.tokenizer.special_ids)

    def _top_tokens(self, token: Token) -> list[TgiToken]:
        """The likeliest ones at its place."""
        tokenizer = self._manager.tokenizer
        return [
            TgiToken(id, tokenizer.token_text(id), logprob, id in tokenizer.special_ids)
            for id, logprob in token.top or []
        ]


def _likelihood(output: list[Token]) -> float:
    """Mean logprob of an output's tokens: the best of several is the likeliest one."""
    return sum(token.logprob for token in output) / len(output)


def _reason(generation: Generation, last: Token) -> str:
    if last.finish == Finish.STOP:
        return "eos_token" if last.id in generation.sampling.stop_token_ids else "stop_sequence"
    return last.finish.reason or ""
