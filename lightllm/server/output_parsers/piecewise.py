"""Answers in which text and calls follow one another, taken apart as they come."""

from abc import abstractmethod
from typing import Any

from lightllm.server.output_parsers.base import Delta, ToolParser, first_of, held_back


class PiecewiseParser(ToolParser):
    """Text in front of a call is text, without the space before the call.

    begin: the tag with which a call begins. bare: what a call begins with whose tag was forgotten. around: tags around
    all calls, which are dropped.
    """

    begin = ""
    bare = ""
    around: tuple[str, ...] = ()

    def __init__(self, tools: list[dict[str, Any]]):
        self._tools = tools
        self._pending = ""
        self._in_call = False
        self._num_calls = 0
        self._begun = ""  # of the last call: what is shown before the rest of it if it turns out to be none
        self._space = ""  # before a call it is dropped

    def feed(self, text: str) -> Delta:
        self._pending += text
        delta = Delta(calls=[])
        while self._call(delta) if self._in_call else self._text(delta):
            pass
        return delta

    def flush(self) -> Delta:
        delta = Delta(calls=[])
        if self._in_call:
            self._cut_call(delta)
        else:
            self._show(delta, self._pending)
            delta.text += self._space
        self._pending = self._space = ""
        return delta

    def _text(self, delta: Delta) -> bool:
        """Shows text up to the next tag; whether there was one."""
        tags = tuple(filter(None, (self.begin, self.bare, *self.around)))
        place, tag = first_of(tags, self._pending)
        if place < 0:
            keep = len(self._pending) - held_back(self._pending, tags)
            self._show(delta, self._pending[:keep])
            self._pending = self._pending[keep:]
            return False
        self._show(delta, self._pending[:place])
        is_bare = tag == self.bare
        self._begun = self._space if is_bare else tag
        self._space = ""
        self._pending = self._pending[place + (0 if is_bare else len(tag)) :]
        if tag not in self.around:
            self._in_call = True
            self._open_call()
        return True

    def _show(self, delta: Delta, text: str) -> None:
        text = self._space + text
        shown = text.rstrip()
        delta.text += shown
        self._space = text[len(shown) :]

    def _open_call(self) -> None:
        """A begin tag has been read."""

    @abstractmethod
    def _call(self, delta: Delta) -> bool:
        """Takes what is there of calls; whether there is more to look at."""

    def _cut_call(self, delta: Delta) -> None:
        """The answer ends where a call should."""
        delta.text += self._begun + self._pending
