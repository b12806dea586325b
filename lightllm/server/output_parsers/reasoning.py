"""Thoughts before the answer, between two tags: DeepSeek R1, Qwen 3, GLM 4.5 and others."""

from lightllm.server.output_parsers.base import Delta, held_back

THINK, END_THINK = "<think>", "</think>"


class ReasoningParser:
    """Splits one answer into reasoning and text; space around the tags belongs to neither.

    opened: the prompt ends inside the thoughts, so that the answer begins with them.
    """

    def __init__(self, opened: bool):
        self._state = "reasoning" if opened else "before"
        self._pending = ""
        self._space = ""
        self._at_start = True

    def feed(self, text: str) -> Delta:
        self._pending += text
        delta = Delta(calls=[])
        if self._state == "before":
            self._before()
        if self._state == "reasoning":
            self._reasoning(delta)
        if self._state == "text":
            self._text(delta)
        return delta

    def flush(self) -> Delta:
        """Held-back characters; thoughts that were not ended stay thoughts."""
        pending, self._pending = self._pending, ""
        return Delta(reasoning=self._space + pending) if self._state == "reasoning" else Delta(pending)

    def _before(self) -> None:
        start = self._pending.lstrip()
        if start.startswith(THINK):
            self._pending = start[len(THINK) :]
            self._state = "reasoning"
        elif start and not THINK.startswith(start):
            self._state = "text"
            self._at_start = False

    def _reasoning(self, delta: Delta) -> None:
        if self._at_start:
            self._pending = self._pending.lstrip()
            self._at_start = not self._pending
        thoughts, tag, rest = self._pending.partition(END_THINK)
        if tag:
            delta.reasoning = (self._space + thoughts).rstrip()
            self._pending, self._state, self._at_start = rest, "text", True
            return
        keep = len(thoughts) - held_back(thoughts, (END_THINK,))
        shown = self._space + thoughts[:keep]
        delta.reasoning = shown.rstrip()
        self._space = shown[len(delta.reasoning) :]
        self._pending = thoughts[keep:]

    def _text(self, delta: Delta) -> None:
        if self._at_start:
            self._pending = self._pending.lstrip()
            self._at_start = not self._pending
        delta.text, self._pending = self._pending, ""
