"""The text of one sequence, token by token: ends of text are hidden, possible stops held back, nothing leaks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lightllm.server.core.messages import Finish, NewSequence, unpack
from lightllm.server.core.sampling_params import SamplingParams
from lightllm.server.detokenization.text_stream import open_stream
from lightllm.server.tokenizer import Tokenizer

# A hidden special token that a stop string spells stands in the held text as one of these: no decoded text holds them.
FIRST_MARK, LAST_MARK = 0xD800, 0xDFFF


def failure(error: Exception) -> str:
    """Why a sequence ends whose text cannot be made."""
    return f"detokenization failed: {type(error).__name__}: {error}"


class IncrementalDetokenizer:
    """Joined, the texts that `push` returns are the sequence's final text.

    tokenizer: of the model. prompt_tail: the last ids of the prompt. sampling: resolved parameters.
    num_tokens: tokens pushed so far; once a stop string has matched, the tokens that the sequence keeps.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_tail: Sequence[int], sampling: SamplingParams):
        self.num_tokens = 0
        self._hidden = tokenizer.special_ids if sampling.skip_special_tokens else frozenset()
        self._stream = open_stream(
            tokenizer, list(prompt_tail), self._hidden, sampling.add_spaces_between_special_tokens
        )
        given = sampling.stop_sequences
        stops = [given] if isinstance(given, str) else given
        strings = [stop for stop in stops if isinstance(stop, str) and stop]
        sequences = [stop for stop in stops if isinstance(stop, list) and stop]
        self._stop_ids = {*sampling.stop_token_ids, *(ids[0] for ids in sequences if len(ids) == 1)}
        self._shows_stop = sampling.include_stop_str_in_output
        self._shows_end = sampling.print_eos_token
        self._marks = _marks(tokenizer, self._hidden, strings)
        marked = {stop: _with_marks(stop, tokenizer, self._marks) for stop in strings}
        self._strings = [(pattern, stop) for stop in strings for pattern in {stop, marked[stop]}]
        self._sequences = [] if self._shows_stop else [ids for ids in sequences if len(ids) > 1]
        self._min_new_tokens = sampling.min_new_tokens
        self._held = ""
        self._released = 0  # characters, marks included
        self._recent: list[tuple[int, int]] = []  # last ids, with the characters before each of them
        self._num_recent = max((len(ids) for ids in self._sequences), default=0)

    @classmethod
    def of(cls, tokenizer: Tokenizer, new: NewSequence) -> IncrementalDetokenizer:
        return cls(tokenizer, unpack(new.prompt_tail, np.int32).tolist(), new.sampling)

    def push(self, token_id: int, finish: Finish) -> tuple[str, Finish]:
        """The text that this token releases, and why the sequence ends with it (a stop string may end it earlier).

        finish: the router's decision, made on ids. Nothing may be pushed after an end.
        """
        self.num_tokens += 1
        if self._sequences:
            self._recent.append((token_id, self._released + len(self._held)))
            del self._recent[: -self._num_recent]
        text = self._text_of(token_id, finish)
        if self._strings or self._sequences:
            return self._watch(text, finish)
        return text, finish

    def extend(self, token_ids: Sequence[int], finish: Finish) -> tuple[str, Finish]:
        """`push` of one token after the other, the last with `finish`, as far as the first that ends the sequence."""
        if not (finish or self._strings or self._sequences):
            self.num_tokens += len(token_ids)
            return self._stream.feed_all([id for id in token_ids if id not in self._hidden]), finish
        texts, ended = [], Finish.NONE
        for left, token_id in zip(range(len(token_ids) - 1, -1, -1), token_ids):
            text, ended = self.push(token_id, Finish.NONE if left else finish)
            texts.append(text)
            if ended:
                break
        return "".join(texts), ended

    def _text_of(self, token_id: int, finish: Finish) -> str:
        """What the token adds, before stops are looked for."""
        shown = token_id not in self._hidden
        if finish == Finish.STOP and token_id in self._stop_ids:
            shown = self._shows_end or (shown and self._shows_stop)
        text = self._stream.feed(token_id) if shown else self._marks.get(token_id, "")
        return text + self._stream.flush() if finish else text

    def _watch(self, text: str, finish: Finish) -> tuple[str, Finish]:
        """Releases held text up to the first stop, or up to where one may have begun."""
        pending = self._held + text
        end = self._stop_sequence_start() if finish == Finish.STOP else None
        ending = ""
        if self.num_tokens >= self._min_new_tokens:
            start, stop = self._find_string(pending)
            if start >= 0 and (end is None or start < end):
                end, ending, finish = start, stop if self._shows_stop else "", Finish.STOP
        if end is None:
            end = len(pending) if finish else self._hold_from(pending)
        self._held = pending[end:]
        self._released += end
        return self._without_marks(pending[:end]) + ending, finish

    def _find_string(self, pending: str) -> tuple[int, str]:
        """(start, stop) of the earliest stop string that ends in the new text, shorter ones first; (-1, "") if none."""
        best = (-1, 0, "")
        for pattern, stop in self._strings:
            start = pending.find(pattern, max(0, len(self._held) - len(pattern) + 1))
            if start >= 0 and (best[0] < 0 or (start, len(pattern)) < best[:2]):
                best = (start, len(pattern), stop)
        return best[0], best[2]

    def _stop_sequence_start(self) -> int | None:
        """Where in the held text the token sequence begins that ended this sequence."""
        ids = [id for id, _ in self._recent]
        lengths = [len(stop) for stop in self._sequences if ids[-len(stop) :] == stop]
        return self._recent[-max(lengths)][1] - self._released if lengths else None

    def _hold_from(self, pending: str) -> int:
        """Where the earliest beginning of a stop that may still be completed lies."""
        end = len(pending)
        for pattern, _ in self._strings:
            start = pending.find(pattern[0], max(0, len(pending) - len(pattern) + 1), end)
            while start >= 0:
                if pattern.startswith(pending[start:]):
                    end = start
                    break
                start = pending.find(pattern[0], start + 1, end)
        ids = [id for id, _ in self._recent]
        for stop in self._sequences:
            for count in range(min(len(stop) - 1, len(ids)), 0, -1):
                if ids[-count] == stop[0] and ids[-count:] == stop[:count]:
                    end = min(end, self._recent[-count][1] - self._released)
                    break
        return end

    def _without_marks(self, text: str) -> str:
        for mark in self._marks.values():
            text = text.replace(mark, "")
        return text


def _marks(tokenizer: Tokenizer, hidden: frozenset[int], strings: list[str]) -> dict[int, str]:
    """A mark for each hidden special token whose text stands in a stop string."""
    if not strings or not hidden:
        return {}
    every = "\0".join(strings)
    spelled = [id for id, text in tokenizer.special_texts if text in every]
    return {id: chr(mark) for id, mark in zip(spelled, range(FIRST_MARK, LAST_MARK + 1), strict=False)}


def _with_marks(stop: str, tokenizer: Tokenizer, marks: dict[int, str]) -> str:
    for id in sorted(marks, key=lambda id: -len(tokenizer.token_text(id))):
        stop = stop.replace(tokenizer.token_text(id), marks[id])
    return stop
