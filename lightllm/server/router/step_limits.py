"""StepLimits: how many tokens a step may have, and how many plans prompts take with that."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lightllm.server.core.messages import EngineInfo
from lightllm.server.core.server_args import ServerArgs

MIXED_CHUNKS = 4  # as many tokens a step beside decoding rows has: with more, streams stand still for as long


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

    @classmethod
    def of(cls, args: ServerArgs, engine: EngineInfo) -> StepLimits:
        """As the flags say."""
        total = args.batch_max_tokens
        chunk = min(args.prompt_chunk(engine.on_gpu), total)
        if args.tpot_slo is not None:  # Pace shapes steps with decoding rows
            return cls(total, chunk, total, chunk, chunk)
        mixed = min(chunk, args.mixed_prefill_size)
        return cls(total, chunk, min(total, MIXED_CHUNKS * args.mixed_prefill_size), mixed, mixed)

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
