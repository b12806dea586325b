"""Formats in which every call stands between two tags."""

import ast
import json
import re
from contextlib import suppress
from typing import Any, ClassVar

from lightllm.server.output_parsers.base import UNREADABLE, CallDelta, CallSyntax, Delta, json_of, parameters_of
from lightllm.server.output_parsers.json_call import JsonCall
from lightllm.server.output_parsers.json_scanner import JsonScanner
from lightllm.server.output_parsers.piecewise import PiecewiseParser

JSON_KINDS: dict[type, str] = {list: "array", dict: "object", type(None): "null"}


class TaggedParser(PiecewiseParser):
    """What makes no call stays text, with its tags. end: the tag with which a call ends."""

    end: str

    def _no_call(self, delta: Delta) -> bool:
        """Shows a block that turned out to be no call, once all of it is there; whether it is."""
        body, tag, rest = self._pending.partition(self.end)
        if tag:
            delta.text += self._begun + body + tag
            self._pending, self._in_call = rest, False
        return bool(tag)

    def _ended(self, rest: str) -> bool:
        self._pending, self._in_call = rest, False
        self._num_calls += 1
        return True


class HermesParser(TaggedParser):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen 2.5, Qwen 3."""

    begin, end = "<tool_call>", "</tool_call>"
    tags = (begin, end)
    syntax = CallSyntax(begin, '\n{"name": "NAME", "arguments": ', f"}}\n{end}")
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
        return self._ended(rest)

    def _cut_call(self, delta: Delta) -> None:
        if not self._json.started:
            delta.text += self.begin + self._json.text + self._pending


class ParametersParser(TaggedParser):
    """The name, then parameters between tags, each passed on as soon as it is complete, with the tool's type.

    _head: the name. _opening, _closing: with what a parameter begins and ends. _parameter: its key and its value.
    _last: behind it a call may end without its tag.
    """

    _head: ClassVar[re.Pattern[str]]
    _opening: ClassVar[str]
    _closing: ClassVar[str]
    _parameter: ClassVar[re.Pattern[str]]
    _last: ClassVar[str] = ""
    _name: str | None
    _count: int

    def _open_call(self) -> None:
        self._name, self._count = None, 0

    def _call(self, delta: Delta) -> bool:
        if self._name is None:
            head = self._head.match(self._pending)
            if head is None:
                return self._no_call(delta)
            self._name = head[1].strip()
            self._pending = self._pending[head.end() :]
            delta.calls.append(CallDelta(self._num_calls, self._name, "{"))
        kinds = parameters_of(self._tools, self._name)
        # a value may be long: it is not looked through again with every token
        while self._closing in self._pending and (parameter := self._parameter.match(self._pending)):
            key = parameter[1].strip()
            value = typed(parameter[2], kinds.get(key))
            separator = ", " if self._count else ""
            delta.calls.append(CallDelta(self._num_calls, arguments=f"{separator}{json.dumps(key)}: {value}"))
            self._count += 1
            self._pending = self._pending[parameter.end() :]
        before, tag, rest = self._pending.partition(self.end)
        if self._lacks_tag():
            rest = self._pending.lstrip().removeprefix(self._last)
        elif not tag or self._opening in before:
            return False
        delta.calls.append(CallDelta(self._num_calls, arguments="}", complete=True))
        return self._ended(rest)

    def _lacks_tag(self) -> bool:
        """Whether something else than its tag stands where the call has ended."""
        pending = self._pending.lstrip()
        behind = pending.removeprefix(self._last).lstrip()
        return behind != pending and not behind.startswith(self.end) and not self.end.startswith(behind)

    def _cut_call(self, delta: Delta) -> None:
        if self._name is None:
            super()._cut_call(delta)
        elif self._last and self._pending.strip() == self._last:
            delta.calls.append(CallDelta(self._num_calls, arguments="}", complete=True))


class Qwen3CoderParser(ParametersParser):
    """`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`, also without the outer tags,
    which the model's own parser does not need either."""

    begin, end, bare = "<tool_call>", "</tool_call>", "<function="
    tags = (begin, end)
    _head = re.compile(r"\s*<function=([^>]+)>")
    _opening, _closing, _last = "<parameter=", "</parameter>", "</function>"
    _parameter = re.compile(r"\s*<parameter=([^>]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


class Glm4Parser(ParametersParser):
    """`<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`: GLM 4.5 and later."""

    begin, end = "<tool_call>", "</tool_call>"
    tags = (begin, end, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    _head = re.compile(r"\s*([^\s{<][^\n{<]*)\s*(?=<arg_key>|</tool_call>)")
    _opening, _closing = "<arg_key>", "</arg_value>"
    _parameter = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>\n*(.*?)\n*</arg_value>", re.DOTALL)


class DeepSeekParser(TaggedParser):
    """DeepSeek V3: the name and a fenced JSON block behind a separator; V3.1's way is read as well."""

    begin, end = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
    around = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    separator = "<｜tool▁sep｜>"
    tags = (begin, end, *around, separator)
    syntax = CallSyntax(begin, f"function{separator}NAME\n```json\n", f"\n```{end}")
    _head = re.compile(rf"([^\n]+?){separator}(?:([^\n{{]+)\n```json\s*)?(?=\{{)")
    _scanner: JsonScanner | None

    def _open_call(self) -> None:
        self._scanner = None

    def _call(self, delta: Delta) -> bool:
        if self._scanner is None:
            head = self._head.match(self._pending)
            if head is None:
                return self._no_call(delta)
            self._scanner = JsonScanner()
            self._pending = self._pending[head.end() :]
            delta.calls.append(CallDelta(self._num_calls, (head[2] or head[1]).strip()))
        arguments, self._pending = self._scanner.feed(self._pending)
        if arguments:
            delta.calls.append(CallDelta(self._num_calls, arguments=arguments))
        before, tag, rest = self._pending.partition(self.end)
        if not tag:
            return False
        if self._scanner.done:
            delta.calls.append(CallDelta(self._num_calls, complete=True))
        else:
            delta.text += before
        return self._ended(rest)

    def _cut_call(self, delta: Delta) -> None:
        if self._scanner is None:
            super()._cut_call(delta)


class DeepSeekV31Parser(DeepSeekParser):
    """DeepSeek V3.1: the name, a separator, JSON."""

    syntax = CallSyntax(DeepSeekParser.begin, f"NAME{DeepSeekParser.separator}", DeepSeekParser.end)


def typed(value: str, schema: Any) -> str:
    """JSON of a value written as bare text, of the type that its schema asks for: where that may be text, only a list,
    an object or null that it names as well is read. True, None and single quotes are read too, as some models write
    them."""
    kinds = _kinds(schema)
    for read in (json.loads, ast.literal_eval):
        with suppress(*UNREADABLE):
            found = read(value)
            if "string" not in kinds or JSON_KINDS.get(type(found), "") in kinds:
                return json_of(found)
    return json_of(value)


def _kinds(schema: Any) -> list[Any]:
    """The types that a schema names, those of its alternatives among them, as of a field that may be null."""
    if not isinstance(schema, dict):
        return []
    named = schema.get("type")
    kinds = list(named) if isinstance(named, list) else [named]
    for word in ("anyOf", "oneOf"):
        if isinstance(alternatives := schema.get(word), list):
            kinds += [kind for alternative in alternatives for kind in _kinds(alternative)]
    if isinstance(values := schema.get("enum"), list) and any(isinstance(value, str) for value in values):
        kinds.append("string")
    return kinds
