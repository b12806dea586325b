"""The model without server, scheduler and clients: milliseconds a decode step and a prompt, beside the limit.

    python benchmarks/bench_static.py --shape 1b 8b [--batch 1 16 64 256] [--context 192 1024] [--prompt 1024 8192]
    python benchmarks/bench_static.py --shape 1b --batch --prompt --mixed 155 900 165 300  # 155 rows, 165 prompt tokens

Weights and cache are random, slots are shuffled. `graph` is the replay alone, `step` a step as the server launches it,
two in flight. The limit is what reading the weights and the cache once takes (of experts, those that are hit), or the
arithmetic if it is longer, at the rates measured in the same run. Prompts, and products as long, reach the GPU's power
limit, which lowers its clock: so a prompt's limit is at the rate of products that run in turns with it, each time for
as long. `rested` is its share of the limit at the rate of 15 ms of products, which the GPU does not hold for longer.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from unittest import mock

import ceilings
import numpy as np
import torch
from arguments import count, need_gpu, results_file
from shapes import SHAPES, write_model

from lightllm.common.basemodel.attention.library_attention import measure_crossover
from lightllm.common.basemodel.attention.token_backend import TokenAttentionBackend
from lightllm.common.basemodel.cuda_graph import token_ladder
from lightllm.common.basemodel.layer_infer.template.moe import MoeFeedForward
from lightllm.common.basemodel.layer_weights.experts import ExpertsWeight
from lightllm.common.basemodel.model_config import ModelConfig
from lightllm.common.basemodel.triton_kernel.quantized_kv import LayerKV, QuantizedKV, write_slots
from lightllm.common.kv_cache_mem_manager.kv_buffer import KV_TYPES, KVBuffer, ReqTable
from lightllm.distributed.parallel_state import ParallelState
from lightllm.models.deepseek.latent import LatentModel
from lightllm.models.registry import model_class
from lightllm.server.core.messages import NewRow, StepPlan, pack
from lightllm.server.core.sampling_params import RequestLimits, SamplingParams
from lightllm.server.router.model_infer.model_runner import ModelRunner
from lightllm.server.router.model_infer.pending import Pending

STEPS = 40
PROMPTS = 5  # of which the median counts
PROMPT_TOKENS = 1 << 16  # short prompts alone are run until so many: a GPU begins with a clock that it does not hold
MIXED = ("ROWS", "CONTEXT", "TOKENS", "BEFORE")
DECODE_LINE = (
    "{batch:10d} {context:8d} {experts:8.1f} {graph_ms:10.3f} {step_ms:9.3f} {limit_ms:10.3f} {fraction:12.2f}"
)
MIXED_LINE = (
    "mixed {batch} at {context} and {tokens} behind {before}: {step_ms:.3f} ms, limit {limit_ms:.3f}: {fraction:.2f}"
)
PROMPT_LINE = (
    "prompt {prompt:6d} in chunks of {chunk}: {ms:.1f} ms, limit {limit_ms:.1f} at {tflops:.0f} TFLOP/s: "
    "{fraction:.3f}, rested {rested:.3f}"
)
CUDA = torch.device("cuda")
ALONE = ParallelState()


def fill_with_noise(layer: LayerKV) -> None:
    if isinstance(layer, torch.Tensor):
        layer.normal_()
        return
    part = 1 << 16
    for values, scales in zip(layer.values.split(part), layer.scales.split(part)):
        noise = torch.randn(values.shape, device=values.device)
        of_part = torch.arange(len(values), device=values.device)
        write_slots(QuantizedKV(values, scales), of_part, noise)


class Bench:
    """One shape on the GPU, with a cache for the largest case."""

    def __init__(
        self,
        shape: str,
        rows: int,
        tokens: int,
        limits: ceilings.Ceilings,
        graph_sizes: list[int],
        parallel: ParallelState = ALONE,
        kv_type: str | None = None,
        mixed_sizes: list[int] | None = None,
    ):
        """mixed_sizes: tokens of steps with prompts that have graphs, by default those of a server."""
        with tempfile.TemporaryDirectory() as folder:
            write_model(Path(folder), shape, None, None)
            self.config = config = ModelConfig.from_pretrained(folder)
            family = model_class(config.model_type)
            self.model = family.load(folder, config, parallel, torch.bfloat16, CUDA, "random")
        self.limits = limits
        self.kv_type = kv_type
        self.kv = KVBuffer(tokens, self.model.slot_shapes, torch.bfloat16, CUDA, kv_type)
        for layer in map(self.kv.layer, range(self.model.num_layers)):
            fill_with_noise(layer)
        self.table = ReqTable(rows, min(tokens, config.max_position_embeddings), CUDA)
        begin = time.perf_counter()
        layer_kv = self.kv.layer(0)
        plain = not isinstance(self.model, LatentModel)
        crossover = (
            measure_crossover(self.model.heads, self.model.head_dim, layer_kv, torch.bfloat16) if plain else None
        )
        backend = TokenAttentionBackend(crossover)
        mixed = token_ladder(2048) if mixed_sizes is None else mixed_sizes
        self.runner = ModelRunner(self.model, self.table, self.kv, backend, parallel, graph_sizes, mixed_sizes=mixed)
        graphs = f"{len(graph_sizes)} numbers of rows and {len(mixed)} of tokens"
        if parallel.rank == 0:
            print(f"graphs of {graphs}: {time.perf_counter() - begin:.1f} s", flush=True)
        self.slots = np.random.default_rng(0).permutation(tokens).astype(np.int32)

    # ---- the limit

    def layer_bytes(self, experts: float) -> float:
        """Weights of all layers, of each mixture so many experts."""
        weights = [weight for layer in self.model.layer_weights for weight in layer.values()]
        share = lambda w: experts / len(w.weight) if isinstance(w, ExpertsWeight) else 1.0
        return sum(w.weight.nbytes * share(w) for w in weights)

    @property
    def active_bytes(self) -> float:
        """Weights of all layers that one token uses: in bf16 as many operations as bytes."""
        return self.layer_bytes(self.config.raw.get("num_experts_per_tok") or 0)

    def decode_limit(self, batch: int, context: int, experts: float) -> float:
        """Milliseconds."""
        return self.mixed_limit(batch, context, 0, 0, experts)

    def mixed_limit(self, batch: int, context: int, tokens: int, before: int, experts: float) -> float:
        """Milliseconds of a decode step with so many prompt tokens more, behind `before`."""
        keys = batch * context + (before + tokens) * (tokens > 0)
        kv = keys * KVBuffer.bytes_per_token(self.model.slot_shapes, torch.bfloat16, self.kv_type)
        head = self.model.outer_weights["head"].weight.nbytes
        read = (self.layer_bytes(experts) + head) / self.limits.read
        operations = self.active_bytes * (batch + tokens) + head * batch
        return 1e3 * (max(read, operations / self.limits.matrix) + kv / self.limits.read)

    def prompt_limit(self, length: int, matrix: float) -> float:
        """Milliseconds, at a rate of products; the head is used for one token only."""
        c, m = self.config, self.model
        widths = m.nope + m.rope + m.value if isinstance(m, LatentModel) else 2 * c.head_dim
        attention = length**2 * c.num_attention_heads * widths * c.num_hidden_layers
        read = self.layer_bytes(c.raw.get("num_experts") or 0) / self.limits.read
        products = max(read, self.active_bytes * length / matrix)
        return 1e3 * (products + attention / self.limits.attention)

    def experts_hit(self, lines: int) -> float:
        """How many experts of a mixture the last decode step used, on average over the layers; 0 without experts."""
        hit, apply = [], MoeFeedForward.apply

        def counted(moe, x, weights, ids, *rest):
            hit.append(len(ids.unique()))
            return apply(moe, x, weights, ids, *rest)

        with mock.patch.object(MoeFeedForward, "apply", counted), torch.inference_mode():
            self.runner._decode.draw(lines)
        return sum(hit) / max(1, len(hit))

    # ---- measurements

    def start(self, batch: int, prompt: int, **sampling) -> list[NewRow]:
        limits = RequestLimits(max_total_tokens=1 << 20, vocab_size=self.config.vocab_size)
        params = SamplingParams(ignore_eos=True, max_new_tokens=1 << 10, **sampling).resolve(limits, prompt)
        ids = np.random.default_rng(1).integers(0, self.config.vocab_size, prompt)
        return [NewRow(row, 8 * (row + 1), pack(ids, np.int32), prompt, params) for row in range(batch)]

    def plan(self, step: int, lengths: list[int], starts: list[int], slots: np.ndarray, new: list[NewRow]) -> StepPlan:
        return StepPlan(
            step=step,
            num_decode=lengths.count(1),
            rows=pack(range(len(lengths)), np.int32),
            starts=pack(starts, np.int32),
            lengths=pack(lengths, np.int32),
            samples=pack([1] * len(lengths), np.uint8),
            slots=pack(slots, np.int32),
            ended=b"",
            new_rows=new,
        )

    def decode(self, batch: int, context: int, **sampling) -> dict[str, float]:
        held = self.slots[: batch * context].reshape(batch, context)
        self.table.table[:batch, :context] = torch.from_numpy(held).to(CUDA)
        spare = self.slots[-batch * (STEPS + 10) :].reshape(-1, batch)

        def step(i: int):
            new = self.start(batch, context, **sampling) if i == 0 else []
            return self.runner.launch(self.plan(i, [1] * batch, [context + i] * batch, spare[i], new))

        taken = self.taken(step)
        lines = self.runner._draw.padded(batch)
        with torch.inference_mode():
            graph = ceilings.milliseconds(lambda: self.runner._draw(lines), 20)
        experts = self.experts_hit(lines)
        limit = self.decode_limit(batch, context + STEPS // 2, experts)
        times = dict(graph_ms=graph, step_ms=taken, limit_ms=limit, fraction=limit / graph)
        return dict(batch=batch, context=context, experts=experts, **times)

    def taken(self, step: Callable[[int], Pending]) -> float:
        """Milliseconds of each of the STEPS steps from 10 on, two in flight. Step 0 starts the rows."""
        step(0).result()
        with torch.inference_mode():
            self.runner._sampler.table.last_token.random_(self.config.vocab_size)  # rows that differ
        for i in range(1, 10):
            step(i).result()
        flying, begin = deque(), time.perf_counter()
        for i in range(10, 10 + STEPS):
            flying.append(step(i))
            if len(flying) == 2:
                flying.popleft().result()
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - begin) / STEPS

    def mixed(self, batch: int, context: int, tokens: int, before: int) -> dict[str, float]:
        """A step of `batch` decoding rows and the last tokens of a prompt, behind `before` of them, again and again."""
        length = before + tokens
        held, of_prompt = np.split(self.slots[: batch * (context + 1) + length], [batch * (context + 1)])
        held = held.reshape(batch, context + 1)
        self.table.table[:batch, : context + 1] = torch.from_numpy(held).to(CUDA)
        self.table.table[batch, :length] = torch.from_numpy(of_prompt).to(CUDA)
        slots = np.append(held[:, -1], of_prompt[before:])

        def step(i: int) -> Pending:
            new = [*self.start(batch, context), *self.start(batch + 1, length)[-1:]] if i == 0 else []
            return self.runner.launch(self.plan(i, [1] * batch + [tokens], [context] * batch + [before], slots, new))

        experts = self.config.raw.get("num_experts") or 0  # so many lines use all
        taken, limit = self.taken(step), self.mixed_limit(batch, context, tokens, before, experts)
        case = dict(batch=batch, context=context, tokens=tokens, before=before)
        return case | dict(step_ms=taken, limit_ms=limit, fraction=limit / taken)

    def prompt_run(self, length: int, chunk: int) -> Callable[[], float]:
        """Milliseconds from the plans of a prompt, which a router makes, to its token; it has run once."""
        starts = range(0, length, chunk)
        parts = [(begin, min(chunk, length - begin), self.start(1, length) if begin == 0 else []) for begin in starts]
        plans = [self.plan(0, [n], [begin], self.slots[begin : begin + n], new) for begin, n, new in parts]

        def run() -> float:
            begin = time.perf_counter()
            for plan in plans:
                self.runner.launch(plan).result()
            return 1e3 * (time.perf_counter() - begin)

        run()
        return run

    def prompt(self, length: int, chunk: int) -> dict[str, float]:
        """Without a limit."""
        run = self.prompt_run(length, chunk)
        times = [run() for _ in range(max(PROMPTS, PROMPT_TOKENS // length))]
        return dict(prompt=length, chunk=chunk, ms=statistics.median(times))

    def prompt_beside_products(self, length: int, chunk: int) -> dict[str, float]:
        run = self.prompt_run(length, chunk)
        as_long = lambda ms: max(10, round(1e-3 * ms * self.limits.matrix / ceilings.PRODUCT))
        turns = [(taken := run(), ceilings.matrix_rate(as_long(taken))) for _ in range(PROMPTS)]
        taken, matrix = map(statistics.median, zip(*turns))
        limit, rested = (self.prompt_limit(length, rate) for rate in (matrix, self.limits.matrix))
        shares = dict(limit_ms=limit, fraction=limit / taken, rested=rested / taken)
        return dict(prompt=length, chunk=chunk, ms=taken, matrix=matrix, **shares)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=["1b", "8b"])
    parser.add_argument("--batch", type=count, nargs="*", default=[1, 16, 64, 256])
    parser.add_argument("--context", type=count, nargs="+", default=[256, 1024])
    parser.add_argument("--prompt", type=count, nargs="*", default=[1024, 8192])
    parser.add_argument("--mixed", type=int, nargs=4, action="append", default=[], metavar=MIXED, help="a step of both")
    parser.add_argument("--chunk", type=count, default=8192, help="prompt tokens of one step")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top_k", type=int, default=-1)
    parser.add_argument("--top_p", type=float, default=1.0)
    parser.add_argument("--llm_kv_type", choices=KV_TYPES)
    parser.add_argument("--json", type=results_file, help="where to write the results")
    options = parser.parse_args()
    need_gpu(parser)
    sampling = dict(temperature=options.temperature, top_k=options.top_k, top_p=options.top_p)
    limits = ceilings.measure()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: read {limits.read / 1e12:.2f} TB/s,", end=" ")
    print(f"bf16 {limits.matrix / 1e12:.0f} and causal attention {limits.attention / 1e12:.0f} TFLOP/s", flush=True)
    sizes = sorted({*options.batch, *(batch + 1 for batch, *_ in options.mixed)})
    of_decode = max(options.batch, default=0) * (max(options.context) + STEPS + 10)
    of_mixed = (batch * (context + 1) + before + tokens for batch, context, tokens, before in options.mixed)
    tokens = max([*options.prompt, of_decode, *of_mixed])
    results = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "ceilings": asdict(limits)}
    for shape in options.shape:
        bench = Bench(shape, max(sizes, default=1), tokens, limits, sizes, kv_type=options.llm_kv_type)
        found = results[shape] = {"decode": [], "prompt": [], "mixed": []}
        print(f"{shape}   batch  context  experts   graph ms   step ms   limit ms   graph's share")
        for context in options.context:
            for batch in options.batch:
                row = bench.decode(batch, context, **sampling)
                found["decode"].append(row)
                print(DECODE_LINE.format(**row), flush=True)
        for length in options.prompt:
            row = bench.prompt_beside_products(length, options.chunk)
            found["prompt"].append(row)
            print(PROMPT_LINE.format(tflops=row["matrix"] / 1e12, **row), flush=True)
        for case in options.mixed:
            row = bench.mixed(*case)
            found["mixed"].append(row)
            print(MIXED_LINE.format(**row), flush=True)
        del bench
        torch.cuda.empty_cache()
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
