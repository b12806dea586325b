"""Compiling: requests that wait until every worker has compiled their grammar, beside the steps of all others."""

from collections import OrderedDict
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from itertools import count

from lightllm.server.core.messages import Compiled, CompileRequest, ForgetRequest, GenerateRequest

NUM_UNUSED = 64  # grammars that workers keep although no request has them


@dataclass
class _Asked:
    """A grammar that is being compiled. missing: ranks that have not done so. requests: who wait, by request id."""

    grammar: str
    missing: int
    requests: dict[int, GenerateRequest] = field(default_factory=dict)


class Compiling:
    """Says which grammars the workers keep: those of requests that wait or run, and the last ones of others.

    ranks: how many workers compile. most: sequences that may wait here. tell: sends each worker a message. used: the
    grammars of all requests that no longer wait here.
    """

    def __init__(
        self,
        ranks: int,
        most: int,
        tell: Callable[[CompileRequest | ForgetRequest], None],
        used: Callable[[], Container[str]],
    ):
        self._ranks, self._most = ranks, most
        self._tell, self._used = tell, used
        self._counter = count()
        self._keys: OrderedDict[str, int] = OrderedDict()  # of all that the workers keep, in the order of last use
        self._asked: dict[int, _Asked] = {}  # by key, until all ranks have compiled it

    @property
    def waiting(self) -> int:
        """How many sequences."""
        return sum(request.sampling.n or 1 for asked in self._asked.values() for request in asked.requests.values())

    def needs(self, request: GenerateRequest) -> bool:
        """Whether the request must be added here, before it may start."""
        grammar = request.sampling.guided_grammar
        if not grammar:
            return False
        if grammar in self._keys:
            self._keys.move_to_end(grammar)
        return self._keys.get(grammar) is None or self._keys[grammar] in self._asked

    def add(self, request: GenerateRequest) -> str | None:
        """Why it may not wait, if too many do."""
        grammar = request.sampling.guided_grammar
        assert grammar, "only requests with a grammar wait"
        if (waiting := self.waiting) and waiting + (request.sampling.n or 1) > self._most:
            return f"{waiting} sequences wait for their grammar; the queue holds {self._most} (--max_queue)"
        if grammar not in self._keys:
            self._forget_unused()
            key = self._keys[grammar] = next(self._counter)
            self._asked[key] = _Asked(grammar, self._ranks)
            self._tell(CompileRequest(key, grammar))
        self._asked[self._keys[grammar]].requests[request.id] = request
        return None

    def take(self, compiled: Compiled) -> list[GenerateRequest]:
        """The requests that may start, or whose grammar a worker cannot use."""
        asked = self._asked.get(compiled.key)
        if asked is None:  # a worker has failed before, or all who wanted it have gone
            return []
        asked.missing -= 1
        if compiled.failure:
            self._forget(asked.grammar)
        elif asked.missing:
            return []
        del self._asked[compiled.key]
        return list(asked.requests.values())

    def abort(self, request_id: int) -> None:
        """Forgets it, if it waits, and its grammar, if nobody else waits for that."""
        for key, asked in self._asked.items():
            if asked.requests.pop(request_id, None) and not asked.requests:
                del self._asked[key]
                self._forget(asked.grammar)
                return

    def _forget_unused(self) -> None:
        if len(self._keys) - len(self._asked) <= NUM_UNUSED:
            return
        used = self._used()
        unused = [grammar for grammar, key in self._keys.items() if key not in self._asked and grammar not in used]
        for grammar in unused[:-NUM_UNUSED]:
            self._forget(grammar)

    def _forget(self, grammar: str) -> None:
        self._tell(ForgetRequest(self._keys.pop(grammar)))
