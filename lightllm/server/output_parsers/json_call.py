"""A call written as a JSON object: its name as soon as it is known, then its arguments as they come."""

from __future__ import annotations

import json
import re

from lightllm.server.output_parsers.base import UNREADABLE, CallDelta, json_of
from lightllm.server.output_parsers.json_scanner import JsonScanner

# Where the usual order lets arguments be passed on before the call is complete.
HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*', re.DOTALL)


class JsonCall:
    """`{"name": ..., "arguments": {...}}`, the second key also `parameters`, further keys ignored.

    started: its name has been released. ended: its last brace has come, or it can be no call any more.
    broken: what is wrong with it; "" if nothing is. text: all that was taken.
    """

    def __init__(self, index: int):
        self.started = False
        self.ended = False
        self.broken = ""
        self.text = ""
        self._index = index
        self._scanner = JsonScanner()
        self._arguments_done = False

    def feed(self, text: str) -> tuple[list[CallDelta], str]:
        """What a piece of text adds, and what of it follows the call."""
        released: list[str] = []
        deltas: list[CallDelta] = []
        for place, character in enumerate(text):
            try:
                self.text += self._take(character, released)
            except ValueError as error:
                self.ended, self.broken = True, str(error)
                return [*deltas, *self._arguments(released)], text[place:]
            if not self.started and character == "{" and (head := HEAD.fullmatch(self.text[:-1])):
                self.started = True
                deltas.append(CallDelta(self._index, _whole(json.loads(head[1]))))
                released.append(character)
            if self._scanner.done:
                self.ended = True
                deltas += self._arguments(released)
                deltas += self._end()
                return deltas, text[place + 1 :]
        return [*deltas, *self._arguments(released)], ""

    def _take(self, character: str, released: list[str]) -> str:
        valid = self._scanner.take(character)
        if self.started and not self._arguments_done:
            released.append(valid)
            self._arguments_done = self._scanner.depth == 1
        return valid

    def _arguments(self, released: list[str]) -> list[CallDelta]:
        return [CallDelta(self._index, arguments="".join(released))] if released else []

    def _end(self) -> list[CallDelta]:
        """The end of a call that was passed on, or the whole of one whose keys are in another order."""
        if self.started:
            return [CallDelta(self._index, complete=True)]
        try:
            call = json.loads(self.text)
            name, arguments = call.get("name"), call.get("arguments", call.get("parameters", {}))
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
            written = json_of(arguments)
        except UNREADABLE as error:
            self.broken = str(error)
            return []
        if not isinstance(name, str) or not isinstance(arguments, dict):
            self.broken = "it has no name or no arguments"
            return []
        self.started = True
        return [CallDelta(self._index, _whole(name), written, True)]


def _whole(text: str) -> str:
    """Without half characters, which JSON can spell and no message can carry."""
    return text.encode(errors="replace").decode()
