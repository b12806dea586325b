"""The admission policies on simulated traces: the server's own Scheduler, a model of the GPU's time, no GPU.

    python benchmarks/bench_scheduler.py [--traces long_output ...] [--policies past_future ...]
        [--loads 0.3 1.5 0.05] [--seeds 3] [--requests 2000]

`oracle` knows the true output lengths, `reserved` keeps room for every request at its full length; the others are
those of --schedule_policy. A load of 1 is the rate, in requests per second, up to which the oracle meets the times of
at least 90 % of the requests (10 s to the first token, 1.5 s between two). Goodput: output tokens per second of the
requests that met theirs. All policies run with the same --ttft_slo, so that past saturation each refuses what it
cannot serve in time.

Prints what a step costs, then a table per trace, and writes results/scheduler.json and results/scheduler.png, where
what was measured before of other traces, policies and loads is kept.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
from arguments import count, results_folder
from sim.simulator import TTFT_SLO, Oracle, Outcome, Reserved, Simulation, StepModel
from sim.traces import TRACES, make_trace

from lightllm.server.core.messages import EngineInfo, GenerateRequest, StepResult, pack, unpack
from lightllm.server.core.sampling_params import SamplingParams
from lightllm.server.core.server_args import ServerArgs
from lightllm.server.router.admission import POLICIES
from lightllm.server.router.scheduler import Scheduler

CAPACITY = 120_000
PLANS = 2
NAMES = ("oracle", *POLICIES, "reserved")
HIGHEST_RATE = 102.4  # requests per second
RESULTS = Path(__file__).parent / "results"


def simulate(trace: str, policy: str, rate: float, seed: int, requests: int, capacity: int = CAPACITY) -> Outcome:
    """One run of a trace at `rate` requests per second."""
    outputs: dict[int, int] = {}
    scheduler = make_scheduler(policy, outputs, capacity)
    return Simulation(scheduler, StepModel(), outputs).run(make_trace(trace, requests, seed, rate))


def make_scheduler(policy: str, outputs: dict[int, int], capacity: int) -> Scheduler:
    """outputs: true output lengths by sequence id, which the oracle looks at."""
    late = PLANS - 1
    rules = {**POLICIES, "reserved": Reserved, "oracle": partial(Oracle, outputs=outputs)}
    args = ServerArgs(chunked_prefill_size=2048, mixed_prefill_size=8192, max_queue=10**9, ttft_slo=TTFT_SLO)
    return Scheduler(args, engine(capacity, rows=512), PLANS, rules[policy](capacity, late))


def engine(capacity: int, rows: int) -> EngineInfo:
    return EngineInfo("simulated", "bfloat16", "simulated", 1 << 31, [], capacity, 100_000, rows)


def best_rate(pool: ProcessPoolExecutor, trace: str, requests: int) -> float | None:
    """The highest rate at which the oracle meets the times of 90 % of the requests, to 3 %; None if so few requests
    meet them at any rate."""
    met = partial(_met, trace, requests)
    high = HIGHEST_RATE
    if met(high):
        return None
    while not met(high / 2):
        high /= 2
    low = high / 2
    while high > 1.03 * low:
        rates = np.geomspace(low, high, 7)[1:-1].tolist()
        first_missed = [*pool.map(met, rates), False].index(False)
        low, high = [low, *rates][first_missed], [*rates, high][first_missed]
    return low


def _met(trace: str, requests: int, rate: float) -> bool:
    return simulate(trace, "oracle", rate, 0, requests).attainment >= 0.9


def sweep(
    pool: ProcessPoolExecutor, trace: str, policies: list[str], loads: list[float], seeds: int, requests: int
) -> list[dict]:
    """One entry for each policy and load, the mean of the seeds; of more requests if so few are no load."""
    while (rate := best_rate(pool, trace, requests // 2)) is None:
        requests *= 2
    print(f"\n{trace}: a load of 1 is {rate:.2f} requests/s, {requests} requests", flush=True)
    cases = [(policy, load, seed) for policy in policies for load in loads for seed in range(seeds)]
    run = partial(_run, trace, rate, requests)
    outcomes: dict[tuple[str, float], list[Outcome]] = {}
    for (policy, load, _), outcome in zip(cases, pool.map(run, cases)):
        outcomes.setdefault((policy, load), []).append(outcome)
    return [
        {
            "trace": trace,
            "policy": policy,
            "load": round(load, 3),
            "requests_per_s": round(load * rate, 4),
            "requests": requests,
            "seeds": seeds,
            "goodput": mean(o.goodput for o in each),
            "attainment": mean(o.attainment for o in each),
            "paused_share": mean(o.paused_share for o in each),
            "memory_use": mean(o.memory_use for o in each),
            "p99_tbt_s": mean(o.p99_tbt_s for o in each),
        }
        for (policy, load), each in outcomes.items()
    ]


def merged(before: list[dict], new: list[dict]) -> list[dict]:
    """Both, where the new takes the place of the same trace, policy and load."""
    entries = {(TRACES.index(e["trace"]), NAMES.index(e["policy"]), e["load"]): e for e in (*before, *new)}
    return [entries[key] for key in sorted(entries)]


def _run(trace: str, rate: float, requests: int, case: tuple[str, float, int]) -> Outcome:
    policy, load, seed = case
    return simulate(trace, policy, load * rate, seed, requests)


def mean(values: Iterable[float]) -> float:
    return round(statistics.fmean(values), 5)


def table(entries: list[dict]) -> None:
    """Each policy at its best load with 90 % attainment, and its goodput past saturation beside the others'."""
    by_policy: dict[str, list[dict]] = {}
    for e in entries:
        by_policy.setdefault(e["policy"], []).append(e)
    best = {}
    for name, own in by_policy.items():
        enough = [e for e in own if e["attainment"] >= 0.9] or [min(own, key=lambda e: e["load"])]
        best[name] = max(enough, key=lambda e: e["goodput"])
    past = {name: min(own, key=lambda e: abs(e["load"] - 1.3)) for name, own in by_policy.items()}
    top = max(e["goodput"] for e in best.values())
    print(f"{'policy':14}{'load':>6}{'goodput':>9}{'/best':>9}{'paused':>8}{'memory':>8}{'p99 tbt':>9}{'at 1.3':>9}")
    for name, e in best.items():
        print(
            f"{name:14}{e['load']:6.2f}{e['goodput']:9.0f}{e['goodput'] / top:9.3f}"
            f"{e['paused_share']:8.2%}{e['memory_use']:8.2%}{e['p99_tbt_s']:8.4f}s{past[name]['goodput']:9.0f}",
            flush=True,
        )


