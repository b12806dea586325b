"""Candidates: which of the waiting requests may have a row now."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile

import numpy as np

from lightllm.common.kv_cache_mem_manager.radix_cache import Node
from lightllm.server.core.messages import request_of
from lightllm.server.router.admission import AdmissionPolicy
from lightllm.server.router.demand import Demand
from lightllm.server.router.request import Request
from lightllm.server.router.row_table import RowTable
from lightllm.server.router.step_limits import StepLimits, prompt_plans
from lightllm.server.router.waiting_queue import WaitingQueue

TWIN_TOKENS = 256  # of a prefix that are worth waiting for, or one chunk of them
LOOK_AHEAD = 16  # requests behind one that does not fit, of which the smallest may pass
MAX_PASSED = 32  # times that a request may be passed
MOST_STEPS = 1.1  # that prompts with rows fill: more of them would only be in the way of who comes and goes first


@dataclass(frozen=True, slots=True)
class Candidate:
    """A waiting request, the node at which its longest known prefix ends, and the prefix's length."""

    request: Request
    node: Node
    cached: int

    @property
    def size(self) -> int:
        """KV rows that it may come to hold."""
        return self.request.prompt_len + self.request.limit


class _Prompts:
    """fill_them: whether nothing but these prompts fits into the next steps, be they with decoding rows or without."""

    def __init__(self, limits: StepLimits, steps: float, missing: np.ndarray):
        """missing: tokens of each prompt that are still to be computed."""
        self._most = steps * limits.chunk, steps * limits.mixed_chunk  # of one prompt
        self._room = [steps * limits.total, steps * limits.mixed_total]
        self._room = [room - np.minimum(missing, most).sum() for room, most in zip(self._room, self._most)]

    def add(self, missing: int) -> None:
        self._room = [room - min(missing, most) for room, most in zip(self._room, self._most)]

    @property
    def fill_them(self) -> bool:
        return max(self._room) <= 0


