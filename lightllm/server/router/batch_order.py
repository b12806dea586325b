"""A batch that is all here, of which only the last end counts: in which order it runs, and in steps of what size."""

import math
from collections.abc import Sequence

from lightllm.server.core.messages import GenerateRequest
from lightllm.server.router.output_lengths import EXACT, length_class
from lightllm.server.router.step_limits import StepLimits

STEP_UNIT = 64  # tokens by which the CUDA graphs of steps with prompts differ
LEAST_STEP = 256  # tokens, up to which a step takes little longer than to read the weights
ID_BYTES = 4  # of a packed int32
LEAST_PROMPT = 1  # prompt tokens of a step, however many rows decode: with more it would not fit its graph


def longest_first(requests: Sequence[GenerateRequest]) -> list[GenerateRequest]:
    """By the output that may come, so that no long answer begins late; equal ones keep their order. An open-ended one
    may be the longest of all."""
    return sorted(requests, key=lambda r: math.inf if r.open_ended else _output(r), reverse=True)


def spread(limits: StepLimits, requests: Sequence[GenerateRequest]) -> StepLimits:
    """The smallest steps with decoding rows that end the batch with its longest answer; nobody waits for a token.

    Larger ones would only leave steps with few tokens for later, which take hardly less time. Where outputs may end
    before their limit, nobody knows, and `limits` are left as they are.
    """
    if not requests or any(length_class(r.sampling, r.open_ended) != EXACT for r in requests):
        return limits
    steps = max(map(_output, requests))
    tokens = sum(len(r.prompt_ids) // ID_BYTES + (r.sampling.n or 1) * _output(r) for r in requests)
    even = -(-tokens // (STEP_UNIT * steps)) * STEP_UNIT
    most = min(max(even, LEAST_STEP), limits.total)
    return limits._replace(mixed_total=most, mixed_chunk=min(most, limits.chunk), mixed_least=LEAST_PROMPT)


def _output(request: GenerateRequest) -> int:
    """Tokens of one sample at most."""
    assert request.sampling.max_new_tokens is not None, "sampling parameters must be resolved"
    return request.sampling.max_new_tokens
