"""Chat templates that requests bring: programs of strangers, each run in a process of its own with bounds."""

import json
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from lightllm.server.chat_template import ChatTemplate, TemplateFailed

SECONDS = 5  # of the processor, for one prompt
MEMORY = 1 << 30  # bytes of the process
MAX_CHARACTERS = 16 << 20  # of a prompt
REFUSED = 3  # exit status: what was written is not a prompt but the reason why there is none


class RequestTemplate:
    """A stranger's ChatTemplate, which is read only when it is rendered."""

    takes_system = True

    def __init__(self, source: str):
        self.source = source
        self.knows_tools = "tools" in source

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """As ChatTemplate.render; starting the process takes a tenth of a second.

        Raises TemplateFailed also for a template that is none, that takes too long, or that writes too much.
        """
        asked = json.dumps([self.source, messages, tools, add_generation_prompt, variables]).encode()
        command = [sys.executable, "-m", __name__, str(SECONDS)]
        try:
            done = subprocess.run(command, input=asked, capture_output=True, timeout=4 * SECONDS)
        except subprocess.TimeoutExpired:
            raise TemplateFailed(f"the chat template takes more than {SECONDS} s") from None
        if done.returncode == REFUSED:
            raise TemplateFailed(done.stdout.decode())
        if done.returncode:
            raise TemplateFailed(f"the chat template takes more than {SECONDS} s or {MEMORY >> 20} MiB")
        return done.stdout.decode()


def main(seconds: int) -> int:
    """Renders what standard input asks for to standard output; gives the exit status."""
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    source, *conversation = json.load(sys.stdin.buffer)
    try:
        written, status = _bounded(ChatTemplate(source).render(*conversation)), 0
    except TemplateFailed as error:
        written, status = str(error).encode(errors="replace"), REFUSED
    sys.stdout.buffer.write(written)
    return status


def _bounded(text: str) -> bytes:
    if len(text) > MAX_CHARACTERS:
        raise TemplateFailed(f"the chat template writes {len(text)} characters; at most {MAX_CHARACTERS}")
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise TemplateFailed("the chat template writes half a character") from None


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
