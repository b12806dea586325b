"""Chat templates: Jinja programs of a checkpoint that make one prompt of a conversation, run in a sandbox."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

PROBE = "probe"
NO_TOKENS = {"bos_token": "", "eos_token": ""}  # while a template is probed


class TemplateFailed(ValueError):
    """A template that cannot be read, or that refuses the conversation; the message says why."""


class ChatTemplate:
    """One template, compiled.

    Templates see what transformers shows them: `messages`, `tools`, `add_generation_prompt`, the special tokens by
    name, `raise_exception`, `strftime_now`, a `tojson` that escapes no HTML, loop controls and `{% generation %}`
    blocks.
    knows_tools: it tells the model of `tools`. takes_system: it has a place for a system message.
    Raises TemplateFailed if the source is no template.
    """

    def __init__(self, source: str):
        self.source = source
        try:
            environment = _environment()
            self._template = environment.from_string(source)
            self.knows_tools = "tools" in jinja2.meta.find_undeclared_variables(environment.parse(source))
        except Exception as error:  # any text may be called a template
            raise TemplateFailed(f"the chat template is not valid: {str(error) or type(error).__name__}") from None
        asks: dict[str, Any] = {"role": "user", "content": PROBE}
        self._takes_text = self._prints(asks) or not self._prints({**asks, "content": _parts(PROBE)})
        asks["content"] = self._content("hi")
        self.takes_system = self._prints({"role": "system", "content": self._content(PROBE)}, asks)
        call = {"id": "123456789", "type": "function", "function": {"name": "name", "arguments": {PROBE: "type"}}}
        calls = {"role": "assistant", "content": self._content(""), "tool_calls": [call]}
        self._arguments_are_text = not self._prints(asks, calls) and self._prints(asks, _with_text(calls))

    def _prints(self, *conversation: Mapping[str, Any]) -> bool:
        """Whether the word that is probed stands in the prompt, and no list or object as Python writes it."""
        try:
            text = self._render([*conversation], variables=NO_TOKENS)
        except TemplateFailed:
            return False
        return PROBE in text and "'type'" not in text

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of a conversation; everything the template sees consists of plain JSON values.

        messages: their content is text, which becomes a list of one part where the template wants parts; the arguments
        of calls are objects, which become JSON text where it wants that.
        variables: special tokens by name, and what the request adds. Raises TemplateFailed with the template's reason.
        """
        messages = [{**message, "content": self._content(message["content"])} for message in messages]
        if self._arguments_are_text:
            messages = [_with_text(message) for message in messages]
        return self._render(messages, tools, add_generation_prompt, variables)

    def _content(self, text: str) -> str | list[dict[str, str]]:
        return text if self._takes_text else _parts(text)

    def _render(
        self, messages: Any, tools: Any = None, add_generation_prompt: bool = True, variables: Any = None
    ) -> str:
        conversation = {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render({**(variables or {}), **conversation})
        except Exception as error:  # a template is a program: anything can go wrong in it
            reason = str(error) or type(error).__name__
            raise TemplateFailed(f"the chat template does not take this conversation: {reason}") from None


def _with_text(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message with the arguments of its calls as JSON text."""
    calls = [{**call, "function": {**call["function"]}} for call in message.get("tool_calls", [])]
    for function in (call["function"] for call in calls):
        if not isinstance(function["arguments"], str):
            function["arguments"] = _to_json(function["arguments"])
    return {**message, "tool_calls": calls} if calls else {**message}


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


class _Generation(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}`, which marks text to train on, is only its content."""

    tags = {"generation"}

    def parse(self, parser: Any) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    return environment


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