class Candidates:
    """Looks at the queue and the rows; changes neither, but notes in the waiting requests what it found and who passed
    them. `limits` are those of the steps to come."""

    def __init__(self, queue: WaitingQueue, rows: RowTable, limits: StepLimits):
        self._queue = queue
        self._rows = rows
        self.limits = limits
        self._window = min(limits.chunk, TWIN_TOKENS)

    def admissible(self, policy: AdmissionPolicy, early: bool = False) -> list[Candidate]:
        """Those that the policy admits together: from the head of the queue, and perhaps one that passes its new head.

        early: also those whose prompts must wait for others'.
        One more never lowers the peak, so few counts need a look: one where none fits, two where all do.
        """
        if not early and self._prompts(steps=1).fill_them:
            return []
        walk = self._walk(early)

        def refused(count: int) -> bool:
            return not self._admits(policy, seen[:count])

        seen = list(islice(walk, 1))
        if not seen:
            return []
        fitting = 0
        if not refused(1):
            seen += walk
            fitting = 1 + bisect_left(range(2, len(seen)), True, key=refused) if refused(len(seen)) else len(seen)
        admitted, behind = seen[:fitting], seen[fitting:]
        if behind and fitting < self._rows.free_count:
            behind += islice(walk, max(0, LOOK_AHEAD + 1 - len(behind)))
            admitted += self._passing(policy, admitted, behind[: LOOK_AHEAD + 1])
        return admitted

    def _passing(self, policy: AdmissionPolicy, admitted: list[Candidate], waiting: list[Candidate]) -> list[Candidate]:
        """The smallest of those behind the first, which does not fit, if it fits. Paused requests are never passed."""
        head = waiting[0]
        passable = list(takewhile(lambda c: not c.request.paused and c.request.passed < MAX_PASSED, waiting))
        places = [
            place
            for place, candidate in enumerate(waiting[: len(passable) + 1])
            if candidate.size < head.size and candidate.request.priority == head.request.priority
        ]
        if not places:
            return []
        place = min(places, key=lambda place: waiting[place].size)
        if not self._admits(policy, [*admitted, waiting[place]]):
            return []
        for passed in waiting[:place]:
            passed.request.passed += 1
        return [waiting[place]]

    def _admits(self, policy: AdmissionPolicy, candidates: list[Candidate]) -> bool:
        # One request alone always fits, whatever a policy thinks of it.
        alone = len(candidates) == 1 and self._rows.free_count == len(self._rows)
        return alone or policy.admits(self.demand(candidates))

    def match(self, request: Request) -> Candidate:
        """What the cache knows of it now."""
        cache = self._rows.cache
        if not request.uses_cache or request.scores_prompt:
            return Candidate(request, cache.root, 0)
        last = request.match or (cache.root, 0)
        # The last id is computed in any case, for its logits.
        request.match = node, cached = cache.match_again(request.ids[:-1], *last)
        return Candidate(request, node, cached)

    def _walk(self, early: bool) -> Iterator[Candidate]:
        """The queue in the order of service, as far as there are rows and room for prompts in the next steps, without
        new ones that wait for a twin.

        A twin computes a prefix that the cache will have after one of the next plans: to wait costs less than to
        compute it again.
        """
        computed = set()
        for row, request in self._rows.prefilling.items():
            if self._rows.extends[row]:
                computed |= self._twin_keys(request, int(self._rows.planned[row]))
        left, prompts = self._rows.free_count, self._prompts(MOST_STEPS)
        for request in self._queue:
            if left == 0 or (prompts.fill_them and not early):
                return
            candidate = self.match(request)
            if request.uses_cache:
                keys = self._twin_keys(request, candidate.cached)
                if not (request.scores_prompt or request.paused or computed.isdisjoint(keys)):
                    continue
                computed |= keys
            left -= 1
            prompts.add(len(request.ids) - candidate.cached)
            yield candidate

    def _prompts(self, steps: float) -> _Prompts:
        """Those with rows, beside the next `steps` steps."""
        rows = list(self._rows.prefilling)
        return _Prompts(self.limits, steps, self._rows.known[rows] - self._rows.planned[rows])

    def _twin_keys(self, request: Request, start: int) -> set[tuple[int, bytes]]:
        """Two requests whose keys meet would compute the same ids, the first of which is at `start`."""
        keys = set()
        missing = len(request.ids) - 1 - start
        if missing >= self._window:
            keys.add((start, request.ids[start : start + self._window].tobytes()))
        if missing > 0 and not request.generated:
            keys.add((request_of(request.sequence_id), b"a sample of the same prompt"))
        return keys

    def demand(self, candidates: Sequence[Candidate] = ()) -> Demand:
        """What the running rows, those leaving, and the candidates hold and will hold."""
        rows = self._rows
        prefilling = np.array(list(rows.prefilling), np.int64)
        settled = rows.alive.copy()
        settled[prefilling] = False
        decoding, leaving = settled.nonzero()[0], rows.leaving
        gone = np.zeros(len(leaving), np.int64)
        requests = [candidate.request for candidate in candidates]
        columns = [(len(request.ids), request.generated, request.limit, request.kind) for request in requests]
        known, generated, limit, kinds = np.array(columns, np.int64).reshape(-1, 4).T
        uncached = known - np.array([candidate.cached for candidate in candidates], np.int64)
        remaining = np.concatenate((rows.known[prefilling] - rows.planned[prefilling], uncached))
        num_running = len(rows.at) + len(candidates)
        earliest, latest = prompt_plans(remaining, self.limits, num_running)
        now = np.zeros(len(decoding) + len(leaving), np.int64)
        order = np.concatenate((decoding, leaving, prefilling))
        held = np.concatenate((rows.planned[decoding], rows.planned[leaving], rows.known[prefilling], known))
        growth = (
            rows.limit[decoding] - rows.sampled[decoding],
            gone,
            # The last chunk samples a token, which needs no slot of its own yet.
            rows.limit[prefilling] - rows.sampled[prefilling] - 1,
            limit - generated - 1,
        )
        hints = np.array([request.hint for request in requests]).reshape(len(requests), rows.hints.shape[1])
        return Demand(
            held=held,
            growth=np.concatenate(growth),
            earliest=np.concatenate((now, earliest)),
            latest=np.concatenate((now, latest)),
            shared=self._shared(held, order, candidates),
            generated=np.concatenate((rows.sampled[decoding], gone, rows.sampled[prefilling], generated)),
            limit=np.concatenate((rows.limit[decoding], gone, rows.limit[prefilling], limit)),
            kinds=np.concatenate((rows.kinds[order], kinds)),
            hints=np.concatenate((rows.hints[order], hints)),
        )

    def _shared(
        self, held: np.ndarray, rows: np.ndarray, candidates: Sequence[Candidate]
    ) -> list[tuple[int, np.ndarray]]:
        """Takes the prefixes of several requests out of what each holds; gives their rows and the requests' indices.

        Nodes one behind the other that the same requests use, as the chunks of a prompt, are one prefix: whoever uses a
        node uses those above it, so that as many are the same.
        """
        position = np.empty(len(self._rows), np.int64)
        position[rows] = np.arange(len(rows))
        users: dict[Node, list[int]] = {node: [] for node in self._rows.cache.shared}
        for i, candidate in enumerate(candidates, start=len(rows)):
            for node in candidate.node.path():
                users.setdefault(node, []).append(i)
        counts = {node: len(node.holders) + len(asking) for node, asking in users.items()}
        tops: dict[Node, Node] = {}  # the first node of a prefix, by each
        lengths: dict[Node, int] = {}  # of prefixes, by their first node
        for node in sorted((node for node, count in counts.items() if count > 1), key=lambda node: node.end):
            above = node.parent
            top = tops[node] = tops[above] if above in tops and counts[above] == counts[node] else node
            lengths[top] = lengths.get(top, 0) + len(node)
        shared = []
        for top, length in lengths.items():
            holders = np.concatenate((position[list(top.holders)], np.array(users[top], np.int64)))
            held[holders] -= length
            shared.append((length, holders))
        return shared
