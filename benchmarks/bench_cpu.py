"""The embedded model on this CPU: the real server over HTTP against transformers generate, in turns.

    python benchmarks/bench_cpu.py [--data_type fp32 bf16] [--new_tokens 64] [--rounds 5]

Prints for each data type the tokens per second of one request at a time (ours and transformers') and of 16 at once, and
the two ratios that count: single stream ours / transformers, and 16 at once / single stream. Medians over the rounds.
"""

import argparse
import json
import random
import statistics
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import transformers
from arguments import count
from over_http import served

from lightllm.models.model_dir import resolve_model_dir

PROMPT = 32
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def generate(url: str, prompt: list[int], new_tokens: int) -> int:
    """Tokens of one answer."""
    parameters = {"max_new_tokens": new_tokens, "ignore_eos": True, "do_sample": False, "return_details": True}
    body = json.dumps({"inputs": prompt, "parameters": parameters}).encode()
    request = urllib.request.Request(f"{url}/generate", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return len(json.load(answer)["tokens"])


def tokens_per_second(url: str, prompts: list[list[int]], new_tokens: int) -> float:
    """All prompts at once."""
    with ThreadPoolExecutor(len(prompts)) as threads:
        start = time.perf_counter()
        counts = list(threads.map(lambda prompt: generate(url, prompt, new_tokens), prompts))
        seconds = time.perf_counter() - start
    if counts != [new_tokens] * len(prompts):
        raise SystemExit(f"answers of {counts} tokens instead of {new_tokens}")
    return sum(counts) / seconds


def transformers_tokens_per_second(model, prompt: list[int], new_tokens: int) -> float:
    ids = torch.tensor([prompt])
    start = time.perf_counter()
    model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False
    )
    return new_tokens / (time.perf_counter() - start)


def measure(model_dir: Path, data_type: str, new_tokens: int, rounds: int, concurrency: int) -> dict[str, float]:
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=DTYPES[data_type]).eval()
    rng = random.Random(0)
    prompts = [[rng.randrange(3, model.config.vocab_size) for _ in range(PROMPT)] for _ in range(concurrency)]
    flags = ["--device", "cpu", "--data_type", data_type, "--log_level", "warning"]
    runs: dict[str, list[float]] = {"single": [], "transformers": [], "concurrent": []}
    with served(model_dir, flags) as url:
        for i in range(rounds + 1):  # the first round warms up
            single = tokens_per_second(url, prompts[:1], new_tokens)
            theirs = transformers_tokens_per_second(model, prompts[0], new_tokens)
            concurrent = tokens_per_second(url, prompts, new_tokens)
            if i:
                for name, value in zip(runs, (single, theirs, concurrent)):
                    runs[name].append(value)
    return {name: statistics.median(values) for name, values in runs.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data_type", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--new_tokens", type=count, default=64)
    parser.add_argument("--rounds", type=count, default=5)
    parser.add_argument("--concurrency", type=count, default=16)
    parser.add_argument("--model_dir", help="instead of the embedded model")
    options = parser.parse_args()
    try:
        model_dir = resolve_model_dir(options.model_dir)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(f"{model_dir.name}, {torch.get_num_threads()} threads, torch {torch.__version__}, {PROMPT} prompt tokens,")
    print(f"{options.new_tokens} new tokens, transformers {transformers.__version__}; tokens per second, medians")
    many = f"{options.concurrency} at once"
    print(f"        single   transformers   {many:>10}   single/transformers   {many}/single")
    for data_type in options.data_type:
        r = measure(model_dir, data_type, options.new_tokens, options.rounds, options.concurrency)
        print(
            f"{data_type}  {r['single']:8.1f} {r['transformers']:14.1f} {r['concurrent']:12.1f}"
            f" {r['single'] / r['transformers']:21.2f} {r['concurrent'] / r['single']:{len(many) + 10}.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
