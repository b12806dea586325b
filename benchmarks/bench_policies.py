"""The admission policies on a real model, and the simulator beside them with constants fitted in the same run.

    python benchmarks/bench_policies.py --shape 1b --rate 14 --requests 600 [--device cuda] [--json out.json]

The trace `long_output` arrives in real time at a Scheduler with a ModelRunner in this process (random weights, so each
output is ended where the trace says). Then the same trace runs in the simulator, whose step model is fitted to the
measured steps.
"""

import argparse
import json
import tempfile
import time
from collections import deque
from pathlib import Path

import numpy as np
import torch
from arguments import count, need_gpu, rate, results_file
from bench_scheduler import CAPACITY, NAMES, PLANS, make_scheduler
from shapes import SHAPES, write_model
from sim.simulator import Outcome, Simulation, StepModel
from sim.traces import make_trace

from lightllm.distributed.parallel_state import ParallelState
from lightllm.server.core.messages import StepPlan, unpack
from lightllm.server.core.server_args import ServerArgs
from lightllm.server.router.model_infer.model_runner import ModelRunner
from lightllm.server.router.model_infer.pending import Pending
from lightllm.utils.device_utils import Platform


class RealRun(Simulation):
    """The same bookkeeping with a clock that ticks and a GPU that computes."""

    def __init__(self, runner: ModelRunner, *simulation):
        super().__init__(*simulation)
        self._runner = runner
        self._pending: deque[Pending] = deque()
        self._begin = time.monotonic()
        self._step_began = 0.0  # the host's work before a step is launched is part of it, waiting for arrivals is not
        self.steps: list[tuple[int, int, int, float]] = []  # decoding rows, KV tokens, prompt tokens, seconds

    def _wait_until(self, at: float) -> float:
        time.sleep(max(0.0, at - self._now()))
        return self._now()

    def _now(self) -> float:
        return time.monotonic() - self._begin

    def _launch(self, plan: StepPlan, now: float) -> None:
        super()._launch(plan, now)
        self._pending.append(self._runner.launch(plan))

    def _hold(self, seconds: float) -> None:
        """How long, a result tells later."""

    def _next(self) -> tuple[float, StepPlan | None]:
        """An arrival that is due, else the oldest result, which is waited for."""
        if self._arrivals and (not self._flying or self._arrivals[0][0] <= self._now()):
            now = self._wait_until(self._arrivals[0][0])
            if not self._flying:
                self._step_began = now
            return now, None
        _, plan = self._flying.popleft()
        result = self._pending.popleft().result()
        assert not result.failed, result.failed
        now = self._now()
        seconds = now - self._step_began
        self._step_began = now
        super()._hold(seconds)
        starts, lengths = unpack(plan.starts, np.int32), unpack(plan.lengths, np.int32)
        decoding = plan.num_decode
        kv_tokens = int(starts[:decoding].sum()) + decoding
        self.steps.append((decoding, kv_tokens, int(lengths[decoding:].sum()), seconds))
        return now, plan


def fit(steps: list[tuple[int, int, int, float]]) -> StepModel:
    """Least squares over all steps."""
    table = np.array(steps)
    facts = np.column_stack((np.ones(len(table)), table[:, :3], table[:, 2] > 0))
    return StepModel(*np.maximum(np.linalg.lstsq(facts, table[:, 3], rcond=None)[0], 0.0).tolist())


def report(name: str, real: Outcome, simulated: Outcome) -> dict:
    row = {"policy": name}
    for kind, outcome in (("real", real), ("simulated", simulated)):
        row |= {
            f"{kind}_goodput": round(outcome.goodput, 1),
            f"{kind}_paused_share": round(outcome.paused_share, 4),
            f"{kind}_attainment": round(outcome.attainment, 4),
            f"{kind}_memory_use": round(outcome.memory_use, 4),
            f"{kind}_p99_tbt_s": round(outcome.p99_tbt_s, 5),
        }
    row["simulated_to_real"] = round(simulated.goodput / real.goodput, 4)
    print(json.dumps(row), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="1b", choices=SHAPES)
    parser.add_argument("--layers", type=count)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rate", type=rate, default=14.0)
    parser.add_argument("--requests", type=count, default=600)
    parser.add_argument("--capacity", type=count, default=CAPACITY)
    parser.add_argument("--policies", nargs="*", choices=NAMES, default=list(NAMES))
    parser.add_argument("--json", type=results_file)
    args = parser.parse_args()
    if not args.rate:
        parser.error("--rate must be more than 0")
    if args.device == "cuda":
        need_gpu(parser)
    platform = Platform.detect(args.device)
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), args.shape, None, args.layers)
        server_args = ServerArgs(
            model_dir=folder,
            load_format="random",
            device=args.device,
            max_total_token_num=args.capacity,
            max_req_total_len=16384,
        )
        with torch.inference_mode():
            runner, engine = ModelRunner.from_args(server_args, ParallelState(), platform)
    print(engine, flush=True)
    rows = []
    for name in args.policies:
        outputs: dict[int, int] = {}
        real = RealRun(runner, make_scheduler(name, outputs, args.capacity), StepModel(), outputs)
        outcome = real.run(make_trace("long_output", args.requests, 0, args.rate))
        model = fit(real.steps)
        outputs = {}
        simulation = Simulation(make_scheduler(name, outputs, args.capacity), model, outputs)
        rows.append(report(name, outcome, simulation.run(make_trace("long_output", args.requests, 0, args.rate))))
        rows[-1]["step_model"] = model._asdict()
    if args.json:
        gpu = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
        facts = {"device": gpu, "torch": torch.__version__, "plans": PLANS, **vars(args), "json": None}
        args.json.write_text(json.dumps(facts | {"rows": rows}, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
