"""ChatRun: the answers to one conversation as they are generated, split into text, thoughts and calls."""

import secrets
import string
from collections.abc import AsyncIterator, Sequence

import msgspec

from lightllm.server.chat_format import Chat, ChatFormat, Prompt
from lightllm.server.core.messages import Finish
from lightllm.server.httpserver.generation import Generation, Token
from lightllm.server.output_parsers.base import CallDelta

ID_ALPHABET = string.ascii_letters + string.digits
TOOL_CALLS = "tool_calls"


class Call(msgspec.Struct):
    """A call of a tool. id: made here; nine letters and digits, which is all that Mistral's templates take."""

    id: str
    name: str
    arguments: str = ""


class CallPart(msgspec.Struct):
    """What a piece of an answer adds to call number `index`. call: as it is with it. starts: it is the first part."""

    index: int
    call: Call
    arguments: str
    starts: bool


class Part(msgspec.Struct):
    """What one token adds to an answer.

    calls: parts of the call that is open come before the text, those of calls that begin behind it. finish: of the last
    one: stop, length or tool_calls. stop: the stop string that ended the answer.
    """

    sample: int
    token: Token
    text: str
    reasoning: str
    calls: list[CallPart]
    finish: str | None = None
    stop: str | None = None

    @property
    def calls_around_text(self) -> tuple[list[CallPart], list[CallPart]]:
        """Those before it and those behind it."""
        begin = next((place for place, call in enumerate(self.calls) if call.starts), len(self.calls))
        return self.calls[:begin], self.calls[begin:]


class Answer(msgspec.Struct):
    """One of the n answers so far. reasoning_tokens: those that came before anything else."""

    text: str = ""
    reasoning: str = ""
    calls: list[Call] = []
    tokens: list[Token] = []
    reasoning_tokens: int = 0
    finish: str = ""
    stop: str | None = None

    def add(self, part: Part) -> None:
        self.tokens.append(part.token)
        self.text += part.text
        self.reasoning += part.reasoning
        self.reasoning_tokens += bool(part.reasoning)
        self.calls += [call.call for call in part.calls if call.starts]
        self.finish = part.finish or self.finish
        self.stop = part.stop or self.stop


class ChatRun:
    """A conversation whose answers are being generated; must be closed. Iterating yields lists of parts as they come.

    generation: the tokens. thinks: an answer may begin with thoughts that are told apart from it.
    """

    def __init__(
        self,
        generation: Generation,
        format: ChatFormat,
        chat: Chat,
        prompt: Prompt,
        hide_special: bool,
        stops: Sequence[str],
    ):
        self.generation = generation
        self._stops = sorted(stops, key=len, reverse=True)
        self.thinks = format.thinks(chat)
        samples = generation.sampling.n or 1
        self._parsers = [format.parser(chat, prompt) for _ in range(samples)]
        self._calls: list[list[Call]] = [[] for _ in range(samples)]
        self._parallel = chat.parallel_tool_calls
        self._visible = format.visible_tokens(chat)
        self._tokenizer = format.tokenizer
        self._hide_special = hide_special

    def close(self) -> None:
        self.generation.close()

    async def __aiter__(self) -> AsyncIterator[list[Part]]:
        async for tokens in self.generation:
            yield [self._part(token) for token in tokens]

    async def answers(self) -> list[Answer]:
        """All n of them, at their end."""
        answers = [Answer() for _ in self._parsers]
        async for parts in self:
            for part in parts:
                answers[part.sample].add(part)
        return answers

    def _part(self, token: Token) -> Part:
        parser, calls = self._parsers[token.sample], self._calls[token.sample]
        stop = self._stop(token)
        delta = parser.feed(self._text(token).removesuffix(stop or ""))
        parts = self._call_parts(delta.calls, calls)
        text, reasoning, finish = delta.text, delta.reasoning, token.finish.reason
        if token.finish:
            last = parser.flush()
            text, reasoning = text + last.text, reasoning + last.reasoning
            parts += self._call_parts(last.calls, calls)
            if token.finish == Finish.STOP and parser.completed:
                finish = TOOL_CALLS
        return Part(token.sample, token, text, reasoning, parts, finish, stop)

    def _stop(self, token: Token) -> str | None:
        """The stop string with which the last token's text ends, where the dialect tells which one it was."""
        if token.finish != Finish.STOP or token.id in self.generation.sampling.stop_token_ids:
            return None
        return next((stop for stop in self._stops if token.text.endswith(stop)), None)

    def _text(self, token: Token) -> str:
        """The token's text, without that of a special token that only the engine, not the parser, had to show."""
        if self._hide_special and self._visible and token.id in self._tokenizer.special_ids:
            text = self._tokenizer.token_text(token.id)
            if text not in self._visible:
                return token.text.removesuffix(text)
        return token.text

    def _call_parts(self, deltas: list[CallDelta], calls: list[Call]) -> list[CallPart]:
        parts = []
        for delta in deltas:
            if delta.index and not self._parallel:
                continue
            if delta.name is not None:
                calls.append(Call("".join(secrets.choice(ID_ALPHABET) for _ in range(9)), delta.name))
            call = calls[delta.index]
            call.arguments += delta.arguments
            if delta.name is not None or delta.arguments:
                parts.append(CallPart(delta.index, call, delta.arguments, delta.name is not None))
        return parts
