"""What an answer consists of, piece by piece: text, reasoning, and calls of tools."""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar, NamedTuple

import msgspec


class CallDelta(msgspec.Struct):
    """A part of call number `index`. name: in its first part only. arguments: the next characters of their JSON.

    complete: the call has ended, and ended well.
    """

    index: int
    name: str | None = None
    arguments: str = ""
    complete: bool = False


class Delta(msgspec.Struct):
    """What a piece of an answer adds."""

    text: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = []


class CallSyntax(NamedTuple):
    """How a call is written with arguments in JSON: `trigger`, `begin` with the name for NAME, them, `end`."""

    trigger: str
    begin: str
    end: str


# What reading a value that a model wrote may raise, and writing it as JSON.
UNREADABLE = (ValueError, TypeError, SyntaxError, RecursionError, MemoryError)


class ToolParser(ABC):
    """Finds the calls in one answer as it is generated.

    tags: texts that the model writes around calls; where they are special tokens the parser must see them. syntax: of
    calls that a grammar can hold to a schema; None if their arguments are no JSON. of_every_answer: it reads those too
    that may hold no call.
    """

    tags: ClassVar[tuple[str, ...]] = ()
    of_every_answer: ClassVar[bool] = False
    syntax: ClassVar[CallSyntax | None] = None

    @abstractmethod
    def __init__(self, tools: list[dict[str, Any]]):
        """tools: those of the request, as the OpenAI dialect has them."""

    @abstractmethod
    def feed(self, text: str) -> Delta:
        """What the next piece of the answer releases; what may yet turn out to begin a call is held back."""

    @abstractmethod
    def flush(self) -> Delta:
        """What is still held, at the end of the answer. A call that was not completed stays incomplete."""


def first_of(tags: Iterable[str], text: str) -> tuple[int, str]:
    """(place, tag) of the tag that comes first in a text; (-1, "") if none is there."""
    return min(((place, tag) for tag in tags if (place := text.find(tag)) >= 0), default=(-1, ""))


def held_back(text: str, tags: Iterable[str]) -> int:
    """How many characters at the end of a text may be the beginning of one of the tags."""
    return max((n for tag in tags for n in range(1, len(tag)) if text.endswith(tag[:n])), default=0)


def parameters_of(tools: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """The JSON schemas of a function's parameters by name; empty if there is no such function."""
    for tool in tools:
        if tool["function"]["name"] == name:
            return (tool["function"].get("parameters") or {}).get("properties") or {}
    return {}


def json_of(value: Any) -> str:
    """A value as JSON. Raises ValueError or TypeError for what JSON does not know: infinities, half characters..."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    text.encode()
    return text
