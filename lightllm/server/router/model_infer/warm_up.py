"""Steps that are run before a GPU serves: the largest that the flags allow, to see how much memory a step takes, and
small ones, so that no request waits for the compilation of a kernel."""

from collections.abc import Iterator

import numpy as np

from lightllm.server.core.messages import NewRow, StepPlan, pack
from lightllm.server.core.sampling_params import MAX_LOGPROBS, SamplingParams
from lightllm.server.core.server_args import ServerArgs

DECODE_POSITION = 4096  # decode rows stand here, or at the context's end
SMALL_CHUNKS = (1, 17, 65)  # tokens of a prompt for which attention has tiles of their own


def largest_step(args: ServerArgs, rows: int, max_len: int) -> StepPlan:
    """As many rows and tokens as a step may have."""
    decode = min(rows, args.batch_max_tokens) - 1
    chunk = min(args.prompt_chunk(on_gpu=True), max_len)
    left = args.batch_max_tokens - decode
    chunks: list[int] = []
    while left and len(chunks) < rows:
        chunks.append(min(left, chunk))
        left -= chunks[-1]
    return _plan(min(decode, rows - len(chunks)), chunks, max_len)


def small_steps(args: ServerArgs, rows: int, max_len: int) -> Iterator[StepPlan]:
    """One prompt of each kind of length beside as many decoding rows as there is room for, one at most."""
    longest = min(args.batch_max_tokens, args.prompt_chunk(on_gpu=True), max_len)
    for chunk in (chunk for chunk in SMALL_CHUNKS if chunk <= longest):
        yield _plan(min(1, rows - 1, args.batch_max_tokens - chunk), [chunk], max_len)


def _plan(decode: int, chunks: list[int], max_len: int) -> StepPlan:
    """A step with every costly wish; all tokens share KV slot 0."""
    lengths = [1] * decode + chunks
    starts = [min(max_len, DECODE_POSITION) - 1] * decode + [0] * len(chunks)
    sampling = SamplingParams(
        temperature=1.0,
        top_k=50,
        top_p=0.9,
        min_p=0.01,
        seed=0,
        repetition_penalty=1.1,
        logprobs=MAX_LOGPROBS,
        prompt_logprobs=MAX_LOGPROBS,
    )
    return StepPlan(
        step=0,
        num_decode=decode,
        rows=pack(range(len(lengths)), np.int32),
        starts=pack(starts, np.int32),
        lengths=pack(lengths, np.int32),
        samples=pack([1] * len(lengths), np.uint8),
        slots=pack([0] * sum(lengths), np.int32),
        ended=b"",
        new_rows=[NewRow(row, 0, pack([0] * n, np.int32), n, sampling) for row, n in enumerate(lengths)],
    )
