"""Axis 4: multi-head attention with grouped queries over the token cache. (latent_attention holds the other choice.)"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from lightllm.common.basemodel.attention.backend import FEW_ROWS, AttentionSpec, NewKeys
from lightllm.common.basemodel.infer_struct import InferStateInfo
from lightllm.common.basemodel.layer_infer.template.norm import Norm
from lightllm.common.basemodel.layer_infer.template.position import Angles, Position, Rotary
from lightllm.common.basemodel.layer_weights.base_layer_weight import Weights
from lightllm.common.basemodel.normed import Lines
from lightllm.common.basemodel.partial_sum import PartialSum


class AttentionBlock(Protocol):
    @property
    def position(self) -> Position: ...

    def __call__(self, x: Lines, w: Weights, angles: Angles, state: InferStateInfo) -> PartialSum:
        """x [T, hidden] -> [T, hidden]; what later tokens need of these goes into the cache."""


@dataclass(frozen=True)
class Attention:
    """`heads` and `kv_heads` are this rank's. `qk_norm` normalises each head of q and k before positions enter. A slot
    "sinks" holds one more score for each head."""

    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    position: Position
    spec: AttentionSpec
    qk_norm: Norm | None = None

    def __call__(self, x: Lines, w: Weights, angles: Angles, state: InferStateInfo) -> PartialSum:
        """x [T, hidden] -> [T, hidden]."""
        q, k, v = self.project(x, w)
        layer_kv = state.kv.layer(self.layer)
        new = None
        few = not state.max_chunk and len(x) <= FEW_ROWS
        if few and isinstance(self.position, Rotary) and angles and isinstance(layer_kv, Tensor):
            new = NewKeys(k, v, *angles)
        else:
            q = self.position.write(q, k, v, angles, layer_kv, state.slots)
        sinks = w["sinks"].weight if "sinks" in w else None
        return w["o"].partial(state.backend.attend(q, layer_kv, self.spec, sinks, state, new).view(len(x), -1))

    def project(self, x: Lines, w: Weights) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, hidden] -> q [T, heads, head_dim], k and v [T, kv_heads, head_dim], without positions yet."""
        qkv = w["qkv"].apply(x).view(len(x), -1, self.head_dim)
        q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), 1)
        if self.qk_norm:
            q, k = self.qk_norm(q, w["q_norm"]), self.qk_norm(k, w["k_norm"])
        return q, k, v
