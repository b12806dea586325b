"""Everything that the table of docs/performance.md is made of, in one run on one GPU.

python benchmarks/report.py run OUT [--only static offline-8b ...]  # 6 minutes; a part writes OUT/<part>.json
python benchmarks/report.py table OUT --json benchmarks/results/report_h200.json --commit 1a2b3c4
"""

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from arguments import need_gpu, results_file

ROOT = Path(__file__).parents[1]
PARTS = {  # name -> what python runs in the root
    "static": "benchmarks/bench_static.py --shape 8b 3b 1b --prompt 1024 8192 32768",
    "static-4k": "benchmarks/bench_static.py --shape 8b --batch 192 --context 4096 --prompt",
    "static-4k-int8": "benchmarks/bench_static.py --shape 8b --batch 192 --context 4096 --prompt --llm_kv_type int8kv",
    "offline-8b": "benchmarks/bench_offline.py --shape 8b --set uniform sharegpt",
    "offline-1b": "benchmarks/bench_offline.py --shape 1b --set uniform sharegpt",
    "serving-8b": "benchmarks/bench_serving.py --shape 8b --decode 1 12 --interference --set sharegpt",
    "serving-1b": "benchmarks/bench_serving.py --shape 1b --decode 1 12 256 --set uniform fixed",
    "transformers-8b": "benchmarks/bench_transformers.py --shape 8b --batch 1 12",
    "transformers-1b": "benchmarks/bench_transformers.py --shape 1b --batch 1 12 --continuous",
    "attention": "-m benchmarks.kernels.bench_token_attention",
}
Found = dict[str, Any]
Find = Callable[[Found], float]


def run(out: Path, only: list[str]) -> int:
    """How many parts failed."""
    out.mkdir(parents=True, exist_ok=True)
    failed = 0
    for name in only:
        begin, path = time.perf_counter(), (out / f"{name}.json").absolute()
        code = subprocess.call([sys.executable, *PARTS[name].split(), "--json", str(path)], cwd=ROOT)
        print(f"{name}: exit {code} after {time.perf_counter() - begin:.0f} s", flush=True)
        failed += code != 0
    return failed


def step(shape: str, batch: int, context: int, key: str = "step_ms", part: str = "static") -> Find:
    def find(found: Found) -> float:
        rows = found[part][shape]["decode"]
        return next(row[key] for row in rows if (row["batch"], row["context"]) == (batch, context))

    return find


def prompt(length: int) -> Find:
    return lambda found: next(x["fraction"] for x in found["static"]["8b"]["prompt"] if x["prompt"] == length)


def attention(head_dim: int, case: str, kv: str = "plain", key: str = "microseconds") -> Find:
    def find(found: Found) -> float:
        cases = found["attention"]["cases"]
        return next(c[key] for c in cases if (c["head_dim"], c["case"], c["kv"]) == (head_dim, case, kv))

    return find


def offline(shape: str, name: str) -> Find:
    return lambda found: found[f"offline-{shape}"][name]["output_tokens_per_s"]


def served(shape: str, what: str, key: str = "output_tokens_per_s") -> Find:
    return lambda found: found[f"serving-{shape}"][what][key]


def idle(streams: int) -> Find:
    return served("1b", f"decode {streams}", "idle")


def than_generate(shape: str, batch: int) -> Find:
    theirs: Find = lambda found: found[f"transformers-{shape}"]["generate_ms"][str(batch)]
    return ratio(theirs, served(shape, f"decode {batch}", "ms_per_step"))


def ratio(above: Find, below: Find) -> Find:
    return lambda found: above(found) / below(found)


def than_generate_batch(found: Found) -> float:
    return served("1b", "fixed")(found) / found["transformers-1b"]["generate_batch_tokens_per_s"]


def of_rate(head_dim: int) -> Find:
    return attention(head_dim, "256 x 2048", key="share")


def int8(head_dim: int) -> Find:
    return ratio(attention(head_dim, "64 x 4096"), attention(head_dim, "64 x 4096", "int8"))