def plot(entries: list[dict], path: Path) -> None:
    """Goodput and paused share against load, a column for each trace."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    traces = list(dict.fromkeys(e["trace"] for e in entries))
    figure, axes = pyplot.subplots(2, len(traces), figsize=(4.2 * len(traces), 6.4), squeeze=False, sharex=True)
    for column, trace in enumerate(traces):
        for name in NAMES:
            own = [e for e in entries if (e["trace"], e["policy"]) == (trace, name)]
            loads = [e["load"] for e in own]
            axes[0, column].plot(loads, [e["goodput"] for e in own], marker=".", label=name)
            axes[1, column].plot(loads, [100 * e["paused_share"] for e in own], marker=".", label=name)
        axes[0, column].set_title(trace)
        axes[1, column].set_xlabel("load (1: the oracle's best)")
    axes[0, 0].set_ylabel("goodput, tokens/s")
    axes[1, 0].set_ylabel("pauses per 100 requests")
    axes[0, 0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def step_cost(waiting: int, capacity: int) -> float:
    """Median milliseconds of schedule() and update() together with 256 rows and a queue that cannot empty."""
    return 1e3 * statistics.median(step_seconds(waiting, capacity, ending=(waiting > 0) / 500))


def step_seconds(waiting: int, capacity: int, ending: float, prompt_cache: bool = True) -> list[float]:
    """Of 1,000 steps; `ending`: the share of the rows that end in each. No prompt has a prefix of another."""
    args = ServerArgs(
        chunked_prefill_size=2048,
        mixed_prefill_size=8192,
        max_queue=10**6,
        disable_dynamic_prompt_cache=not prompt_cache,
    )
    scheduler = Scheduler(args, engine(capacity, rows=256), PLANS)
    sampling = SamplingParams(n=1, max_new_tokens=2500, stop_token_ids=[1])
    for number in range(1, 257 + waiting):
        ids = pack(np.arange(400) + 1000 * number, np.int32)
        scheduler.add(GenerateRequest(number << 3, ids, sampling, False))
    rng = np.random.default_rng(0)
    seconds, flying = [], []
    for _ in range(1200):
        start = time.perf_counter()
        while plan := scheduler.schedule():
            flying.append(plan)
        scheduled = time.perf_counter()
        plan = flying.pop(0)
        rows = unpack(plan.rows, np.int32)[unpack(plan.samples, np.uint8) == 1]
        tokens = np.where(rng.random(len(rows)) < ending, 1, 5).astype(np.int32)
        result = StepResult(plan.step, rows.tobytes(), tokens.tobytes(), bytes(4 * len(rows)), [], [], [])
        received = time.perf_counter()
        scheduler.update(result)
        scheduler.take_output()
        seconds.append(time.perf_counter() - received + scheduled - start)
    return seconds[200:]


def cache_cost() -> None:
    """Match and insert of a long prompt; what the cache costs a step at no hits; hits of a multi-turn replay."""
    from lightllm.common.kv_cache_mem_manager.radix_cache import COMPUTED, RadixCache
    from lightllm.common.kv_cache_mem_manager.token_pool import TokenPool

    rng = np.random.default_rng(0)
    pool = TokenPool(400_000)
    cache = RadixCache(pool)
    prompts = [rng.integers(0, 100_000, 8192, dtype=np.int32) for _ in range(40)]

    def match_and_insert(prompt: np.ndarray) -> None:
        node, length = cache.match(prompt)
        cache.hold(node, 0)
        slots = pool.alloc(len(prompt) - length)
        assert slots is not None
        child = cache.extend(node, 0, prompt[length:], slots, COMPUTED) if len(slots) else node
        assert child is not None
        cache.let_go(child, 0)

    print(f"match + insert of a new 8k prompt: {1e3 * timed(match_and_insert, prompts):.3f} ms")
    print(f"match of a known 8k prompt: {1e3 * timed(match_and_insert, prompts):.3f} ms")
    costs = [statistics.fmean(step_seconds(1600, 200_000, 1 / 200, cached)) for cached in (True, False)]
    more = costs[0] - costs[1]
    share = more / StepModel().seconds(256, 200_000, 512)
    print(f"the cache without hits: {1e6 * more:.1f} us a step, {share:.2%} of an 8B step")
    outcome = simulate("sharegpt_multi_turn", "past_future", 1.0, 0, 400, capacity=4_000_000)
    hits = outcome.load.cached_prompt_tokens_total / perfect_hits(400)
    print(f"multi-turn replay of 400 conversations: {hits:.2%} of the hits of an endless cache")


def perfect_hits(conversations: int) -> int:
    """Prompt tokens that were seen before: all of a conversation but its last token, which nobody computes."""
    hits = 0
    for turn in make_trace("sharegpt_multi_turn", conversations, 0, 1.0):
        while turn.follow_up:
            before, turn = turn, turn.follow_up.with_history(turn)
            hits += len(before.prompt) + before.output - 1
    return hits


def timed(function: Callable[[np.ndarray], None], arguments: list[np.ndarray]) -> float:
    """Median seconds of a call."""
    seconds = []
    for argument in arguments:
        start = time.perf_counter()
        function(argument)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", nargs="*", default=list(TRACES), choices=TRACES)
    parser.add_argument("--policies", nargs="*", default=list(NAMES), choices=NAMES)
    parser.add_argument("--loads", nargs=3, type=float, default=[0.3, 1.5, 0.05], metavar=("FROM", "TO", "STEP"))
    parser.add_argument("--seeds", type=count, default=3)
    parser.add_argument("--requests", type=count, default=2000)
    parser.add_argument("--jobs", type=count, default=2)
    parser.add_argument("--out", type=results_folder, default=RESULTS)
    args = parser.parse_args()
    start, stop, step = args.loads
    if step <= 0:
        parser.error(f"--loads: STEP must be more than 0, not {step}")
    loads = np.arange(start, stop + step / 2, step).round(3).tolist()
    print(f"schedule() + update(), 256 rows: {step_cost(0, 10**6):.3f} ms a step with an empty queue,")
    print(
        f"  {step_cost(1000, 10**6):.3f} ms with 1,000 waiting for rows, {step_cost(1000, 180_000):.3f} ms for memory"
    )
    cache_cost()
    results = args.out / "scheduler.json"
    entries: list[dict] = json.loads(results.read_text()) if results.exists() else []
    with ProcessPoolExecutor(args.jobs) as pool:
        for trace in args.traces:
            entries = merged(entries, sweep(pool, trace, args.policies, loads, args.seeds, args.requests))
            table([e for e in entries if e["trace"] == trace])
            results.write_text(json.dumps(entries, indent=1) + "\n")
    plot(entries, args.out / "scheduler.png")


if __name__ == "__main__":
    main()
