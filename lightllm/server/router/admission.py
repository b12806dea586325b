"""Admission: may one more request run without the KV pool ever being short? The exact future peak of KV rows.

Time is counted in plans. A request holds `held` rows now and grows by one row a plan until it has grown by `growth`; d
plans later (d = plans in flight - 1) its rows are free. Occupancy only ever falls when a request frees its rows, so its
maximum lies at one of these moments.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np


class Demand(NamedTuple):
    """What requests hold and will hold; int64 arrays [requests].

    A prompt that is still being computed counts whole in `held`; it grows after between `earliest` and `latest` plans,
    since the tokens left for prompts depend on how many rows decode meanwhile. Both are 0 once a prompt is computed.
    """

    held: np.ndarray
    growth: np.ndarray
    earliest: np.ndarray
    latest: np.ndarray


def future_peak(demand: Demand, late: int) -> int:
    """The most rows held at any future moment if every request runs to its full length.

    `late`: plans for which the rows of an ended request are still held. Exact where no prompt is being computed, else
    an upper bound. O(n log n).
    """
    if len(demand.held) == 0:
        return 0
    grown = demand.earliest + demand.growth
    freed = demand.latest + demand.growth + late
    times = np.concatenate((demand.earliest, grown, freed))
    order = np.argsort(times, kind="stable")
    times = times[order]
    zeros, ones = np.zeros_like(grown), np.ones_like(grown)
    slopes = np.concatenate((ones, -ones, zeros))[order]
    drops = np.concatenate((zeros, zeros, demand.held + demand.growth))[order]
    risen = np.cumsum(np.cumsum(slopes)[:-1] * np.diff(times))
    fallen = np.cumsum(drops)[:-1]
    # Before the first event nothing has risen; at event j all drops before it are gone.
    return int(demand.held.sum() + max(0, (risen - fallen).max(initial=0)))


def prompt_plans(remaining: np.ndarray, chunk: int, budget: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Fewest and most plans until each of the prompts is computed; `remaining` tokens [prompts], in order of service.

    A plan computes at most `budget` tokens, `chunk` of one prompt; decoding rows, at most `rows` - 1, get theirs first.
    """
    share = max(1, budget - rows + 1)  # of all prompts together in a plan, at least
    ahead = np.cumsum(remaining)
    fastest = -(-remaining // min(chunk, budget))
    # A plan that does not give a prompt its whole chunk spends its share on the prompts up to this one.
    slowest = np.minimum(-(-ahead // min(chunk, share)), (ahead - 1) // share + fastest)
    return fastest, slowest


class AdmissionPolicy(Protocol):
    """Decides on the demand of all running requests and the candidates; what it refuses, it refuses with more too."""

    def admits(self, demand: Demand) -> bool: ...

    def peak(self, demand: Demand) -> int: ...


class Conservative:
    """Counts every request at its full length: what is admitted never lacks a slot."""

    def __init__(self, pool_size: int, late: int):
        self._pool_size = pool_size
        self._late = late

    def admits(self, demand: Demand) -> bool:
        return self.peak(demand) <= self._pool_size

    def peak(self, demand: Demand) -> int:
        return future_peak(demand, self._late)
