"""Synthetic requests with published length statistics: arrival, prompt ids, limit, and the output that each would give.

Sources: the quantiles of ShareGPT, and the scheduling traces of the Past-Future and Andes papers, with a KV capacity of
120,000 tokens in mind (less and more ties all policies).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lightllm.server.workloads import sharegpt_like

EOS, WORD = 1, 2  # ids of the last and of every other output token; prompts use larger ones
VOCAB = 100_000


@dataclass(eq=False)
class SimulatedRequest:
    """arrival: seconds from the start; of a later turn, seconds after the end of the turn before."""

    arrival: float
    prompt: np.ndarray  # int32
    limit: int
    output: int  # tokens that it would give
    follow_up: SimulatedRequest | None = None

    def with_history(self, before: SimulatedRequest) -> SimulatedRequest:
        """This turn behind what was said before it."""
        words = np.full(before.output, WORD, np.int32)
        words[-1] = EOS
        prompt = np.concatenate((before.prompt, words, self.prompt))
        return SimulatedRequest(self.arrival, prompt, self.limit, self.output, self.follow_up)


def make_trace(name: str, count: int, seed: int, rate: float) -> list[SimulatedRequest]:
    """count requests, or conversations, that arrive `rate` a second (Poisson); the same lengths for every rate."""
    rng = np.random.default_rng([seed, 1])
    arrivals = np.cumsum(np.random.default_rng([seed, 2]).exponential(1.0, count)) / rate
    if name == "sharegpt_multi_turn":
        return [_conversation(rng, arrival) for arrival in arrivals.tolist()]
    prompts, outputs, limit = LENGTHS[name](rng, count)
    return [
        SimulatedRequest(arrival, _prompt(rng, int(prompt)), limit, min(int(output), limit))
        for arrival, prompt, output in zip(arrivals.tolist(), prompts, outputs)
    ]


def _conversation(rng: np.random.Generator, arrival: float) -> SimulatedRequest:
    """About 5.4 turns; the next message comes some seconds after an answer."""
    turns = int(rng.geometric(1 / 5.4))
    rest = None
    for turn in reversed(range(turns)):
        median, sigma = (np.exp(4.364), 1.389) if turn == 0 else (np.exp(3.449), 1.473)
        message = _prompt(rng, int(_log_normal(rng, 1, median, sigma, 1, 4000)[0]))
        output = int(_from_quantiles(rng, FIRST_OUTPUT if turn == 0 else LATER_OUTPUT))
        rest = SimulatedRequest(arrival if turn == 0 else rng.exponential(THINKING), message, 2048, output, rest)
    assert rest is not None
    return rest


THINKING = 5.0  # seconds between an answer and the next message, in the mean
QUANTILES = (0.05, 0.10, 0.25, 0.50, 0.75, 0.90, 0.95, 0.99)
FIRST_OUTPUT = (36, 67, 245, 471, 682, 871, 937, 1003)
LATER_OUTPUT = (46, 88, 226, 404, 615, 822, 915, 997)


def _from_quantiles(rng: np.random.Generator, values: tuple[int, ...]) -> float:
    """Interpolated in log space."""
    return float(np.exp(np.interp(rng.random(), QUANTILES, np.log(values))))


def _log_normal(rng: np.random.Generator, count: int, median: float, sigma: float, least: int, most: int) -> np.ndarray:
    return np.clip(rng.lognormal(np.log(median), sigma, count), least, most).astype(np.int64)


def _prompt(rng: np.random.Generator, length: int) -> np.ndarray:
    return rng.integers(WORD + 1, VOCAB, length, dtype=np.int32)


def _long_output(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray, int]:
    return _log_normal(rng, count, 120, 1.1, 8, 4000), _log_normal(rng, count, 1500, 0.9, 50, 8000), 8192


def _decode_heavy(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray, int]:
    return rng.integers(32, 4097, count), rng.integers(2048, 4097, count), 4096


def _prefill_heavy(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray, int]:
    return rng.integers(2048, 4097, count), rng.integers(32, 4097, count), 4096


def _sharegpt(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray, int]:
    """The first two messages, as serving benchmarks use them."""
    prompts, outputs = np.array(sharegpt_like(count, seed=int(rng.integers(2**31)))).T
    return prompts, outputs, 2048


LENGTHS = {
    "long_output": _long_output,
    "decode_heavy": _decode_heavy,
    "prefill_heavy": _prefill_heavy,
    "sharegpt": _sharegpt,
}
TRACES = (*LENGTHS, "sharegpt_multi_turn")
