"""Control tokens that users type: plain text to the model, unlike those that the chat template writes."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

# Private-use characters around a control token of a user while the template turns its message into a prompt.
OPEN, CLOSE = "\U000f0000", "\U000f0001"


def mark(value: Any, tokens: re.Pattern[str]) -> Any:
    """A JSON value with every control token in its strings, keys of objects included, put between marks."""
    match value:
        case str():
            return tokens.sub(f"{OPEN}\\g<0>{CLOSE}", without_marks(value))
        case dict():
            return {mark(key, tokens): mark(item, tokens) for key, item in value.items()}
        case list():
            return [mark(item, tokens) for item in value]
    return value


def without_marks(text: str) -> str:
    return text.replace(OPEN, "").replace(CLOSE, "")


def any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """Matches each of the tokens, of two that begin alike the longer one; nothing if there are none."""
    longest_first = sorted(filter(None, tokens), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def split_marked(text: str, tokens: Sequence[str]) -> list[tuple[str, bool]]:
    """Pieces of a rendered prompt, in order, and whether each of them is a control token that the template wrote.

    Marks are gone from the pieces. A template may have cut a marked token in two: what stands on both sides of a mark
    never joins to a control token.
    """
    own = any_of(tokens)
    pattern = re.compile(f"{OPEN}({own.pattern}){CLOSE}|[{OPEN}{CLOSE}]|({own.pattern})")
    pieces: list[tuple[str, bool]] = []
    end = 0
    for match in pattern.finditer(text):
        pieces.append((text[end : match.start()], False))
        pieces.append((match[2], True) if match[2] else (match[1] or "", False))
        end = match.end()
    return [*pieces, (text[end:], False)]
