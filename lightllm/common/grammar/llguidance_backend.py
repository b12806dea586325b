"""llguidance: derivatives of regular expressions below an Earley parser; bounded in time and memory."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lightllm.common.grammar import forms
from lightllm.utils.renamed_tokens import rename_tokens, secret_names

JSON_OPTIONS = {"item_separator": ",[ ]?", "key_separator": ":[ ]?", "whitespace_flexible": False}
TEXT = "/(.|\\n)*/"
SPACE = "/[ \\n]{0,2}/"  # behind thoughts and calls
TAG = re.compile("<(?!0x).*>")  # no byte
WORD = re.compile(r'//.*|"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\\n])*/|<[^<>\s]+>')  # of Lark: comment, string, regex, token


class LLGuidance:
    def __init__(self, tokenizer_json: Path, vocab_size: int, eos_token_ids: Sequence[int]):
        from llguidance import LLTokenizer

        self._eos = frozenset(eos_token_ids)
        description = json.loads(tokenizer_json.read_text(encoding="utf-8"))
        size = max(vocab_size, 1 + _highest_id(description))
        self._tags = _tags_of(description)
        rename_tokens(description, secret_names(self._tags), self._tags)
        self._tokenizer = LLTokenizer(json.dumps(description), n_vocab=size, eos_token=list(eos_token_ids))
        self._words = (size + 31) // 32  # of a mask of all that the tokenizer knows

    @staticmethod
    def check(form: forms.Form) -> None:
        from llguidance import LLMatcher

        try:
            failed, messages = LLMatcher.validate_grammar_with_warnings(_grammar(form, {}), limits=_limits())
        except Exception as error:
            raise forms.GrammarRefused(forms.shortened(str(error))) from None
        if failed:
            raise forms.GrammarRefused(forms.shortened(messages[0]))

    def first(self, form: forms.Form) -> LLGuidanceMatcher:
        from llguidance import LLMatcher

        grammar = _grammar(form, self._tags)
        return LLGuidanceMatcher(LLMatcher(self._tokenizer, grammar, log_level=0, limits=_limits()), self._eos)

    def fill(self, matcher: LLGuidanceMatcher, mask: np.ndarray) -> None:
        from llguidance.numpy import fill_next_token_bitmask

        whole = mask if len(mask) == self._words else np.empty(self._words, dtype=np.int32)
        fill_next_token_bitmask(matcher.inner, whole[None])
        if whole is not mask:
            mask[:] = whole[: len(mask)]


def _highest_id(description: dict[str, Any]) -> int:
    """Of a token that tokenizer.json describes."""
    vocabulary = description["model"]["vocab"]
    ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
    return max([*ids, *(token["id"] for token in description["added_tokens"])])


def _tags_of(description: dict[str, Any]) -> dict[str, int]:
    """What the library takes for tokens that no text can spell: special ones, and added ones that look like tags.

    Where only one text may follow it would split that as the tokenizer does, and find them in it nevertheless.
    """
    added = description["added_tokens"]
    return {token["content"]: token["id"] for token in added if token["special"] or TAG.fullmatch(token["content"])}


class LLGuidanceMatcher:
    def __init__(self, inner: Any, eos: frozenset[int]):
        self.inner, self._eos = inner, eos

    def fork(self) -> LLGuidanceMatcher:
        return LLGuidanceMatcher(self.inner.deep_copy(), self._eos)

    def accept(self, token: int) -> None:
        if not self.inner.is_error() and not (self.inner.is_stopped() and token in self._eos):
            self.inner.consume_token(token)

    @property
    def failure(self) -> str:
        return _told(self.inner.get_error()) if self.inner.is_error() else ""


def _told(message: str) -> str:
    """Without what follows for those who debug the library."""
    return forms.shortened(re.split("\n<|; following special", message)[0]).replace("NoExtensionBias", forms.DEAD_END)


def _limits() -> Any:
    """Of one matcher: an object of a thousand properties has four thousand items where its next key may begin."""
    from llguidance import LLParserLimits

    return LLParserLimits(max_lexer_states=50_000, max_items_in_row=50_000, verbose_errors=False)


def _grammar(form: forms.Form, tags: Mapping[str, int]) -> str:
    """In the library's own words: the first of the grammars is where an output begins.

    tags: tokens that Lark's words may name, which the library knows by their ids.
    """
    grammars = _grammars(form, "main")
    for grammar in grammars:
        if "lark_grammar" in grammar:
            by_id = lambda word: f"<[{tags[word[0]]}]>" if word[0] in tags else word[0]
            grammar["lark_grammar"] = WORD.sub(by_id, grammar["lark_grammar"])
    return json.dumps({"grammars": grammars})


def _grammars(form: forms.Form, name: str) -> list[dict[str, Any]]:
    """The grammar of that name, and those that it refers to."""
    inner = f"{name}_answer"
    match form:
        case forms.Thoughts(begin, end, answer):
            return [{"name": name, "lark_grammar": _thoughts(begin, end, inner)}, *_grammars(answer, inner)]
        case forms.Calls(answer=None):
            return [{"name": name, "lark_grammar": _calls(form)}]
        case forms.Calls(answer=answer):
            assert answer is not None
            return [{"name": name, "lark_grammar": _calls_or(form, inner)}, *_grammars(answer, inner)]
        case _:
            return [{"name": name} | _simple(form)]


def _simple(form: forms.Json | forms.Regex | forms.Lark) -> dict[str, Any]:
    from llguidance import LLMatcher, gbnf_to_lark

    match form:
        case forms.Json(schema):
            return {"json_schema": schema | {"x-guidance": JSON_OPTIONS}}
        case forms.Regex(pattern):
            return {"lark_grammar": json.loads(LLMatcher.grammar_from_regex(pattern))["grammars"][0]["lark_grammar"]}
        case forms.Lark(grammar):
            return {"lark_grammar": gbnf_to_lark.any_to_lark(grammar) if "::=" in grammar else grammar}


def _thoughts(begin: forms.Piece | None, end: forms.Piece, answer: str) -> str:
    """Space behind the thoughts belongs to them. answer: the name of its grammar."""
    lines = [f"start: thoughts @{answer}" if begin is None else f"start: ({_piece(begin)} thoughts)? @{answer}"]
    lines += _until("thoughts_end", end)
    return "\n".join([*lines, "thoughts: thoughts_end SPACE", f"SPACE: {SPACE}", f"TEXT: {TEXT}"])


def _calls(form: forms.Calls) -> str:
    chunks = " | ".join(["call", *(f"TEXT {_piece(token)}" for token in form.free)])
    lines = ["%llguidance {}", f"start: ({chunks})* TEXT", "call: head tag", *_until("head", form.trigger)]
    return "\n".join([*lines, *_tags(form), f"TEXT: {TEXT}"])


def _calls_or(form: forms.Calls, answer: str) -> str:
    """answer: the name of its grammar."""
    lines = ["%llguidance {}", f"start: (call SPACE)+ | @{answer}", f"call: {_piece(form.trigger)} tag"]
    return "\n".join([*lines, *_tags(form), f"SPACE: {SPACE}"])


def _tags(form: forms.Calls) -> list[str]:
    tags = [f"tag{i}: {_tag(tag)}" for i, tag in enumerate(form.tags)]
    return ["tag: " + " | ".join(f"tag{i}" for i in range(len(tags))), *tags]


def _tag(tag: forms.CallTag) -> str:
    arguments = f"%json {json.dumps(tag.schema | {'x-guidance': JSON_OPTIONS})}"
    return " ".join([*map(_piece, tag.begin), arguments, *map(_piece, tag.end)])


def _until(name: str, end: forms.Piece) -> list[str]:
    """A rule for any text up to and with `end`, the first time that it comes."""
    match end:
        case int(id):
            return [f"{name}: TEXT <[{id}]>"]
        case forms.TagToken(text, id):
            return [f"{name}: {name}_spelled | TEXT <[{id}]>", *_until(f"{name}_spelled", text)]
        case text:
            return [f"{name}[lazy]: TEXT {_quoted(text)}"]


def _piece(piece: forms.Piece) -> str:
    """The library takes every added token that looks like a tag for a special one."""
    match piece:
        case int(id):
            return f"<[{id}]>"
        case forms.TagToken(text, id):
            return f"({_quoted(text)} | <[{id}]>)"
        case text:
            return _quoted(text)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
