"""Random inputs of the kernels: paged KV with shuffled, sparse slots and rows, varying lengths, hostile padding."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import lightllm.common
from lightllm.common.basemodel.attention.backend import AttentionSpec
from lightllm.common.basemodel.triton_kernel.quantized_kv import QuantizedKV, write_slots
from lightllm.common.triton_utils.gpu import is_hopper

HOPPER = torch.cuda.is_available() and is_hopper(torch.device("cuda"))


def shipped(kernel: str) -> dict[str, Any]:
    """The table of a kernel's configurations for an H200, by shape."""
    tables = Path(lightllm.common.__path__[0]) / "all_kernel_configs"
    return json.loads((tables / kernel / "NVIDIA_H200.json").read_text())


@dataclass(frozen=True)
class Paged:
    """A KV pool and the rows of one step. Slots that belong to no row hold NaN; unused table entries name them."""

    layer_kv: torch.Tensor
    req_table: torch.Tensor
    rows: torch.Tensor
    kv_lens: torch.Tensor

    def keys_values(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of row i, float64 [kv_len, KH, hd]."""
        kv = self.layer_kv[self.req_table[self.rows[i], : self.kv_lens[i]].long()].double()
        return kv[:, :, 0], kv[:, :, 1]


def paged(kv_lens: list[int], kv_heads: int, head_dim: int, dtype: torch.dtype, device: str = "cpu") -> Paged:
    generator = torch.Generator().manual_seed(sum(kv_lens) + kv_heads + head_dim)
    needed = sum(kv_lens)
    slots = torch.randperm(2 * needed + 8, generator=generator)
    width, count = max(kv_lens) + 3, len(kv_lens) + 4
    rows = torch.randperm(count, generator=generator)[: len(kv_lens)]
    table = slots[-1].repeat(count, width)
    layer_kv = torch.full((len(slots), kv_heads, 2, head_dim), torch.nan)
    used = 0
    for row, n in zip(rows.tolist(), kv_lens):
        table[row, :n] = slots[used : used + n]
        used += n
    layer_kv[slots[:used]] = torch.randn(used, kv_heads, 2, head_dim, generator=generator)
    ints = (x.to(device, torch.int32) for x in (table, rows, torch.tensor(kv_lens)))
    return Paged(layer_kv.to(device, dtype), *ints)


def naive_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    start: int,
    spec: AttentionSpec,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """float64: q [L, H, hd] at positions start... over k, v [n, KH, hd] -> [L, H, hd]."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    score = torch.einsum("lhd,nhd->hln", q.double(), k) * spec.scale
    if spec.softcap:
        score = spec.softcap * torch.tanh(score / spec.softcap)
    query, key = torch.arange(start, start + len(q))[:, None], torch.arange(len(k))
    hidden = key > query
    if spec.window:
        hidden |= query - key >= spec.window
    if spec.chunk:
        hidden |= query // spec.chunk != key // spec.chunk
    if spec.slopes is not None:
        score -= spec.slopes.cpu().double()[:, None, None] * (query - key)
    score = score.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        score = torch.cat((score, sinks.double()[:, None, None].expand(-1, len(q), 1)), 2)
    return torch.einsum("hln,nhd->lhd", score.softmax(-1)[..., : len(k)], v)


def attention_specs(
    heads: int, scale: float, device: str = "cpu"
) -> dict[str, tuple[AttentionSpec, torch.Tensor | None]]:
    """One spec and its sinks for each feature, and one for all that go together."""
    slopes = torch.rand(heads, generator=torch.Generator().manual_seed(heads)).to(device)
    sinks = 3 * torch.randn(heads, generator=torch.Generator().manual_seed(heads)).to(device)
    return {
        "softcap": (AttentionSpec(scale, softcap=0.7), None),
        "chunk": (AttentionSpec(scale, chunk=40), None),
        "slopes": (AttentionSpec(scale, slopes=slopes), None),
        "sinks": (AttentionSpec(scale), sinks),
        "sinks, window": (AttentionSpec(scale, window=9), 30 * sinks),
        "all": (AttentionSpec(scale, chunk=7, softcap=0.7, slopes=slopes), sinks),
    }


def quantized_pool(slots: int, kv_heads: int, head_dim: int, kind: torch.dtype, device: str) -> QuantizedKV:
    """Full of bytes 0x55, and scales that are no numbers."""
    values = torch.full((slots, kv_heads, 2, head_dim), 0x55, dtype=torch.uint8, device=device).view(kind)
    return QuantizedKV(values, torch.full((slots, kv_heads, 2), torch.nan, dtype=torch.float16, device=device))


def quantized(kv: torch.Tensor | QuantizedKV, device: str, kind: torch.dtype = torch.uint8) -> QuantizedKV:
    """A pool in 8 bits on `device`; slots of NaN stay unwritten."""
    if isinstance(kv, QuantizedKV):
        return QuantizedKV(kv.values.to(device), kv.scales.to(device))
    pool = quantized_pool(len(kv), kv.shape[1], kv.shape[3], kind, "cpu")
    written = (~kv.isnan().flatten(1).any(1)).nonzero().squeeze(1).cpu()
    write_slots(pool, written, kv.cpu()[written])
    return quantized(pool, device)
