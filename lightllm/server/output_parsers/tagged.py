"""Formats in which every call stands between two tags."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from lightllm.server.output_parsers.base import CallDelta, CallSyntax, Delta, ToolParser, held_back, parameters_of
from lightllm.server.output_parsers.json_call import JsonCall


class TaggedParser(ToolParser):
    """Text outside the tags is text; what makes no call stays text, with its tags.

    begin, end: around each call. around: tags around all calls, which are dropped.
    """

    begin: str
    end: str
    around: tuple[str, ...] = ()

    def __init__(self, tools: list[dict[str, Any]]):
        self._tools = tools
        self._pending = ""
        self._in_call = False
        self._num_calls = 0
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
        tags = (self.begin, *self.around)
        place, tag = min(((p, t) for t in tags if (p := self._pending.find(t)) >= 0), default=(-1, ""))
        if place < 0:
            keep = len(self._pending) - held_back(self._pending, tags)
            self._show(delta, self._pending[:keep])
            self._pending = self._pending[keep:]
            return False
        self._show(delta, self._pending[:place])
        self._space = ""
        self._pending = self._pending[place + len(tag) :]
        if tag == self.begin:
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

    def _call(self, delta: Delta) -> bool:
        """Takes what belongs to a block that ends with its tag; whether the block ended."""
        body, tag, rest = self._pending.partition(self.end)
        if not tag:
            return False
        self._pending, self._in_call = rest, False
        try:
            name, arguments = self._parse(body)
        except (ValueError, SyntaxError):
            delta.text += self.begin + body + self.end
            return True
        delta.calls.append(CallDelta(self._num_calls, name, json.dumps(arguments, ensure_ascii=False), True))
        self._num_calls += 1
        return True

    def _parse(self, body: str) -> tuple[str, dict[str, Any]]:
        """Name and arguments of a whole block; raises ValueError if it is no call."""
        raise NotImplementedError

    def _cut_call(self, delta: Delta) -> None:
        delta.text += self.begin + self._pending


class HermesParser(TaggedParser):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen 2.5, Qwen 3."""

    begin, end = "<tool_call>", "</tool_call>"
    tags = (begin, end)
    syntax = CallSyntax(begin, '\n{"name": NAME, "arguments": ', f"}}\n{end}")
    _json: JsonCall

    def _open_call(self) -> None:
        self._json = JsonCall(self._num_calls)

    def _call(self, delta: Delta) -> bool:
        call = self._json
        if not call.ended:
            deltas, self._pending = call.feed(self._pending)
            delta.calls += deltas
        if not call.ended:
            return False
        if call.broken and not call.started:
            delta.text += self.begin + call.text
            self._in_call = False
            return True
        before, tag, rest = self._pending.partition(self.end)
        if not tag:
            return False
        if call.broken:
            delta.text += before
        self._pending, self._in_call = rest, False
        self._num_calls += 1
        return True

    def _cut_call(self, delta: Delta) -> None:
        if not self._json.started:
            delta.text += self.begin + self._json.text + self._pending


class Qwen3CoderParser(TaggedParser):
    """`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`, values typed by the tool."""

    begin, end = "<tool_call>", "</tool_call>"
    tags = (begin, end)
    _function = re.compile(r"\s*<function=([^>]+)>(.*?)(?:</function>)?\s*", re.DOTALL)
    _parameter = re.compile(r"<parameter=([^>]+)>\n?(.*?)\n?</parameter>", re.DOTALL)

    def _parse(self, body: str) -> tuple[str, dict[str, Any]]:
        function = self._function.fullmatch(body)
        if function is None:
            raise ValueError("no function")
        name = function[1].strip()
        kinds = parameters_of(self._tools, name)
        found = self._parameter.findall(function[2])
        return name, {key.strip(): typed(value, kinds.get(key.strip())) for key, value in found}


class Glm4Parser(TaggedParser):
    """`<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`: GLM 4.5 and later."""

    begin, end = "<tool_call>", "</tool_call>"
    tags = (begin, end, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    _argument = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)

    def _parse(self, body: str) -> tuple[str, dict[str, Any]]:
        name = body.partition("<arg_key>")[0].strip()
        if not name or "\n" in name or "{" in name:
            raise ValueError("no name")
        kinds = parameters_of(self._tools, name)
        found = self._argument.findall(body)
        return name, {key.strip(): typed(value.strip("\n"), kinds.get(key.strip())) for key, value in found}


class DeepSeekParser(TaggedParser):
    """DeepSeek V3 (a fenced JSON block behind the name) and V3.1 (JSON behind the separator)."""

    begin, end = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
    around = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    separator = "<｜tool▁sep｜>"
    tags = (begin, end, *around, separator)
    _fenced = re.compile(r"([^\n]+)\n```json\n(.*)\n```\s*", re.DOTALL)

    def _parse(self, body: str) -> tuple[str, dict[str, Any]]:
        first, separator, second = body.partition(self.separator)
        if not separator:
            raise ValueError("no separator")
        fenced = self._fenced.fullmatch(second)
        name, arguments = (fenced[1], fenced[2]) if fenced else (first, second)
        value = json.loads(arguments)
        if not isinstance(value, dict):
            raise ValueError("arguments are an object")
        return name.strip(), value


def typed(value: str, schema: Any) -> Any:
    """A value written as bare text, as the type that its schema asks for: text stays text unless it must be JSON."""
    kinds = schema.get("type") if isinstance(schema, dict) else None
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if "string" in kinds:
        return value
    try:
        return json.loads(value)
    except ValueError:
        pass
    try:
        return ast.literal_eval(value)  # True, None and single quotes, as some models write them
    except (ValueError, SyntaxError):
        return value
