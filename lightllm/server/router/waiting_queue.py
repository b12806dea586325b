"""WaitingQueue: who goes next. Paused requests first, then by priority, then by client and arrival."""

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field

from lightllm.server.router.request import Request

INPUT_WEIGHT = 1.0  # of a prompt token that is computed, for what a client has been served
OUTPUT_WEIGHT = 2.0
MAX_CLIENTS = 10_000  # remembered, beyond those that wait


@dataclass(slots=True, eq=False)
class _Client:
    """served: weighted tokens, the virtual counter. line: its waiting requests by rank."""

    served: float = 0.0
    line: list[Request] = field(default_factory=list)


def _rank(request: Request, served: float = 0.0) -> tuple[bool, int, float, float, int]:
    """Smaller goes first. served: what its client was, among several. `due` is the same for all without a time to
    meet."""
    return not request.paused, -request.priority, served, request.due, request.arrival


class WaitingQueue:
    """`fair`: clients take turns by the tokens that they were served (virtual token counters, OSDI'24), so that the
    flood of one does not delay the others; else all are one client.
    """

    def __init__(self, fair: bool):
        self.fair = fair
        self._clients: dict[str, _Client] = {}
        self._last_to_leave = _Client()  # whose line was the last to empty
        self._due: list[tuple[float, int, Request]] = []  # heap; those that no longer wait are skipped
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Request]:
        """In the order of service, were each served its prompt; the queue must not change meanwhile."""
        if not self.fair:
            for client in self._clients.values():
                yield from client.line
            return
        waiting = [client for client in self._clients.values() if client.line]
        heads = [(_rank(client.line[0], client.served), client.served, 0, client) for client in waiting]
        heapq.heapify(heads)
        while heads:
            _, served, place, client = heapq.heappop(heads)
            yield client.line[place]
            served += INPUT_WEIGHT * len(client.line[place].ids)
            if place + 1 < len(client.line):
                heapq.heappush(heads, (_rank(client.line[place + 1], served), served, place + 1, client))

    def add(self, request: Request) -> None:
        client = self._client(request)
        if not client.line:
            others = [other.served for other in self._clients.values() if other.line]
            client.served = max(client.served, min(others, default=self._last_to_leave.served))
        insort(client.line, request, key=_rank)
        self._size += 1
        if request.due != float("inf") and not request.paused:
            heapq.heappush(self._due, (request.due, request.arrival, request))

    def remove(self, request: Request) -> None:
        """To be called before anything of the request changes."""
        client = self._client(request)
        place = bisect_left(client.line, _rank(request), key=_rank)
        assert client.line[place] is request
        del client.line[place]
        self._size -= 1
        if not client.line:
            self._last_to_leave = client

    def overdue(self, now: float) -> list[Request]:
        """Those that waited so long that they would miss their time; they are still in the queue."""
        late = []
        while self._due and self._due[0][0] < now:
            request = heapq.heappop(self._due)[2]
            if self._waits(request) and not request.paused:
                late.append(request)
        return late

    def served(self, request: Request, prompt_tokens: int = 0, output_tokens: int = 0) -> None:
        """Counts what the request's client was given."""
        if self.fair:
            self._client(request).served += INPUT_WEIGHT * prompt_tokens + OUTPUT_WEIGHT * output_tokens

    def _waits(self, request: Request) -> bool:
        line = self._client(request).line
        place = bisect_left(line, _rank(request), key=_rank)
        return place < len(line) and line[place] is request

    def _client(self, request: Request) -> _Client:
        name = request.client if self.fair else ""
        client = self._clients.get(name)
        if client is None:
            if len(self._clients) >= MAX_CLIENTS:
                self._clients = {name: client for name, client in self._clients.items() if client.line}
            client = self._clients[name] = _Client()
        return client