EVEN, SKEWED = "64 x 2048", "1 x 32768, 63 x 1560"  # as many tokens
AT_4K = step("8b", 192, 4096, part="static-4k"), step("8b", 192, 4096, part="static-4k-int8")
# row, what, needed, aim (below needed where less is better), how to find it
TABLE: list[tuple[str, str, float, float, Find]] = [
    ("1", "batch 1 at 256 tokens of context, 8B, ms", 4.3, 3.8, step("8b", 1, 256)),
    ("1", "… 3B", 2.0, 1.7, step("3b", 1, 256)),
    ("1", "… 1B", 0.95, 0.75, step("1b", 1, 256)),
    ("2", "8B at 1k, batch 16, share of the limit", 0.75, 0.9, step("8b", 16, 1024, "fraction")),
    ("2", "… batch 64", 0.75, 0.9, step("8b", 64, 1024, "fraction")),
    ("2", "… batch 256", 0.75, 0.9, step("8b", 256, 1024, "fraction")),
    ("2", "1B at 256 tokens of context, batch 64, ms", 1.5, 1.2, step("1b", 64, 256)),
    ("2", "… batch 256", 2.7, 2.2, step("1b", 256, 256)),
    ("3", "256 requests, U(100, 1024) in and out, offline, tok/s: 1B", 54e3, 61e3, offline("1b", "uniform")),
    ("3", "… 8B", 10.2e3, 11.6e3, offline("8b", "uniform")),
    ("4", "1,000 ShareGPT-like requests, tok/s: 8B offline", 13e3, 18e3, offline("8b", "sharegpt")),
    ("4", "… 8B over HTTP", 11.7e3, 17e3, served("8b", "sharegpt")),
    ("4", "… 1B offline", 45e3, 70e3, offline("1b", "sharegpt")),
    ("5", "decode attention, share of the read rate, head_dim 128", 0.92, 0.95, of_rate(128)),
    ("5", "… head_dim 64", 0.9, 0.93, of_rate(64)),
    ("5", "… one row of 32k among 64, over 64 of 2k", 1.2, 1.08, ratio(attention(128, SKEWED), attention(128, EVEN))),
    ("6", "int8 cache, times as fast: attention at head_dim 128", 1.5, 1.85, int8(128)),
    ("6", "… at head_dim 64", 1.4, 1.75, int8(64)),
    ("6", "… a step of 8B, batch 192 at 4k", 1.35, 1.6, ratio(*AT_4K)),
    ("7", "prompt of 1k, 8B, share of the limit", 0.8, 0.9, prompt(1024)),
    ("7", "… of 8k", 0.8, 0.9, prompt(8192)),
    ("7", "… of 32k", 0.65, 0.8, prompt(32768)),
    ("8", "1B, 256 streams over HTTP, share of the time the GPU idles", 0.05, 0.01, idle(256)),
    ("8", "1B, row 3 over HTTP ÷ offline", 0.9, 0.95, ratio(served("1b", "uniform"), offline("1b", "uniform"))),
    ("9", "1B over HTTP, times as fast as generate: batch 1", 15, math.nan, than_generate("1b", 1)),
    ("9", "… batch 12", 15, math.nan, than_generate("1b", 12)),
    ("9", "8B over HTTP, times as fast as generate: batch 1", 15, math.nan, than_generate("8b", 1)),
    ("9", "… batch 12", 15, math.nan, than_generate("8b", 12)),
    ("9", "1B over HTTP, 200 requests, times as fast as generate_batch", 4, math.nan, than_generate_batch),
    ("10", "64 streams of 8B at 1k, p99 between tokens: while 8k are computed ÷ alone", 3, 2,
     ratio(served("8b", "interference", "busy_p99_ms"), served("8b", "interference", "idle_p99_ms"))),
]  # fmt: skip


def table(found: Found) -> str:
    """In Markdown, of the parts that were run."""
    lines = ["| # | what | needed | aim | reached | |", "|---|---|---|---|---|---|"]
    for number, what, needed, aim, of in TABLE:
        try:
            value = of(found)
        except (KeyError, StopIteration):
            continue
        reached = value <= needed if aim < needed else value >= needed
        bounds = " | ".join("" if math.isnan(bound) else _number(bound) for bound in (needed, aim))
        lines.append(f"| {number} | {what} | {bounds} | {_number(value)} | {'' if reached else '**short**'} |")
    return "\n".join(lines)


def _number(x: float) -> str:
    return f"{x:,.0f}" if x >= 1000 else f"{x:.3g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("do", choices=["run", "table"])
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", choices=PARTS, nargs="+", default=list(PARTS))
    parser.add_argument("--commit", help="of what was run")
    parser.add_argument("--json", type=results_file, help="table: where to write all results")
    options = parser.parse_args()
    if options.do == "run":
        need_gpu(parser)
        sys.exit(run(options.out, options.only) and 1)
    found = {name: json.loads(path.read_text()) for name in PARTS if (path := options.out / f"{name}.json").exists()}
    if not found:
        parser.error(f"{options.out} holds no results")
    print(table(found))
    if options.json:
        options.json.write_text(json.dumps({"commit": options.commit, **found}, indent=1))


if __name__ == "__main__":
    main()
