"""A call written as a JSON object: its name as soon as it is known, then its arguments as they come."""

import json
import re
from typing import Any

from lightllm.server.output_parsers.base import UNREADABLE, CallDelta, json_of
from lightllm.server.output_parsers.json_scanner import JsonScanner

# Where the usual order lets arguments be passed on before the call is complete.
HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)', re.DOTALL)


class JsonCall:
    """`{"name": ..., "arguments": {...}}`, the second key also `parameters`, further keys ignored.

    needs_arguments: an object without them is no call.
    started: its name has been released. ended: its last brace has come, or it can be no call any more.
    broken: what is wrong with it; "" if nothing is. text: all that was taken.
    """

    def __init__(self, index: int, needs_arguments: bool = False):
        self.started = False
        self.ended = False
        self.broken = ""
        self.text = ""
        self._index = index
        self._needs_arguments = needs_arguments
        self._whole = JsonScanner()
        self._arguments = JsonScanner()

    def feed(self, text: str) -> tuple[list[CallDelta], str]:
        """What a piece of text adds, and what of it follows the call."""
        deltas: list[CallDelta] = []
        new, rest = self._whole.feed(text)
        self.text += new
        if not self.started and (head := HEAD.match(self.text)):
            self.started = True
            deltas.append(CallDelta(self._index, _whole(json.loads(head[1]))))
            new = self.text[head.end() :]
        if self.started and (arguments := self._arguments.feed(new)[0]):
            deltas.append(CallDelta(self._index, arguments=arguments))
        self.broken = self._whole.broken
        self.ended = self._whole.done or bool(self.broken)
        if self._whole.done:
            deltas += self._end()
        return deltas, rest

    def _end(self) -> list[CallDelta]:
        """The end of a call that was passed on, or the whole of one whose keys are in another order."""
        if self.started:
            return [CallDelta(self._index, complete=True)]
        try:
            call = json.loads(self.text)
            call = call if isinstance(call, dict) else {}
            absent: dict[str, Any] | None = None if self._needs_arguments else {}
            name, arguments = call.get("name"), call.get("arguments", call.get("parameters", absent))
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
