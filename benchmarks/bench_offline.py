"""Throughput of LLM.generate on a set of requests, random weights of a real shape, greedy, ignoring eos.

python benchmarks/bench_offline.py --shape 8b --set uniform sharegpt [--json out.json] [server flags]
"""

import argparse
import json
import tempfile
import time
from dataclasses import fields
from pathlib import Path

import torch
from arguments import count, results_file
from shapes import SHAPES, VOCAB, write_model

from lightllm import LLM, SamplingParams
from lightllm.server.api_cli import parse_server_args
from lightllm.server.core.server_args import ServerArgs
from lightllm.server.workloads import SETS, Request, prompt_ids


def run(llm: LLM, requests: list[Request]) -> dict[str, float]:
    prompts = prompt_ids(requests, VOCAB)
    params = [SamplingParams(do_sample=False, ignore_eos=True, max_new_tokens=output) for _, output in requests]
    begin = time.perf_counter()
    answers = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    tokens = sum(len(answer.outputs[0].token_ids) for answer in answers)
    assert tokens == sum(output for _, output in requests)
    return dict(
        requests=len(requests),
        prompt_tokens=sum(prompt for prompt, _ in requests),
        output_tokens=tokens,
        seconds=seconds,
        output_tokens_per_s=tokens / seconds,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--set", choices=SETS, nargs="+", default=list(SETS))
    parser.add_argument("--requests", type=count, help="fewer requests than the set has")
    parser.add_argument("--json", type=results_file, help="where to write the results")
    options, server_flags = parser.parse_known_args()
    args = parse_server_args([*server_flags, "--load_format", "random"])
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), options.shape, None, None)
        given = {field.name: getattr(args, field.name) for field in fields(ServerArgs) if field.name != "model_dir"}
        begin = time.perf_counter()
        llm = LLM(folder, **given)
        print(f"ready after {time.perf_counter() - begin:.1f} s", flush=True)
    run(llm, [(64, 16)] * 20)
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    results = {"shape": options.shape, "device": where, "torch": torch.__version__}
    for name in options.set:
        requests = SETS[name](options.requests) if options.requests else SETS[name]()
        result = results[name] = run(llm, requests)
        print(
            f"{options.shape} {name}: {result['output_tokens_per_s']:.0f} output tok/s in {result['seconds']:.1f} s",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
