"""One prompt and some decode steps of a model, without server: does it run, and how long does a step take?

    python test/model/model_infer.py --model_dir ~/models/Qwen3-8B [--batch 1 8] [--prompt 64] [--tokens 16] [flags]

A smoke version of benchmarks/bench_static.py for any checkpoint and device; flags are those of the server.
"""

import argparse
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.arguments import count
from lightllm.distributed.parallel_state import ParallelState
from lightllm.models.model_dir import resolve_model_dir
from lightllm.server.api_cli import parse_server_args
from lightllm.server.core.messages import NewRow, StepPlan, pack
from lightllm.server.core.sampling_params import SamplingParams
from lightllm.server.core.server_args import ServerArgs
from lightllm.server.router.model_infer.model_runner import ModelRunner
from lightllm.utils.device_utils import Platform
from lightllm.utils.start_refused import StartRefused


def step(index: int, starts: list[int], lengths: list[int], slots: np.ndarray, new: list[NewRow]) -> StepPlan:
    decode = not new
    return StepPlan(
        step=index,
        num_decode=len(starts) if decode else 0,
        rows=pack(range(len(starts)), np.int32),
        starts=pack(starts, np.int32),
        lengths=pack(lengths, np.int32),
        samples=pack([1] * len(starts), np.uint8),
        slots=pack(slots, np.int32),
        ended=b"",
        new_rows=new,
    )


def run(runner: ModelRunner, plan: StepPlan) -> None:
    result = runner.launch(plan).result()
    if result.failed:
        sys.exit(result.failed[0][1])
    assert len(result.tokens) == len(plan.rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=count, nargs="+", default=[1, 8])
    parser.add_argument("--prompt", type=count, default=64, help="prompt tokens of each row")
    parser.add_argument("--tokens", type=count, default=16, help="decode steps")
    options, flags = parser.parse_known_args()
    args = parse_server_args(flags)
    if args.tp > 1:
        parser.error("--tp: this runs a model in one process")
    try:
        args = ServerArgs(**vars(args) | {"model_dir": str(resolve_model_dir(args.model_dir))})
        platform = Platform.detect(args.device)
        runner, info = ModelRunner.from_args(args, ParallelState(), platform)
    except (ValueError, OSError, StartRefused) as error:
        parser.error(str(error))
    rows, length = max(options.batch), options.prompt + options.tokens
    if rows > info.running_max_req_size or length > info.max_req_total_len or rows * length > info.max_total_token_num:
        parser.error(f"{rows} rows of {length} tokens are too many: {info}")
    for batch in options.batch:
        slots = np.arange(batch * (options.prompt + options.tokens), dtype=np.int32).reshape(-1, batch)
        params = SamplingParams(do_sample=False, max_new_tokens=options.tokens, ignore_eos=True)
        resolved = params.resolve(info.limits(), options.prompt)
        ids = np.random.default_rng(0).integers(0, info.vocab_size, (batch, options.prompt))
        new = [NewRow(row, 8 * (row + 1), pack(ids[row], np.int32), options.prompt, resolved) for row in range(batch)]
        for attempt in ("cold", "warm"):
            begin = time.perf_counter()
            prompt = slots[: options.prompt].T.reshape(-1)
            run(runner, step(0, [0] * batch, [options.prompt] * batch, prompt, new))
            middle = time.perf_counter()
            for i in range(options.tokens):
                position = options.prompt + i
                run(runner, step(i + 1, [position] * batch, [1] * batch, slots[position], []))
            end = time.perf_counter()
            times = 1e3 * (middle - begin), 1e3 * (end - middle) / options.tokens
            print(f"{info.model_type} on {info.device}, {info.dtype}, {batch} rows, {attempt}: ", end="")
            print(f"prompt of {options.prompt} {times[0]:.1f} ms, a decode step {times[1]:.2f} ms")


if __name__ == "__main__":
    main()
