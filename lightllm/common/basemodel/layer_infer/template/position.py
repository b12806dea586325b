"""Axis 3: how positions enter attention. Angles are computed once per step and shared by all layers."""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lightllm.common.basemodel.infer_struct import InferStateInfo
from lightllm.common.basemodel.layer_infer.template import rope_scaling
from lightllm.common.basemodel.rope_config import RopeConfig
from lightllm.common.basemodel.triton_kernel.destindex_copy_kv import destindex_copy_kv
from lightllm.common.basemodel.triton_kernel.gather_rows import gather_rows
from lightllm.common.basemodel.triton_kernel.quantized_kv import LayerKV, QuantizedKV, asking, spread
from lightllm.common.basemodel.triton_kernel.rotary_emb import rotary_copy_kv
from lightllm.common.basemodel.triton_kernel.rotary_spread_kv import rotary_spread_kv

LONGEST_TABLE = 1 << 20  # positions
Angles = tuple[Tensor, Tensor] | None  # cos and sin, float32 [T, rotary dim / 2]; None where nothing is turned


class Position(Protocol):
    def angles(self, state: InferStateInfo) -> Angles:
        """Asked once per step for each distinct position object of a model."""

    def write(self, q: Tensor, k: Tensor, v: Tensor, angles: Angles, layer_kv: LayerKV, slots: Tensor) -> Tensor:
        """Put turned k and v [T, kv_heads, head_dim] into their slots; gives q [T, heads, head_dim], turned, as the
        keys of this cache want it. q and k are undefined afterwards."""


@dataclass(frozen=True)
class NoRope:
    """Nothing is turned: ALiBi is in the scores (AttentionSpec.slopes), learned positions are in the embeddings."""

    def angles(self, state: InferStateInfo) -> Angles:
        return None

    def write(self, q: Tensor, k: Tensor, v: Tensor, angles: Angles, layer_kv: LayerKV, slots: Tensor) -> Tensor:
        if isinstance(layer_kv, QuantizedKV):
            k, v = spread(torch.stack((k, v), 1)).unbind(1)
        destindex_copy_kv(k, v, layer_kv, slots)
        return asking(q, layer_kv)


def alibi_slopes(heads: int) -> Tensor:
    """float32 [heads]: ALiBi's slopes (arXiv 2108.12409), for numbers of heads that are no power of two as in BLOOM."""
    power = 2 ** math.floor(math.log2(heads))
    base = 2 ** -(8 / power)
    slopes = [base ** (i + 1) for i in range(power)]
    between = 2 ** -(4 / power)
    return torch.tensor(slopes + [between ** (2 * i + 1) for i in range(heads - power)])


class Rotary:
    """What turns pairs of features."""

    def write(self, q: Tensor, k: Tensor, v: Tensor, angles: Angles, layer_kv: LayerKV, slots: Tensor) -> Tensor:
        assert angles is not None
        if isinstance(layer_kv, QuantizedKV):
            return rotary_spread_kv(q, k, v, *angles, layer_kv, slots)
        rotary_copy_kv(q, k, v, *angles, layer_kv, slots)
        return q


class Rope(Rotary):
    """Scalings that do not depend on the sequence's length: a table of all positions up to `context`, but for contexts
    of millions, of which it would take gigabytes (Llama 4's ten million: five)."""

    def __init__(self, rope: RopeConfig, dim: int, context: int, device: torch.device) -> None:
        inverse, self.factor = rope_scaling.static_inverse_frequencies(rope, dim)
        self.inverse = inverse.to(device)
        self.table = self._turned(torch.arange(context, device=device)) if context <= LONGEST_TABLE else None

    def angles(self, state: InferStateInfo) -> Angles:
        at = state.positions
        cos, sin = self._turned(at) if self.table is None else gather_rows(self.table, at)
        return cos, sin

    def _turned(self, positions: Tensor) -> Tensor:
        turns = positions.float()[:, None] * self.inverse
        return torch.stack((turns.cos(), turns.sin())) * self.factor


class DynamicRope(Rotary):
    """Dynamic NTK scaling: theta grows with the sequence once it is longer than the model was trained for.

    transformers computes a whole prompt with the theta of its length and each later token with the theta of its own;
    cached keys keep theirs. `rope_lens` says that length for each token, so chunks equal a whole prefill.
    """

    def __init__(self, rope: RopeConfig, dim: int, device: torch.device) -> None:
        self.theta, self.factor, self.trained = rope.theta, rope.parameters["factor"], rope.max_position_embeddings
        self.power = dim / (dim - 2)
        self.exponents = rope_scaling.base_exponents(dim).to(device)

    def angles(self, state: InferStateInfo) -> Angles:
        lengths = state.rope_lens.clamp(min=self.trained)
        theta = self.theta * ((self.factor * lengths / self.trained) - (self.factor - 1)) ** self.power
        turns = state.positions[:, None].float() * (1.0 / theta[:, None] ** self.exponents)
        return turns.cos(), turns.sin()


class LongRope(Rotary):
    """LongRoPE: two sets of frequencies; a sequence longer than the original context takes the long one."""

    def __init__(self, rope: RopeConfig, dim: int, device: torch.device) -> None:
        short, long, self.factor = rope_scaling.longrope_inverse_frequencies(rope, dim)
        self.short, self.long = short.to(device), long.to(device)
        self.original = rope.original_max_position_embeddings

    def angles(self, state: InferStateInfo) -> Angles:
        inverse = torch.where(state.rope_lens[:, None] > self.original, self.long, self.short)
        turns = state.positions[:, None].float() * inverse
        return turns.cos() * self.factor, turns.sin() * self.factor


def make_rope(rope: RopeConfig, dim: int, context: int, device: torch.device) -> Position:
    """The rotary embedding of the first `dim` dimensions of a head that config.json asks for."""
    if rope.rope_type == "dynamic":
        return DynamicRope(rope, dim, device)
    if rope.rope_type == "longrope":
        return LongRope(rope, dim, device)
    return Rope(rope, dim, context, device)
