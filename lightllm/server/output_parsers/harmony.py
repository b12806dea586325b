"""Answers of gpt-oss, in OpenAI's harmony format: messages, each with a header that says what it is."""

import re
from typing import Any

from lightllm.server.output_parsers.base import CallDelta, Delta, ToolParser, first_of, held_back
from lightllm.server.output_parsers.json_scanner import JsonScanner

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
HEADS = (CHANNEL, START, "assistant", "to=")  # the prompt ends with <|start|>assistant
FUNCTION = re.compile(r"to=functions\.([\w.-]+)")


class HarmonyParser(ToolParser):
    """`<|channel|>analysis<|message|>thoughts<|end|><|start|>assistant<|channel|>final<|message|>text`: a message to
    `functions.NAME` is a call, those of the channel analysis are thoughts. A line ends between two of one kind.
    """

    tags = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)
    of_every_answer = True

    def __init__(self, tools: list[dict[str, Any]]):
        self._tools = tools
        self._pending = ""
        self._kind = ""  # of the message that is open: text, reasoning or call
        self._kinds: set[str] = set()  # of all so far
        self._arguments = JsonScanner()
        self._num_calls = 0

    def feed(self, text: str) -> Delta:
        self._pending += text
        delta = Delta(calls=[])
        while self._body(delta) if self._kind else self._header(delta):
            pass
        return delta

    def flush(self) -> Delta:
        """Of a header that was cut nothing is shown."""
        delta = Delta(calls=[])
        if self._kind or not (self._kinds or self._pending.lstrip().startswith(HEADS[:2])):
            self._show(delta, self._pending)
        self._pending = ""
        return delta

    def _header(self, delta: Delta) -> bool:
        """Opens a message once its header is there; whether one is open. An answer that begins with none is text."""
        header, tag, rest = self._pending.partition(MESSAGE)
        if not tag:
            if self._kinds or _may_begin_header(header):
                return False
            self._open("text")
            return True
        self._pending = rest
        if self._tools and (function := FUNCTION.search(header)):
            self._open("call")
            self._arguments = JsonScanner()
            delta.calls.append(CallDelta(self._num_calls, function[1]))
            self._num_calls += 1
        else:
            kind = "reasoning" if f"{CHANNEL}analysis" in header else "text"
            between = "\n" if kind in self._kinds else ""
            self._open(kind)
            self._show(delta, between)
        return True

    def _open(self, kind: str) -> None:
        self._kind = kind
        self._kinds.add(kind)

    def _body(self, delta: Delta) -> bool:
        """Shows the message as far as it is there; whether it has ended."""
        place, end = first_of(ENDS, self._pending)
        if not end:
            place = len(self._pending) - held_back(self._pending, ENDS)
        self._show(delta, self._pending[:place])
        self._pending = self._pending[place + len(end) :]
        if end:
            self._kind = ""
        return bool(end)

    def _show(self, delta: Delta, text: str) -> None:
        if self._kind == "call":
            arguments, rest = self._arguments.feed(text)
            if arguments:
                call = CallDelta(self._num_calls - 1, arguments=arguments, complete=self._arguments.done)
                delta.calls.append(call)
            delta.text += rest if self._arguments.broken else ""
        elif self._kind == "reasoning":
            delta.reasoning += text
        else:
            delta.text += text


def _may_begin_header(text: str) -> bool:
    start = text.lstrip()
    return any(start.startswith(head) or head.startswith(start) for head in HEADS)
