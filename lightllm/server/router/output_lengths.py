"""OutputLengths: how long the outputs of the recent past were, and how long one of now will be."""

from statistics import NormalDist

import numpy as np

from lightllm.server.core.sampling_params import SamplingParams

WINDOW = 1024  # of the last requests of each kind that were admitted
RESOLUTION = 1024  # steps of probability of a drawn length
PRIOR_SIGMA = 1.0  # of the log of an open-ended output's length, before any has ended
PRIOR_WEIGHT = 64  # outputs that the prior stands for

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
    """The last requests of each kind: those that ended, and as far as they have come those that still run.

    Without the latter, short outputs would be over-represented for as long as the first long ones have not ended.
    Open-ended requests start with a prior, log-normal around `prior_median` tokens.
    """

    def __init__(self, prior_median: int):
        self._lengths: dict[int, np.ndarray] = {}  # by kind, a ring by number of admission; 0: has not ended
        self._admitted: dict[int, int] = {}
        self._sorted: dict[int, np.ndarray] = {}
        normal = NormalDist(np.log(prior_median), PRIOR_SIGMA)
        for i in range(PRIOR_WEIGHT):
            number = self.admit(OPEN_ENDED)
            self.end(OPEN_ENDED, number, round(np.exp(normal.inv_cdf((i + 0.5) / PRIOR_WEIGHT))))

    def admit(self, kind: int) -> int:
        """A request of the kind begins; gives its number, for `end`."""
        number = self._admitted.get(kind, 0)
        self._admitted[kind] = number + 1
        ring = self._lengths.setdefault(kind, np.zeros(WINDOW, np.int64))
        if ring[number % WINDOW]:
            ring[number % WINDOW] = 0
            self._sorted.pop(kind, None)
        return number

    def end(self, kind: int, number: int, length: int) -> None:
        """It has come to its natural end with `length` tokens."""
        if number >= self._admitted[kind] - WINDOW:
            self._lengths[kind][number % WINDOW] = length
            self._sorted.pop(kind, None)

    def predict(self, kinds: np.ndarray, generated: np.ndarray, limits: np.ndarray, luck: np.ndarray) -> np.ndarray:
        """Total output lengths, int64 [scenarios, requests], never above the limits.

        kinds, generated and limits int64 [requests], of all that run and some that may; luck [scenarios, requests] in
        0..1 picks from the lengths of the kind that are longer than `generated`; where no such is known, the limit.
        """
        lengths = np.broadcast_to(limits, luck.shape).copy()
        for kind in np.unique(kinds).tolist():
            if kind not in self._lengths or kind == EXACT:
                continue
            of_kind = (kinds == kind).nonzero()[0]
            past = self._ended(kind)
            # Kaplan-Meier: of those that came as far as an ended one, running ones included, one ended there.
            running = np.sort(generated[of_kind])
            at_risk = np.arange(len(past), 0, -1) + len(running) - np.searchsorted(running, past)
            ended = 1 - np.cumprod(1 - 1 / at_risk)  # share of outputs that are not longer than each of the past ones
            quantiles = np.append(past, np.iinfo(np.int64).max)[
                np.searchsorted(ended, (np.arange(RESOLUTION) + 0.5) / RESOLUTION)
            ]
            passed = np.append(0.0, ended)[np.searchsorted(past, generated[of_kind], side="right")]
            place = passed + luck[:, of_kind] * (1 - passed)
            predicted = quantiles[np.minimum(place * RESOLUTION, RESOLUTION - 1).astype(np.int64)]
            lengths[:, of_kind] = np.maximum(predicted, generated[of_kind] + 1)
        return np.minimum(lengths, limits)

    def _ended(self, kind: int) -> np.ndarray:
        past = self._sorted.get(kind)
        if past is None:
            ring = self._lengths[kind]
            past = self._sorted[kind] = np.sort(ring[ring > 0])
        return past
