"""The socket into which libraries that enforce grammars are plugged."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from lightllm.common.grammar.deep_stack import on_deep_stack
from lightllm.common.grammar.forms import Form, GrammarRefused, check_size, decode, encode

CHECKED = 256  # forms that are remembered as good
INSTALL = "the server lacks the extra `{extra}` (pip install 'lightllm[{extra}]')"


class Matcher(Protocol):
    """Follows one output, token by token."""

    def fork(self) -> Matcher:
        """A matcher of its own in the same state."""

    def accept(self, token: int) -> None:
        """The next token; an end of sequence behind the end changes nothing."""

    @property
    def failure(self) -> str:
        """Why it cannot go on; "" while it can."""


class Backend(Protocol):
    """A library that knows one tokenizer. vocab_size: of the model, perhaps more or less than the tokenizer's."""

    def __init__(self, tokenizer_json: Path, vocab_size: int, eos_token_ids: Sequence[int]): ...

    @staticmethod
    def check(form: Form) -> None:
        """Raises GrammarRefused for what cannot be enforced, saying which part."""

    def first(self, form: Form) -> Matcher:
        """A matcher before the first token. Raises what the library raises."""

    def fill(self, matcher: Any, mask: np.ndarray) -> None:
        """Sets in mask int32 [ceil(V / 32)] the bits of the tokens that may come next, and only these.

        matcher: of its own kind. A mask takes some 25 us; to wake a pool of threads for several takes milliseconds.
        """


def backend_named(name: str) -> type[Backend]:
    """llguidance or xgrammar; which is imported when it is used."""
    if name == "xgrammar":
        from lightllm.common.grammar.xgrammar_backend import XGrammar

        return XGrammar
    from lightllm.common.grammar.llguidance_backend import LLGuidance

    return LLGuidance


def checked(form: Form, backend: str) -> str:
    """The form as text that travels. May take hundreds of milliseconds the first time; raises GrammarRefused."""
    check_size(form)
    text = encode(form)
    _check(text, backend)
    return text


@lru_cache(CHECKED)
def _check(text: str, backend: str) -> None:
    try:
        on_deep_stack(lambda: backend_named(backend).check(decode(text)))
    except ImportError:
        extra = {"llguidance": "grammar"}.get(backend, backend)
        raise GrammarRefused(INSTALL.format(extra=extra)) from None
