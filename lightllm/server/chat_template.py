"""Chat templates: Jinja programs of a checkpoint that make one prompt of a conversation, run in a sandbox."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

PROBE = "probe"


class TemplateFailed(ValueError):
    """A template that cannot be read, or that refuses the conversation; the message says why."""


class ChatTemplate:
    """One template, compiled.

    Templates see what transformers shows them: `messages`, `tools`, `add_generation_prompt`, the special tokens by
    name, `raise_exception`, `strftime_now`, a `tojson` that escapes no HTML, loop controls and `{% generation %}`
    blocks.
    knows_tools: it tells the model of `tools`.
    Raises TemplateFailed if the source is no template.
    """

    def __init__(self, source: str):
        self.source = source
        try:
            self._template = _environment().from_string(source)
        except Exception as error:  # any text may be called a template
            raise TemplateFailed(f"the chat template is not valid: {str(error) or type(error).__name__}") from None
        self.knows_tools = "tools" in source
        self._takes_text = True
        self._takes_text = self._prints(PROBE) or not self._prints(_parts(PROBE))

    def _prints(self, content: Any) -> bool:
        """Whether content of this kind stands in the prompt as its text alone."""
        try:
            text = self.render([{"role": "user", "content": content}])
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

        messages: their content is text, which becomes a list of one part where the template wants parts.
        variables: special tokens by name, and what the request adds. Raises TemplateFailed with the template's reason.
        """
        if not self._takes_text:
            messages = [{**message, "content": _parts(message["content"])} for message in messages]
        conversation = {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render({**(variables or {}), **conversation})
        except Exception as error:  # a template is a program: anything can go wrong in it
            reason = str(error) or type(error).__name__
            raise TemplateFailed(f"the chat template does not take this conversation: {reason}") from None


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
