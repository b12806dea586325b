"""Which parser reads a model's answers: by flag, or by what its chat template writes."""

from lightllm.server.output_parsers.base import Delta, ToolParser
from lightllm.server.output_parsers.harmony import CHANNEL, HarmonyParser
from lightllm.server.output_parsers.listed import Llama3JsonParser, MistralParser, PythonicParser
from lightllm.server.output_parsers.reasoning import END_THINK, ReasoningParser
from lightllm.server.output_parsers.tagged import (
    DeepSeekParser,
    DeepSeekV31Parser,
    Glm4Parser,
    HermesParser,
    Qwen3CoderParser,
)

TOOL_PARSERS: dict[str, type[ToolParser]] = {
    "hermes": HermesParser,
    "qwen": HermesParser,
    "qwen25": HermesParser,
    "qwen3": HermesParser,
    "qwen3_coder": Qwen3CoderParser,
    "llama3": Llama3JsonParser,
    "pythonic": PythonicParser,
    "mistral": MistralParser,
    "deepseekv3": DeepSeekParser,
    "deepseekv31": DeepSeekV31Parser,
    "glm4": Glm4Parser,
    "glm45": Glm4Parser,
    "glm47": Glm4Parser,
    "gpt-oss": HarmonyParser,
}
NONE = "none"

# The first text that a template holds decides.
_TOOL_SIGNS = (
    (CHANNEL, "gpt-oss"),
    ("<function=", "qwen3_coder"),
    ("<arg_key>", "glm4"),
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("<｜tool▁call▁begin｜>", "deepseekv31"),
    ("<|python_start|>", "pythonic"),
    ("<|python_tag|>", "llama3"),
    ('"parameters": dictionary', "llama3"),
)


def tool_parser(flag: str | None, template: str) -> type[ToolParser] | None:
    """The kind that a flag names, else the one whose signs stand in the template, if any."""
    if flag is not None:
        return None if flag == NONE else TOOL_PARSERS[flag]
    name = next((name for sign, name in _TOOL_SIGNS if sign in template), NONE)
    if name == "deepseekv31" and "```json" in template:
        name = "deepseekv3"
    return TOOL_PARSERS.get(name)


def reasons(flag: str | None, template: str) -> bool:
    """Whether answers may begin with thoughts."""
    return flag != NONE if flag is not None else END_THINK in template


class AnswerParser:
    """One answer as it is generated: thoughts first, then text and calls.

    separates: thoughts that `tools` finds are told apart from the text. completed: calls that ended well.
    """

    def __init__(self, reasoning: ReasoningParser | None, tools: ToolParser | None, separates: bool = True):
        self._reasoning = reasoning
        self._tools = tools
        self._separates = separates
        self.completed = 0

    def feed(self, text: str) -> Delta:
        return self._find_calls(self._reasoning.feed(text) if self._reasoning else Delta(text))

    def flush(self) -> Delta:
        """What is still held, at the end of the answer."""
        delta = self._find_calls(self._reasoning.flush()) if self._reasoning else Delta()
        if self._tools is None:
            return delta
        last = self._counted(self._tools.flush())
        return Delta(delta.text + last.text, delta.reasoning + last.reasoning, delta.calls + last.calls)

    def _find_calls(self, delta: Delta) -> Delta:
        if self._tools is None or not delta.text:
            return delta
        found = self._counted(self._tools.feed(delta.text))
        return Delta(found.text, delta.reasoning + found.reasoning, found.calls)

    def _counted(self, delta: Delta) -> Delta:
        self.completed += sum(call.complete for call in delta.calls)
        return delta if self._separates else Delta(delta.reasoning + delta.text, calls=delta.calls)
