"""Tiny random checkpoints saved by transformers, and a driver that feeds rows to a model step by step."""

from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers

from lightllm.common.basemodel.attention.token_backend import TokenAttentionBackend
from lightllm.common.basemodel.basemodel import BaseModel
from lightllm.common.basemodel.infer_struct import InferStateInfo
from lightllm.common.basemodel.model_config import ModelConfig
from lightllm.common.basemodel.triton_kernel.quantized_kv import QuantizedKV
from lightllm.common.kv_cache_mem_manager.kv_buffer import KVBuffer, ReqTable
from lightllm.distributed.parallel_state import ParallelState
from lightllm.models.registry import model_class

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZES = dict(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=131,
    max_position_embeddings=256,
    initializer_range=0.2,
    pad_token_id=None,
    bos_token_id=None,
    eos_token_id=None,
)


def make_reference(config: transformers.PretrainedConfig, seed: int = 0) -> transformers.PreTrainedModel:
    """A random model in which every parameter matters: no zero bias, no unit norm."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "layer_scalar")):
                buffer.add_(torch.randn_like(buffer) * 0.3)
    return model.eval()


def reload_reference(path: Path) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(
        path, attn_implementation="eager", dtype=torch.float32
    ).eval()


def load(
    path: Path, parallel: ParallelState | None = None, dtype: torch.dtype = torch.float32, device=DEVICE, **options
) -> BaseModel:
    config = ModelConfig.from_pretrained(path)
    cls = model_class(config.model_type)
    return cls.load(path, config, parallel or ParallelState(), dtype, device, **options)


@dataclass
class Row:
    ids: list[int]
    row: int
    slots: list[int] = field(default_factory=list)
    computed: int = 0
    prompt_len: int = 0


class Driver:
    """Rows with shuffled, sparse slots and row numbers, as after hours of serving."""

    def __init__(
        self, model: BaseModel, num_slots: int = 2048, max_rows: int = 12, seed: int = 0, kv_type: str | None = None
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        dtype = model.outer_weights["final_norm"].weight.dtype
        self.model = model
        self.kv = KVBuffer(num_slots, model.slot_shapes, dtype, model.device, kv_type)
        for layer in map(self.kv.layer, range(model.num_layers)):  # what a slot held before must never show
            (layer.scales if isinstance(layer, QuantizedKV) else layer).fill_(7.0)
        self.req_table = ReqTable(max_rows, num_slots, model.device)
        self.free_slots = torch.randperm(num_slots, generator=generator).tolist()
        self.free_rows = torch.randperm(max_rows, generator=generator).tolist()

    def add(self, ids: list[int], prefix: Row | None = None) -> Row:
        """A row; with `prefix` its first positions are that row's slots, as after a hit in the prefix cache."""
        row = Row(list(ids), self.free_rows.pop(), prompt_len=len(ids))
        if prefix:
            row.slots, row.computed = list(prefix.slots), prefix.computed
            self.req_table.table[row.row, : row.computed] = torch.tensor(row.slots, dtype=torch.int32)
        return row

    @torch.inference_mode()
    def step(self, work: list[tuple[Row, int]], all_logits: bool = False) -> torch.Tensor:
        """Compute the next n tokens of each row, decode rows first; logits of each row's last token, or of all."""
        decode = [w for w in work if w[1] == 1 and w[0].computed >= w[0].prompt_len]
        work = decode + [w for w in work if w not in decode]
        lengths = [n for _, n in work]
        starts = [r.computed for r, _ in work]
        positions, ids, rope_lens, slots = [], [], [], []
        for row, n in work:
            new = [self.free_slots.pop() for _ in range(n)]
            span = range(row.computed, row.computed + n)
            self.req_table.table[row.row, span.start : span.stop] = torch.tensor(new, dtype=torch.int32)
            slots += new
            row.slots += new
            positions += span
            ids += row.ids[span.start : span.stop]
            rope_lens += [max(row.prompt_len, p + 1) for p in span]
            row.computed += n
        device = self.model.device
        i32 = lambda values: torch.tensor(values, dtype=torch.int32, device=device)
        ends = torch.tensor(lengths, device=device).cumsum(0)
        state = InferStateInfo(
            positions=i32(positions),
            slots=i32(slots),
            rows=i32([r.row for r, _ in work]),
            starts=i32(starts),
            lengths=i32(lengths),
            kv_lens=i32(starts) + i32(lengths),
            cu_lengths=torch.nn.functional.pad(ends, (1, 0)).int(),
            rope_lens=i32(rope_lens),
            num_decode=len(decode),
            max_chunk=max(lengths[len(decode) :], default=0),
            req_table=self.req_table.table,
            kv=self.kv,
            backend=TokenAttentionBackend(),
            chunk_kv=sum(s + n for s, n in zip(starts[len(decode) :], lengths[len(decode) :])),
        )
        index = None if all_logits else ends - 1
        return self.model.forward(torch.tensor(ids, device=device), state, index).float().cpu()

    def prefill(self, ids: list[int], chunk: int = 10**6) -> tuple[Row, torch.Tensor]:
        """Logits of every prompt token [len(ids), vocab_size], computed in chunks."""
        row, logits = self.add(ids), []
        while row.computed < len(ids):
            logits.append(self.step([(row, min(chunk, len(ids) - row.computed))], all_logits=True))
        return row, torch.cat(logits)

    def generate(self, prompts: list[list[int]], n: int, chunk: int = 10**6) -> list[list[int]]:
        """Greedy ids of all prompts in one batch: rows that have their prompt decode while others still prefill."""
        rows = [self.add(ids) for ids in prompts]
        done: dict[int, list[int]] = {r.row: [] for r in rows}
        while active := [r for r in rows if len(done[r.row]) < n]:
            work = [(r, min(chunk, len(r.ids) - r.computed)) for r in active]
            order = [w for w in work if w[1] == 1 and w[0].computed >= w[0].prompt_len]
            order += [w for w in work if w not in order]
            tokens = self.step(work).argmax(-1).tolist()
            for (row, _), token in zip(order, tokens):
                if row.computed == len(row.ids):
                    row.ids.append(token)
                    done[row.row].append(token)
        return [done[r.row] for r in rows]


def random_ids(n: int, seed: int = 0, vocab: int = SIZES["vocab_size"]) -> list[int]:
    return torch.randint(0, vocab, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.no_grad()
def reference_logits(model: transformers.PreTrainedModel, ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([ids])).logits[0]


@torch.no_grad()
def reference_generate(model: transformers.PreTrainedModel, ids: list[int], n: int) -> tuple[list[int], float]:
    """Greedy ids of generate with its cache, and the smallest gap between the best two logits on the way."""
    out = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        max_new_tokens=n,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        eos_token_id=None,
        pad_token_id=0,
    )
    best = torch.cat(out.logits).topk(2).values
    return out.sequences[0, len(ids) :].tolist(), (best[:, 0] - best[:, 1]).min().item()
