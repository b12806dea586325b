"""xgrammar: pushdown automata with masks prepared per grammar. It bounds no time, so forms are kept small before."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lightllm.common.grammar import forms
from lightllm.common.grammar.xgrammar_schema import check_pattern, check_schema, in_ascii

MAX_REFERENCES = 500  # of a schema: a chain of 2000 takes half a minute, in which nobody else is served
# ranges that strings of bounded length leave out in the library's words, and those that JSON and UTF-8 leave out
BOUNDED, VALID = "34,34,92,92,13,13,10,10", f"34,34,92,92,0,31,{0xD800},{0xDFFF}"
PLACE = re.compile(r"^\[[\d:]+\] \S+:\d+: ")  # before the library's messages: the time, a line of its code
HEX = re.compile(r"\\(?:x([0-9a-fA-F]{2})|.)", re.DOTALL)  # escapes; the library takes for digits what follows two
SPACE = "[ \\n]{0,2}"  # behind thoughts, belongs to them


class XGrammar:
    def __init__(self, tokenizer_json: Path, vocab_size: int, eos_token_ids: Sequence[int]):
        import xgrammar
        from transformers import PreTrainedTokenizerFast

        self._eos = frozenset(eos_token_ids)
        self._end = np.zeros((vocab_size + 31) // 32, dtype=np.uint32)
        for token in eos_token_ids:
            self._end[token // 32] |= np.uint32(1 << token % 32)
        info = _tokenizer_info(PreTrainedTokenizerFast(tokenizer_file=str(tokenizer_json)), vocab_size, eos_token_ids)
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    @staticmethod
    def check(form: forms.Form) -> None:
        import xgrammar

        for part in forms.parts(form):
            match part:
                case forms.Regex(pattern):
                    check_pattern(pattern)
                case forms.Json(schema):
                    if (count := json.dumps(schema).count('"$ref"')) > MAX_REFERENCES:
                        raise forms.GrammarRefused(f"{count} references ($ref); at most {MAX_REFERENCES}")
                    check_schema(schema)
        tag = _tag(form)
        try:
            xgrammar.Grammar.from_structural_tag(tag)
        except Exception as error:
            raise forms.GrammarRefused(forms.shortened(PLACE.sub("", str(error)))) from None

    def first(self, form: forms.Form) -> XGrammarMatcher:
        import xgrammar

        grammar = xgrammar.Grammar.from_structural_tag(_tag(form))
        if any(isinstance(part, forms.Json) for part in forms.parts(form)):
            grammar = xgrammar.Grammar.deserialize_json(grammar.serialize_json().replace(BOUNDED, VALID))
        return XGrammarMatcher(xgrammar.GrammarMatcher(self._compiler.compile_grammar(grammar)), self._eos)

    def fill(self, matcher: XGrammarMatcher, mask: np.ndarray) -> None:
        mask[:] = self._end.view(np.int32)  # past its end a text can only end again
        if not matcher.inner.is_terminated():
            matcher.inner.fill_next_token_bitmask(torch.from_numpy(mask[None]))


def _tokenizer_info(tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int]) -> Any:
    """Special tokens have no text: none may stand where their letters could."""
    from xgrammar import TokenizerInfo

    size = max(vocab_size, 1 + max(tokenizer.get_vocab().values()))
    spelled = TokenizerInfo.from_huggingface(tokenizer, vocab_size=size)
    texts = spelled.decoded_vocab
    for token, added in tokenizer.added_tokens_decoder.items():
        if added.special:
            texts[token] = b""
    ends = list(eos_token_ids)
    texts = texts[:vocab_size]
    return TokenizerInfo(texts, vocab_size=vocab_size, stop_token_ids=ends, add_prefix_space=spelled.add_prefix_space)


class XGrammarMatcher:
    def __init__(self, inner: Any, eos: frozenset[int], failure: str = ""):
        self.inner, self._eos, self.failure = inner, eos, failure

    def fork(self) -> XGrammarMatcher:
        return XGrammarMatcher(self.inner.fork(), self._eos, self.failure)

    def accept(self, token: int) -> None:
        if self.failure or (self.inner.is_terminated() and token in self._eos):
            return
        if self.inner.is_terminated() or not self.inner.accept_token(token):
            self.failure = f"token {token} is no continuation"


def _tag(form: forms.Form) -> str:
    """In the library's own words."""
    return json.dumps({"type": "structural_tag", "format": _format(form)})


def _format(form: forms.Form) -> dict[str, Any]:
    match form:
        case forms.Json(schema):
            return {"type": "json_schema", "json_schema": in_ascii(schema), "max_whitespace_cnt": 1}
        case forms.Regex(pattern):
            return {"type": "regex", "pattern": HEX.sub(lambda e: rf"\u00{e[1]}" if e[1] else e[0], pattern)}
        case forms.Lark(grammar):
            return {"type": "grammar", "grammar": grammar, "syntax": "ebnf" if "::=" in grammar else "lark"}
        case forms.Thoughts(begin, end, inner):
            return _thoughts(begin, end, _format(inner))
        case forms.Calls():
            return _calls(form)


def _thoughts(begin: forms.Piece | None, end: forms.Piece, answer: dict[str, Any]) -> dict[str, Any]:
    opened = "" if begin is None else _text(begin)
    thoughts = {"type": "tag", "begin": opened, "content": {"type": "any_text"}, "end": _text(end)}
    thinking = {"type": "sequence", "elements": [thoughts, {"type": "regex", "pattern": SPACE}, answer]}
    return thinking if begin is None else {"type": "or", "elements": [thinking, answer]}


def _calls(form: forms.Calls) -> dict[str, Any]:
    trigger = _text(form.trigger)
    for token in form.free:
        _text(token)
    tags = [_call(trigger, tag) for tag in form.tags]
    if form.answer is None:
        return {"type": "triggered_tags", "triggers": [trigger], "tags": tags}
    calls = {"type": "tags_with_separator", "tags": tags, "separator": "\n", "at_least_one": True}
    return {"type": "or", "elements": [calls, _format(form.answer)]}


def _call(trigger: str, tag: forms.CallTag) -> dict[str, Any]:
    begin, end = trigger + "".join(map(_text, tag.begin)), "".join(map(_text, tag.end))
    return {"type": "tag", "begin": begin, "content": _format(forms.Json(tag.schema)), "end": end}


def _text(piece: forms.Piece) -> str:
    if isinstance(piece, int):
        raise forms.GrammarRefused("thoughts and calls between special tokens need --grammar_backend llguidance")
    return piece.text if isinstance(piece, forms.TagToken) else piece
