"""transformers on random weights of a real shape: generate at some batch sizes, and its continuous batching.

    python benchmarks/bench_transformers.py --shape 8b --batch 1 12 [--continuous] [--json out.json]

generate has the dynamic cache and sdpa and is timed per decode step behind prompts of 128 tokens; generate_batch
computes the set `fixed`. `bench_serving.py --decode 1 12 --set fixed` is the same over HTTP by us.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
import transformers
from arguments import count, results_file
from over_http import PROMPT
from shapes import SHAPES, VOCAB, write_model

from lightllm.server.workloads import SETS, Request, prompt_ids

REPEATS = 3


def milliseconds_per_step(model, batch: int, new_tokens: int) -> float:
    """Of generate: the time of `new_tokens` less the time of one; the median of several, for the host decides."""
    ids = torch.randint(3, VOCAB, (batch, PROMPT), device=model.device)

    def timed(n: int) -> float:
        torch.cuda.synchronize() if ids.is_cuda else None
        start = time.perf_counter()
        model.generate(ids, max_new_tokens=n, min_new_tokens=n, do_sample=False, attention_mask=torch.ones_like(ids))
        torch.cuda.synchronize() if ids.is_cuda else None
        return time.perf_counter() - start

    timed(2)
    return statistics.median(1e3 * (timed(new_tokens) - timed(1)) / (new_tokens - 1) for _ in range(REPEATS))


def tokens_per_second(model, requests: list[Request]) -> float:
    """Of continuous batching, from when the first request begins to run to when the last ends: warming up is over."""
    outputs = {output for _, output in requests}
    settings = dict(max_new_tokens=outputs.pop(), do_sample=False, eos_token_id=-1, pad_token_id=0)
    config = transformers.GenerationConfig(**settings)
    answers = list(model.generate_batch(prompt_ids(requests, VOCAB), generation_config=config).values())
    tokens = sum(len(answer.generated_tokens) for answer in answers)
    if tokens != sum(output for _, output in requests):
        raise SystemExit(f"generate_batch gave {tokens} tokens: {answers[0].error if answers else 'no answers'}")
    return tokens / (max(a.lifespan[1] for a in answers) - min(a.lifespan[0] for a in answers))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--batch", type=count, nargs="*", default=[1, 12])
    parser.add_argument("--tokens", type=count, default=24, help="tokens that generate makes")
    parser.add_argument("--continuous", action="store_true", help="also generate_batch")
    parser.add_argument("--requests", type=count, default=200, help="of generate_batch")
    parser.add_argument("--json", type=results_file, help="where to write the results")
    options = parser.parse_args()
    if options.tokens < 2:
        parser.error("--tokens must be at least 2: the first is the prompt's")
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), options.shape, None, None)
        config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    results: dict = {"shape": options.shape, "transformers": transformers.__version__, "generate_ms": {}}
    for batch in options.batch:
        results["generate_ms"][batch] = milliseconds_per_step(model, batch, options.tokens)
        print(f"{options.shape}, generate at batch {batch}: {results['generate_ms'][batch]:.2f} ms a step", flush=True)
    if options.continuous:
        results["generate_batch_tokens_per_s"] = tokens_per_second(model, SETS["fixed"](options.requests))
        print(f"{options.shape}, generate_batch: {results['generate_batch_tokens_per_s']:.0f} output tok/s", flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
