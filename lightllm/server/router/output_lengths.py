"""OutputLengths: how long the outputs of the recent past were, and how long one of now will be."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np

from lightllm.server.core.sampling_params import SamplingParams

WINDOW = 1024  # lengths remembered of each kind
ENOUGH = 64  # with fewer, requests are counted at their limit
PRIOR_SIGMA = 1.0  # of the log of an open-ended output's length, before any has ended

# Kinds of requests whose lengths are alike: OPEN_ENDED, EXACT, or the bit length of max_new_tokens.
OPEN_ENDED = 0
EXACT = 64  # nothing but its limit ends it


def length_class(sampling: SamplingParams, open_ended: bool) -> int:
    """The kind of a resolved request."""
    if open_ended:
        return OPEN_ENDED
    if not sampling.stop_token_ids and not sampling.stop_sequences:
        return EXACT
    return int(sampling.max_new_tokens or 0).bit_length()


class OutputLengths:
    """One history of each kind. Open-ended requests start with a prior, log-normal around `prior_median` tokens."""

    def __init__(self, prior_median: int):
        self._ring: dict[int, np.ndarray] = {}
        self._count: dict[int, int] = {}
        self._sorted: dict[int, np.ndarray] = {}
        normal = NormalDist(np.log(prior_median), PRIOR_SIGMA)
        for i in range(ENOUGH):
            self.add(OPEN_ENDED, round(np.exp(normal.inv_cdf((i + 0.5) / ENOUGH))))

    def add(self, kind: int, length: int) -> None:
        if kind == EXACT:
            return
        ring = self._ring.setdefault(kind, np.empty(WINDOW, np.int64))
        count = self._count.get(kind, 0)
        ring[count % WINDOW] = length
        self._count[kind] = count + 1
        self._sorted.pop(kind, None)

    def predict(self, kinds: np.ndarray, generated: np.ndarray, limits: np.ndarray, luck: np.ndarray) -> np.ndarray:
        """Total output lengths, int64 [scenarios, requests], never above the limits.

        kinds, generated and limits int64 [requests]; luck [scenarios, requests] in 0..1 picks from the lengths of the
        kind that are longer than `generated`. Where there is none, or too few in all, the limit is taken.
        """
        lengths = np.broadcast_to(limits, luck.shape).copy()
        for kind in np.unique(kinds).tolist():
            if self._count.get(kind, 0) < ENOUGH:
                continue
            of_kind = np.flatnonzero(kinds == kind)
            past = self._sorted_lengths(kind)
            passed = np.searchsorted(past, generated[of_kind], side="right")
            longer = len(past) - passed
            place = passed + (luck[:, of_kind] * longer).astype(np.int64)
            predicted = past[np.minimum(place, len(past) - 1)]
            lengths[:, of_kind] = np.where(longer > 0, predicted, limits[of_kind])
        return np.minimum(lengths, limits)

    def _sorted_lengths(self, kind: int) -> np.ndarray:
        past = self._sorted.get(kind)
        if past is None:
            past = self._sorted[kind] = np.sort(self._ring[kind][: self._count[kind]])
        return past
