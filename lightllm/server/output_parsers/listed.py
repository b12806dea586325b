"""Formats in which calls follow one another, behind one tag or from the answer's first character on."""

import ast
import re
from typing import Any

from lightllm.server.output_parsers.base import UNREADABLE, CallDelta, CallSyntax, Delta, ToolParser, json_of
from lightllm.server.output_parsers.json_call import JsonCall
from lightllm.server.output_parsers.json_scanner import JsonScanner
from lightllm.server.output_parsers.piecewise import PiecewiseParser

BETWEEN = " \t\n\r,"


class JsonListParser(PiecewiseParser):
    """JSON objects, in a list or apart by `;`, commas or space, behind one tag.

    starts: with which characters an answer that is all calls may begin.
    """

    starts = ""
    separators = BETWEEN + ";[]"
    _nothing_yet = True
    _untagged = False  # calls began with the answer, which may be JSON that is no call
    _json: JsonCall | None = None

    def _text(self, delta: Delta) -> bool:
        if self._nothing_yet and (start := self._pending.lstrip()[:1]):
            self._nothing_yet = False
            self._in_call = self._untagged = start in self.starts
        if self._in_call or (self._nothing_yet and self.starts):
            return self._in_call
        return super()._text(delta)

    def _call(self, delta: Delta) -> bool:
        """Takes one call or what stands between two."""
        if self._json is None:
            self._pending = self._pending.lstrip(self.separators)
            if not self._pending:
                return False
            self._json = JsonCall(self._num_calls, needs_arguments=self._untagged)
        deltas, self._pending = self._json.feed(self._pending)
        delta.calls += deltas
        if not self._json.ended:
            return False
        if self._json.broken:
            delta.text += "" if self._json.started else self._json.text
            self._in_call, self._untagged, self.starts = False, False, ""
        self._num_calls += self._json.started
        self._json = None
        return True

    def _cut_call(self, delta: Delta) -> None:
        if self._json is not None and not self._json.started:
            delta.text += self._json.text


class Llama3JsonParser(JsonListParser):
    """`{"name": ..., "parameters": {...}}`, perhaps behind `<|python_tag|>`, several apart by `;`: LLaMA 3.1, 3.2."""

    begin = "<|python_tag|>"
    starts = "{"
    tags = (begin,)
    syntax = CallSyntax('{"name": ', '"NAME", "parameters": ', "}")


class ConstrainedParser(JsonListParser):
    """The list that a grammar makes the model write when a call is required: all calls, even where it is cut."""

    starts = "["

    def flush(self) -> Delta:
        return Delta()


class MistralParser(JsonListParser):
    """`[TOOL_CALLS]` and a JSON list, or `[TOOL_CALLS]name[ARGS]{...}` once for each call, whose JSON is `_named`."""

    begin = "[TOOL_CALLS]"
    tags = (begin, "[ARGS]", "[CALL_ID]")
    syntax = CallSyntax(begin, ' [{"name": "NAME", "arguments": ', "}]")
    _head = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\])?\s*(?=\{)")

    _named: JsonScanner | None = None

    def _call(self, delta: Delta) -> bool:
        if self._named is not None:
            return self._arguments(self._named, delta)
        if self._json is None:
            self._pending = self._pending.lstrip(BETWEEN).removeprefix(self.begin).lstrip(BETWEEN)
            if self._pending[:1] not in ("", "[", "{", "]") or self.begin.startswith(self._pending):
                return self._named_call(delta)
        return super()._call(delta)

    def _named_call(self, delta: Delta) -> bool:
        """The name of a call in the newer form."""
        head = self._head.match(self._pending)
        if head is None:
            return False
        self._named = JsonScanner()
        self._pending = self._pending[head.end() :]
        delta.calls.append(CallDelta(self._num_calls, head[1]))
        return True

    def _arguments(self, scanner: JsonScanner, delta: Delta) -> bool:
        arguments, self._pending = scanner.feed(self._pending)
        delta.calls.append(CallDelta(self._num_calls, arguments=arguments, complete=scanner.done))
        if not (scanner.broken or scanner.done):
            return False
        self._named, self._in_call = None, scanner.done
        self._num_calls += 1
        return True

    def _cut_call(self, delta: Delta) -> None:
        if self._json is None:
            delta.text += self._pending
        super()._cut_call(delta)


class PythonicParser(ToolParser):
    """`[f(a=1), g(b="x")]`, the whole answer: LLaMA 3.2 and 4."""

    tags = ("<|python_start|>", "<|python_end|>")

    def __init__(self, tools: list[dict[str, Any]]):
        self._text = ""
        self._is_text = False

    def feed(self, text: str) -> Delta:
        if self._is_text:
            return Delta(text)
        self._text += text
        start = self._text.lstrip()
        possible = any(start.startswith(tag) or tag.startswith(start) for tag in (*self.tags, "["))
        if possible:
            return Delta()
        self._is_text = True
        return Delta(self._text)

    def flush(self) -> Delta:
        if self._is_text or not self._text:
            return Delta()
        try:
            return Delta(calls=self._calls())
        except UNREADABLE:
            return Delta(self._text)

    def _calls(self) -> list[CallDelta]:
        text = self._text
        for tag in self.tags:
            text = text.replace(tag, "")
        tree = ast.parse(text.strip(), mode="eval").body
        if not isinstance(tree, ast.List) or not tree.elts:
            raise ValueError("no list of calls")
        return [self._call(index, node) for index, node in enumerate(tree.elts)]

    @staticmethod
    def _call(index: int, node: ast.expr) -> CallDelta:
        if not isinstance(node, ast.Call) or node.args or any(keyword.arg is None for keyword in node.keywords):
            raise ValueError("not a call with named arguments")
        arguments = {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords}
        return CallDelta(index, ast.unparse(node.func), json_of(arguments), True)
