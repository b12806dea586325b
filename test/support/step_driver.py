"""A ModelRunner on a tiny checkpoint, and a driver that plans its steps by hand."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import transformers
from model.harness import load

from lightllm.common.basemodel.attention.token_backend import TokenAttentionBackend
from lightllm.common.basemodel.triton_kernel.quantized_kv import QuantizedKV
from lightllm.common.kv_cache_mem_manager.kv_buffer import KVBuffer, ReqTable
from lightllm.distributed.parallel_state import ParallelState
from lightllm.server.core.messages import NewRow, StepPlan, StepResult, pack, unpack
from lightllm.server.core.sampling_params import RequestLimits, SamplingParams
from lightllm.server.router.model_infer.model_runner import ModelRunner

CPU = torch.device("cpu")
VOCAB = 320


def save_random_model(path: Path, family: str = "llama", seed: int = 0, **extra) -> transformers.PreTrainedModel:
    """The random model F3 of cases/bug_reports.md, of any family; saved in `path` and returned, fp32."""
    torch.manual_seed(seed)
    sizes = dict(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    config = transformers.AutoConfig.for_model(family, **sizes | extra)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(path)
    return model


def make_runner(
    path: Path,
    slots: int = 4096,
    max_rows: int = 32,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
    graph_sizes: Sequence[int] = (),
    mixed_sizes: Sequence[int] = (),
    max_len: int | None = None,
    kv_type: str | None = None,
    parallel: ParallelState | None = None,
) -> ModelRunner:
    parallel = parallel or ParallelState()
    model = load(path, parallel, dtype, device)
    kv = KVBuffer(slots, model.slot_shapes, dtype, device, kv_type)
    for layer in map(kv.layer, range(model.num_layers)):  # what no request wrote must never be read
        (layer.scales if isinstance(layer, QuantizedKV) else layer).fill_(torch.nan)
    req_table = ReqTable(max_rows, max_len or model.config.max_position_embeddings, device)
    backend = TokenAttentionBackend()
    return ModelRunner(model, req_table, kv, backend, parallel, graph_sizes, mixed_sizes=mixed_sizes)


@dataclass
class Running:
    """One sequence: its ids so far and what came back."""

    row: int
    prompt: list[int]
    sampling: SamplingParams
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[tuple[list[int], list[float]]] = field(default_factory=list)
    prompt_logprobs: dict[int, float] = field(default_factory=dict)
    prompt_top: dict[int, tuple[list[int], list[float]]] = field(default_factory=dict)
    computed: int = 0
    planned: int = 0  # output tokens planned
    new: bool = True

    @property
    def room(self) -> int:
        return (self.sampling.max_new_tokens or 0) - self.planned


class StepDriver:
    """Runs sequences with two plans in flight, on shuffled slots and rows."""

    def __init__(self, runner: ModelRunner, chunk: int = 10**6, slots: int = 4096, max_rows: int = 32, seed: int = 0):
        rng = np.random.default_rng(seed)
        self.runner, self.chunk = runner, chunk
        self.slots = rng.permutation(slots).tolist()
        self.rows = rng.permutation(max_rows).tolist()
        self.step = 0
        self.ended: list[int] = []
        self.results: list[StepResult] = []

    def sequence(self, prompt: Sequence[int], **parameters) -> Running:
        limits = RequestLimits(max_total_tokens=512, vocab_size=VOCAB)
        return Running(self.rows.pop(), list(prompt), SamplingParams(**parameters).resolve(limits, len(prompt)))

    def resume(self, paused: Running) -> None:
        """What is known of a sequence is started anew on another row."""
        self.ended.append(paused.row)
        paused.row, paused.computed, paused.new = self.rows.pop(), 0, True

    def run(self, sequences: list[Running], steps: int = 10**6) -> None:
        flying = []
        for _ in range(steps):
            if active := [s for s in sequences if s.room]:
                flying.append(self.runner.launch(self.plan(active)))
            if not flying:
                return
            if len(flying) == 2 or not active:
                self.read(flying.pop(0).result(), sequences)
        for pending in flying:
            self.read(pending.result(), sequences)

    def plan(self, active: list[Running]) -> StepPlan:
        known = {s.row: len(s.prompt) + s.planned for s in active}
        decode = [s for s in active if s.computed == known[s.row] - 1 and s.planned and not s.new]
        chunks = [s for s in active if s not in decode]
        lengths = [1] * len(decode) + [min(self.chunk, known[s.row] - s.computed) for s in chunks]
        order = decode + chunks
        samples = [s.computed + n == known[s.row] for s, n in zip(order, lengths)]
        plan = StepPlan(
            step=self.step,
            num_decode=len(decode),
            rows=pack([s.row for s in order], np.int32),
            starts=pack([s.computed for s in order], np.int32),
            lengths=pack(lengths, np.int32),
            samples=pack(samples, np.uint8),
            slots=pack([self.slots.pop() for _ in range(sum(lengths))], np.int32),
            ended=pack(self.ended, np.int32),
            new_rows=[
                NewRow(s.row, 8 * (i + 1), pack(s.prompt + s.tokens, np.int32), len(s.prompt), s.sampling)
                for i, s in enumerate(order)
                if s.new
            ],
        )
        self.step, self.ended = self.step + 1, []
        for s, n, sampled in zip(order, lengths, samples):
            s.computed += n
            s.planned += sampled
            s.new = False
        return plan

    def read(self, result: StepResult, sequences: list[Running]) -> None:
        self.results.append(result)
        by_row = {s.row: s for s in sequences}
        rows = unpack(result.rows, np.int32).tolist()
        columns = unpack(result.tokens, np.int32).tolist(), unpack(result.logprobs, np.float32).tolist()
        for row, token, logprob in zip(rows, *columns, strict=True):
            by_row[row].tokens.append(token)
            by_row[row].logprobs.append(logprob)
        for top in result.top:
            pairs = unpack(top.ids, np.int32).tolist(), unpack(top.logprobs, np.float32).tolist()
            by_row[rows[top.index]].top.append(pairs)
        for part in result.prompt:
            sequence = by_row[part.owner]
            logprobs = unpack(part.logprobs, np.float32).tolist()
            ids = unpack(part.top_ids, np.int32).reshape(len(logprobs), -1).tolist()
            values = unpack(part.top_logprobs, np.float32).reshape(len(logprobs), -1).tolist()
            for i, logprob in enumerate(logprobs):
                assert part.start + i not in sequence.prompt_logprobs
                sequence.prompt_logprobs[part.start + i] = logprob
                sequence.prompt_top[part.start + i] = (ids[i], values[i])


@torch.no_grad()
def reference_ids(model: transformers.PreTrainedModel, prompt: list[int], n: int, **options) -> list[int]:
    """Greedy ids of transformers generate."""
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=n, do_sample=False, **options)
    return out[0, len(prompt) :].tolist()


@torch.no_grad()
def reference_logprobs(model: transformers.PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """log_softmax of the logits at every position [len(ids), vocab]."""
    return model(torch.tensor([ids])).logits[0].log_softmax(-1)


def random_prompts(lengths: Sequence[int], seed: int = 0, vocab: int = VOCAB) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab, n).tolist() for n in lengths]
