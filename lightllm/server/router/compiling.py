"""Compiling: requests that wait until every worker has compiled their grammar, beside the steps of all others."""

from collections.abc import Callable

from lightllm.server.core.messages import Compiled, CompileRequest, GenerateRequest

PATIENCE = 30.0  # seconds for one grammar; those that no library should be asked to compile are refused by the front


class Compiling:
    """ranks: how many workers compile. tell: sends each of them a message. `now` is seconds of the caller's clock."""

    def __init__(self, ranks: int, tell: Callable[[CompileRequest], None]):
        self._ranks = ranks
        self._tell = tell
        self._waiting: dict[int, tuple[GenerateRequest, float]] = {}  # by request id, the first to be given up first
        self._ready: dict[int, int] = {}  # ranks that have compiled

    def add(self, request: GenerateRequest, now: float) -> None:
        assert request.sampling.guided_grammar is not None, "only requests with a grammar wait"
        self._waiting[request.id] = (request, now + PATIENCE)
        self._ready[request.id] = 0
        self._tell(CompileRequest(request.id, request.sampling.guided_grammar))

    def take(self, compiled: Compiled) -> GenerateRequest | None:
        """The request, once it may start or a worker cannot use its grammar; None if there is still one to wait for."""
        if compiled.id not in self._waiting:
            return None
        self._ready[compiled.id] += 1
        if not compiled.failure and self._ready[compiled.id] < self._ranks:
            return None
        return self._forget(compiled.id)

    def abort(self, request_id: int) -> None:
        """Nothing happens if it does not wait."""
        if request_id in self._waiting:
            self._forget(request_id)

    def overdue(self, now: float) -> list[GenerateRequest]:
        """Those that wait no longer."""
        return [self._forget(id) for id, (_, until) in list(self._waiting.items()) if until <= now]

    def time_left(self, now: float) -> float | None:
        """Seconds until one is overdue; None while nobody waits."""
        return next((max(0.0, until - now) for _, until in self._waiting.values()), None)

    def _forget(self, request_id: int) -> GenerateRequest:
        del self._ready[request_id]
        return self._waiting.pop(request_id)[0]
