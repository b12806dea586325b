"""A model of a real shape with random weights under load over HTTP; `lightllm bench` does the same to any server.

    python benchmarks/bench_serving.py --shape 8b --set sharegpt [--rate 20] [--api openai] [server flags]
    python benchmarks/bench_serving.py --shape 8b --interference --decode 1 12

--decode: that many streams of 128 prompt and 512 output tokens; the time of a step, and how long the GPU is at none.
--interference: 64 streams at 1,000 tokens of context decode; what becomes of the time between their tokens while a
prompt of 8,000 is computed.
"""

import argparse
import asyncio
import json
import random
import time
from pathlib import Path

from arguments import count, rate, results_file
from over_http import decode, serving
from shapes import SHAPES, VOCAB

from lightllm.server.bench_serving import Load, Stream, gaps, percentile, summary
from lightllm.server.workloads import SETS


def measure(url: str, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    load = Load(url, VOCAB, options.api)
    load.run([(64, 16)] * 8)
    results, streams = {}, {}
    for batch in options.decode:
        results[f"decode {batch}"] = decode(url, batch)
    if options.interference:
        results["interference"] = asyncio.run(interference(load, 64, 1000, 8000))
    for name in options.set:
        requests = SETS[name](options.requests) if options.requests else SETS[name]()
        begin, streams[name] = load.run(requests, options.rate)
        results[name] = summary(begin, streams[name], options.most_ttft, options.most_tpot)
    for name, result in results.items():
        print(name, ", ".join(f"{key} {value:.4g}" for key, value in result.items()), flush=True)
    if options.png:
        plot(streams, options.png)
    return results


async def interference(load: Load, streams: int, context: int, prompt: int) -> dict[str, float]:
    """Milliseconds between the tokens of `streams` streams: alone, and while a long prompt is computed."""
    rng = random.Random(3)
    running = [await load.start([rng.randrange(3, VOCAB) for _ in range(context)], 600) for _ in range(streams)]
    while any(len(stream.times) < 100 for stream in running):
        await asyncio.sleep(0.01)
    quiet = time.perf_counter()
    await asyncio.sleep(1.0)
    begin = time.perf_counter()
    await load.finished([rng.randrange(3, VOCAB) for _ in range(prompt)], 1)
    end = time.perf_counter()
    idle, busy = gaps(running, quiet, begin), gaps(running, begin, end)
    for stream in running:
        await stream.done
    return dict(idle_p99_ms=percentile(idle, 99), busy_p99_ms=percentile(busy, 99), prompt_ms=1e3 * (end - begin))


def plot(sets: dict[str, list[Stream]], path: Path) -> None:
    """How many of the waits were at most so long, a panel for each kind of wait."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 3, figsize=(13, 4), sharey=True)
    for name, streams in sets.items():
        last = max(stream.times[-1] for stream in streams)
        waits = {
            "to the first token": [1e3 * (s.times[0] - s.sent) for s in streams],
            "for a token, mean of a request": [
                1e3 * (s.times[-1] - s.times[0]) / max(1, s.tokens - 1) for s in streams
            ],
            "between two tokens": gaps(streams, 0.0, last),
        }
        for panel, (what, values) in zip(panels, waits.items()):
            panel.ecdf(values, label=name)
            panel.set(title=what, xlabel="milliseconds", xscale="log")
    panels[0].set_ylabel("share")
    panels[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--set", choices=SETS, nargs="*", default=[])
    parser.add_argument("--requests", type=count, help="fewer requests than the set has")
    parser.add_argument("--rate", type=rate, default=0, help="requests a second; 0: all at once")
    parser.add_argument("--most_ttft", type=float, default=1000, help="milliseconds to the first token, for goodput")
    parser.add_argument("--most_tpot", type=float, default=50, help="milliseconds a token, for goodput")
    parser.add_argument("--api", choices=["lightllm", "openai"], default="lightllm")
    parser.add_argument("--decode", type=count, nargs="*", default=[], help="numbers of streams")
    parser.add_argument("--interference", action="store_true")
    parser.add_argument("--tokenizer_dir", help="tokenizer to serve with; default: a byte tokenizer")
    parser.add_argument("--json", type=results_file, help="where to write the results")
    parser.add_argument("--png", type=results_file, help="where to draw how long tokens were waited for")
    options, server_flags = parser.parse_known_args()
    if options.api == "openai" and not options.tokenizer_dir:
        parser.error("--api openai needs --tokenizer_dir: its events are texts, and few ids are one to bytes")
    with serving(options.shape, server_flags, options.tokenizer_dir) as url:
        results = measure(url, options)
    if options.json:
        options.json.write_text(json.dumps({"shape": options.shape, "flags": server_flags, **results}, indent=1))


if __name__ == "__main__":
    main()
