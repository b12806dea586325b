"""Admission: may one more request run without the KV pool ever being short? The future peak of KV rows.

Time is counted in plans. A request holds `held` rows now and grows by one row a plan until it has grown by `growth`; d
plans later (d = plans in flight - 1) its rows are free. Occupancy only ever falls when a request frees its rows, so its
maximum lies at one of these moments. What the policies differ in is what they believe of `growth`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lightllm.server.router.output_lengths import EXACT, OPEN_ENDED, OutputLengths
from lightllm.server.router.request import Request

SCENARIOS = 32
TOLERATED = 1  # of the scenarios may find the pool too small: the 95th percentile of 32 peaks
OPEN_ENDED_OUTPUT = 512  # tokens that an open-ended request is first expected to give
WATERMARK = 0.95  # of the pool, up to which the aggressive policy fills it


class Demand(NamedTuple):
    """What requests hold and will hold; int64 arrays [requests].

    held: without the shared prefixes. growth: if each comes to its limit. A prompt that is still being computed counts
    whole in `held`; it grows after between `earliest` and `latest` plans, since the tokens left for prompts depend on
    how many rows decode meanwhile. Both are 0 once a prompt is computed.
    shared: prefixes of several requests: their rows, and indices of the requests, of which the last to end frees them.
    generated and limit: output tokens, until now and at most. kinds: of output length. hints float [requests, *]: what
    the policy's `hint` gave.
    """

    held: np.ndarray
    growth: np.ndarray
    earliest: np.ndarray
    latest: np.ndarray
    shared: Sequence[tuple[int, np.ndarray]]
    generated: np.ndarray
    limit: np.ndarray
    kinds: np.ndarray
    hints: np.ndarray

    @property
    def now(self) -> int:
        """Rows held at this moment, or soon for prompts that are being computed."""
        return int(self.held.sum()) + sum(length for length, _ in self.shared)

    @property
    def most(self) -> int:
        """Rows held if nobody ended before all have grown: a bound that costs nothing."""
        return self.now + int(self.growth.sum())

    def if_outputs_are(self, lengths: np.ndarray, late: int) -> np.ndarray:
        """`growth` for total output lengths [..., requests] instead of the limits.

        A row that ends before its limit has been planned on for `late` plans when its end is known.
        """
        return np.clip(self.growth - self.limit + lengths + late, 0, self.growth)


def future_peak(demand: Demand, late: int) -> int:
    """The most rows held at any future moment if every request grows by its `growth`.

    `late`: plans for which the rows of an ended request are still held. Exact where no prompt is being computed, else
    an upper bound. O(n log n).
    """
    if len(demand.held) == 0:
        return 0
    ends = demand.latest + demand.growth
    prefix_lengths = np.array([length for length, _ in demand.shared], np.int64)
    prefix_ends = np.array([ends[holders].max() for _, holders in demand.shared], np.int64)
    grown = demand.earliest + demand.growth
    times = np.concatenate((demand.earliest, grown, ends + late, prefix_ends + late))
    order = np.argsort(times, kind="stable")
    times = times[order]
    zeros, ones = np.zeros_like(grown), np.ones_like(grown)
    slopes = np.concatenate((ones, -ones, zeros, np.zeros_like(prefix_ends)))[order]
    drops = np.concatenate((zeros, zeros, demand.held + demand.growth, prefix_lengths))[order]
    risen = np.cumsum(np.cumsum(slopes)[:-1] * np.diff(times))
    fallen = np.cumsum(drops)[:-1]
    # Before the first event nothing has risen; at event j all drops before it are gone.
    return int(demand.now + max(0, (risen - fallen).max(initial=0)))


def scenario_peaks(demand: Demand, growth: np.ndarray, late: int) -> np.ndarray:
    """The future peak in each of several scenarios, int64 [scenarios]; growth int64 [scenarios, requests].

    Requests sorted by their ends, the last first: when the k-th ends, those up to it are held, each grown as long. An
    upper bound that is a few rows too high where prompts are computed or ends coincide; it costs a third of the exact
    peak. (Past-Future scheduling, ASPLOS'25.)
    """
    ends = growth + demand.latest + late
    held = np.broadcast_to(demand.held, ends.shape)
    growing = np.ones(ends.shape[1], np.int64)
    if demand.shared:
        prefix_ends = np.stack([ends[:, holders].max(axis=1) for _, holders in demand.shared], axis=1)
        prefix_lengths = np.array([length for length, _ in demand.shared], np.int64)
        ends = np.concatenate((ends, prefix_ends), axis=1)
        held = np.concatenate((held, np.broadcast_to(prefix_lengths, prefix_ends.shape)), axis=1)
        growing = np.concatenate((growing, np.zeros_like(prefix_lengths)))
    order = np.argsort(-ends, axis=1)
    ends = np.take_along_axis(ends, order, axis=1)
    alive_held = np.cumsum(np.take_along_axis(held, order, axis=1), axis=1)
    alive_growing = np.cumsum(growing[order], axis=1)
    return (alive_held + alive_growing * ends).max(axis=1, initial=0)


class StepLimits(NamedTuple):
    """Tokens that a step has at most.

    total: of all sequences. chunk: of one prompt. mixed_total, mixed_chunk: the same of a step with decoding rows,
    which has room for mixed_least prompt tokens however many rows decode.
    """

    total: int
    chunk: int
    mixed_total: int
    mixed_chunk: int
    mixed_least: int

    def beside(self, decoding: int) -> int:
        """Prompt tokens of a step in which so many rows decode."""
        return min(self.total - decoding, max(self.mixed_total - decoding, self.mixed_least))


def prompt_plans(remaining: np.ndarray, limits: StepLimits, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Fewest and most plans until each of the prompts is computed; `remaining` tokens [prompts], in order of service.

    rows: all that run, of which all but one may decode; those get their tokens first.
    """
    fastest = -(-remaining // min(limits.chunk, limits.total))
    # What a plan has for all prompts together, and for one of them, at least.
    share, least = limits.total, min(limits.chunk, limits.total)
    if rows > 1:
        share = max(1, limits.beside(rows - 1))
        least = min(least, limits.mixed_chunk)
    ahead = np.cumsum(remaining)
    # A plan that does not give a prompt so much spends its share on the prompts up to this one.
    slowest = np.minimum(-(-ahead // min(least, share)), (ahead - 1) // share - (-remaining // least))
    return fastest, slowest


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
