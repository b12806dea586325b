"""What requests hold and will hold of the KV pool, and the peak of that in the future.

Time is counted in plans. A request holds `held` rows now and grows by one row a plan until it has grown by `growth`; d
plans later (d = plans in flight - 1) its rows are free. Occupancy only ever falls when a request frees its rows, so its
maximum lies at one of these moments.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


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
