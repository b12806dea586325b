"""Control tokens that users type: plain text to the model, unlike those that the chat template writes."""

import re
from functools import lru_cache
from typing import Any

# Private-use characters around a control token of a user while the template turns its message into a prompt.
OPEN, CLOSE = "\U0010fff0", "\U0010fff1"
REMEMBERED = 16  # sets of tokens: a model has some, a request's template perhaps one of its own


def mark(value: Any, tokens: re.Pattern[str]) -> Any:
    """A JSON value with every control token in its strings, keys of objects included, put between marks."""
    match value:
        case str():
            own = value.replace(OPEN, "").replace(CLOSE, "")
            return tokens.sub(lambda token: f"{OPEN}{token[0]}{CLOSE}", own)
        case dict():
            return {mark(key, tokens): mark(item, tokens) for key, item in value.items()}
        case list():
            return [mark(item, tokens) for item in value]
    return value


@lru_cache(maxsize=REMEMBERED)
def any_of(tokens: tuple[str, ...]) -> re.Pattern[str]:
    """Matches each of the tokens, of two that begin alike the longer one; nothing if there are none."""
    longest_first = sorted(filter(None, tokens), key=len, reverse=True)
    if not longest_first:
        return re.compile("(?!)")
    # a look at one character spares most places of a text to be compared with every token
    begins = "".join(sorted({re.escape(token[0]) for token in longest_first}))
    return re.compile(f"(?=[{begins}])(?:{'|'.join(map(re.escape, longest_first))})")


@lru_cache(maxsize=REMEMBERED)
def _marks_and(tokens: tuple[str, ...]) -> re.Pattern[str]:
    """Matches a marked token (group 1), a lone mark, or a token (group 2)."""
    own = any_of(tokens).pattern
    return re.compile(f"{OPEN}({own}){CLOSE}|[{OPEN}{CLOSE}]|({own})")


def split_marked(text: str, tokens: tuple[str, ...]) -> list[tuple[str, bool]]:
    """Pieces of a rendered prompt, in order, and whether each of them is a control token that the template wrote.

    Marks are gone from the pieces. A template may have cut a marked token in two: what stands on both sides of a mark
    never joins to a control token.
    """
    pieces: list[tuple[str, bool]] = []
    end = 0
    for match in _marks_and(tokens).finditer(text):
        pieces.append((text[end : match.start()], False))
        pieces.append((match[2], True) if match[2] else (match[1] or "", False))
        end = match.end()
    return [*pieces, (text[end:], False)]
