"""Sets of requests as (prompt tokens, output tokens), the same on every run."""

import math
import random
from collections.abc import Callable, Sequence

Request = tuple[int, int]


def uniform(count: int = 256, low: int = 100, high: int = 1024, seed: int = 0) -> list[Request]:
    """Both lengths uniform: the offline set of nano-vllm and mini-sglang."""
    rng = random.Random(seed)
    return [(rng.randint(low, high), rng.randint(low, high)) for _ in range(count)]


def sharegpt_like(count: int = 1000, seed: int = 0) -> list[Request]:
    """Lengths distributed as in ShareGPT conversations: short questions with long answers, and the other way round."""
    rng = random.Random(seed)
    requests: list[Request] = []
    while len(requests) < count:
        if rng.random() < 0.54:
            prompt = rng.lognormvariate(math.log(38), 1.15)
            output = min(rng.lognormvariate(math.log(235), 0.95), rng.uniform(600, 1000))
        else:
            prompt = rng.lognormvariate(math.log(370), 0.75)
            output = rng.lognormvariate(math.log(34), 1.3)
        request = int(prompt), int(output)
        if request[0] <= 1024 and sum(request) <= 2048 and min(request) >= 4:
            requests.append(request)
    return requests


def fixed_output(count: int = 200, seed: int = 0) -> list[Request]:
    """Prompts of 16 to 512 tokens, outputs of 128: what transformers' continuous batching is measured with."""
    return [(prompt, 128) for prompt, _ in uniform(count, 16, 512, seed)]


SETS: dict[str, Callable[..., list[Request]]] = {"uniform": uniform, "sharegpt": sharegpt_like, "fixed": fixed_output}


def prompt_ids(requests: Sequence[Request], vocab_size: int, seed: int = 1) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, vocab_size) for _ in range(length)] for length, _ in requests]
