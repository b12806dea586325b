"""Compiling: requests that wait until every worker has compiled their grammar, beside the steps of all others."""

from collections import OrderedDict
from collections.abc import Callable

from lightllm.server.core.messages import Compiled, CompileRequest, GenerateRequest

NUM_KNOWN = 64  # grammars; workers keep four times as many


class Compiling:
    """ranks: how many workers compile. most: sequences that may wait here. tell: sends each worker a message."""

    def __init__(self, ranks: int, most: int, tell: Callable[[CompileRequest], None]):
        self._ranks, self._most = ranks, most
        self._tell = tell
        self._waiting: dict[int, GenerateRequest] = {}  # by request id
        self._missing: dict[int, int] = {}  # ranks that have not compiled it
        self._known: OrderedDict[str | None, None] = OrderedDict()  # grammars of all ranks, in the order of last use

    @property
    def waiting(self) -> int:
        """How many sequences."""
        return sum(request.sampling.n or 1 for request in self._waiting.values())

    def needs(self, request: GenerateRequest) -> bool:
        """Whether the request must be added here, before it may start."""
        grammar = request.sampling.guided_grammar
        if grammar not in self._known:
            return bool(grammar)
        self._known.move_to_end(grammar)
        return False

    def add(self, request: GenerateRequest) -> str | None:
        """Why it may not wait, if too many do."""
        assert request.sampling.guided_grammar, "only requests with a grammar wait"
        if self._waiting and self.waiting + (request.sampling.n or 1) > self._most:
            return f"{self.waiting} sequences wait for their grammar; the queue holds {self._most} (--max_queue)"
        self._waiting[request.id] = request
        self._missing[request.id] = self._ranks
        self._tell(CompileRequest(request.id, request.sampling.guided_grammar))
        return None

    def take(self, compiled: Compiled) -> GenerateRequest | None:
        """The request, once it may start or a worker cannot use its grammar; None if there is still one to wait for."""
        if compiled.id not in self._waiting:  # a worker has failed before, or the client has gone
            return None
        self._missing[compiled.id] -= 1
        if not compiled.failure:
            if self._missing[compiled.id]:
                return None
            self._known[self._waiting[compiled.id].sampling.guided_grammar] = None
            if len(self._known) > NUM_KNOWN:
                self._known.popitem(last=False)
        return self.abort(compiled.id)

    def abort(self, request_id: int) -> GenerateRequest | None:
        """Forgets it, if it waits."""
        self._missing.pop(request_id, None)
        return self._waiting.pop(request_id, None)
