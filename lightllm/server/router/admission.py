"""Admission policies: may one more request run without the KV pool ever being short?

They differ in what they believe of the growth of requests. `POLICIES` names them for --schedule_policy.
"""

from abc import ABC, abstractmethod

import numpy as np

from lightllm.server.router.demand import Demand, future_peak, scenario_peaks
from lightllm.server.router.output_lengths import EXACT, OPEN_ENDED, OutputLengths
from lightllm.server.router.request import Request

SCENARIOS = 32
TOLERATED = 1  # of the scenarios may find the pool too small: the 95th percentile of 32 peaks
OPEN_ENDED_OUTPUT = 512  # tokens that an open-ended request is first expected to give
WATERMARK = 0.95  # of the pool, up to which the aggressive policy fills it


class AdmissionPolicy(ABC):
    """Decides on the demand of all running requests and the candidates; what it refuses, it refuses with more too.

    late: plans for which the rows of an ended request are still held. hint_width: entries of a hint.
    """

    hint_width = 0

    def __init__(self, pool_size: int, late: int):
        self._pool_size = pool_size
        self._late = late

    def hint(self, request: Request) -> np.ndarray:
        """What the policy wants to see again of a request whenever it decides: float [hint_width]."""
        return np.empty(self.hint_width)

    @abstractmethod
    def admits(self, demand: Demand) -> bool: ...

    @abstractmethod
    def peak(self, demand: Demand) -> int:
        """The peak that the policy foresees."""

    @abstractmethod
    def admitted(self, request: Request) -> None:
        """A request gets its first row; notes what is expected of it."""

    @abstractmethod
    def ended(self, request: Request, output_tokens: int) -> None:
        """It came to its natural end."""


class Conservative(AdmissionPolicy):
    """Counts every request at its full length: what is admitted never lacks a slot.

    Open-ended requests, whose limit is the whole context, are counted at what they may well give: they can be paused.
    """

    def admits(self, demand: Demand) -> bool:
        return self.peak(demand) <= self._pool_size

    def peak(self, demand: Demand) -> int:
        expected = np.maximum(OPEN_ENDED_OUTPUT, 2 * demand.generated)
        lengths = np.where(demand.kinds == OPEN_ENDED, expected, demand.limit)
        return future_peak(demand._replace(growth=demand.if_outputs_are(lengths, self._late)), self._late)

    def admitted(self, request: Request) -> None:
        request.expected = min(request.limit, OPEN_ENDED_OUTPUT) if request.open_ended else request.limit

    def ended(self, request: Request, output_tokens: int) -> None:
        pass


class Aggressive(Conservative):
    """Fills the pool up to a watermark with what is held now: for comparison."""

    def admits(self, demand: Demand) -> bool:
        return demand.now <= WATERMARK * self._pool_size

    def peak(self, demand: Demand) -> int:
        return demand.now


class PastFuture(AdmissionPolicy):
    """Draws the output lengths from those of the recent past and admits what fits in nearly all of the scenarios.

    Each request keeps its luck, one uniform number per scenario, so that its predicted length moves only as it grows:
    fresh draws at every step would admit on the first lucky one. Seeded.
    """

    hint_width = SCENARIOS

    def __init__(self, pool_size: int, late: int):
        super().__init__(pool_size, late)
        self._random = np.random.default_rng(0)
        self._lengths = OutputLengths(OPEN_ENDED_OUTPUT)

    def hint(self, request: Request) -> np.ndarray:
        return self._random.random(SCENARIOS)

    def admits(self, demand: Demand) -> bool:
        if demand.now > self._pool_size:
            return False
        if demand.most <= self._pool_size:
            return True
        if np.count_nonzero(self._peaks(demand) > self._pool_size) <= TOLERATED:
            return True
        # The peaks of scenarios are bounds: what fits for certain may still seem too much.
        return future_peak(demand, self._late) <= self._pool_size

    def peak(self, demand: Demand) -> int:
        return int(np.sort(self._peaks(demand))[-1 - TOLERATED])

    def admitted(self, request: Request) -> None:
        if request.kind == EXACT:
            request.expected = request.limit
            return
        kind, none, limit = np.array([[request.kind], [0], [request.limit]])
        request.expected = int(self._lengths.predict(kind, none, limit, request.hint[:, None]).mean())
        request.number = self._lengths.admit(request.kind)

    def ended(self, request: Request, output_tokens: int) -> None:
        if request.kind != EXACT:
            self._lengths.end(request.kind, request.number, output_tokens)

    def _peaks(self, demand: Demand) -> np.ndarray:
        lengths = self._lengths.predict(demand.kinds, demand.generated, demand.limit, demand.hints.T)
        return scenario_peaks(demand, demand.if_outputs_are(lengths, self._late), self._late)


POLICIES: dict[str, type[AdmissionPolicy]] = {
    "past_future": PastFuture,
    "conservative": Conservative,
    "aggressive": Aggressive,
}
