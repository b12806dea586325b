"""AttentionBackend: the socket between a layer and the attention kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from lightllm.common.basemodel.infer_struct import InferStateInfo
    from lightllm.common.basemodel.triton_kernel.quantized_kv import LayerKV


@dataclass(frozen=True)
class AttentionSpec:
    """What differs between layers: how scores are made and which keys a query sees (at most one of window and chunk).

    A score is scale * q·k, then softcap * tanh(score / softcap), then minus slope * distance for each head's slope.
    """

    scale: float
    window: int | None = None  # a query sees the last `window` positions, itself among them
    chunk: int | None = None  # a query sees its own run of `chunk` positions: those p' with p' // chunk == p // chunk
    softcap: float | None = None
    slopes: Tensor | None = None  # ALiBi: float32 [heads of this rank]

    @property
    def reach(self) -> int | None:
        """Most keys that one query can see; None for all. Up to this position nothing is hidden."""
        return self.window or self.chunk

    def oldest(self, position: Any) -> Any:
        """First position that a query at `position` (int or int tensor) sees; below 0 while a window is not full."""
        if self.chunk:
            return position // self.chunk * self.chunk
        return position - self.window + 1 if self.window else 0


FEW_ROWS = 16  # up to so many new keys are left to attention; a kernel before it is as fast with more


class NewKeys(NamedTuple):
    """What decode rows have that is neither turned nor in the cache yet: k and v [B, kv_heads, head_dim] and the angles
    by which k and q are to be turned, cos and sin float32 [B, rotary dim / 2]."""

    k: Tensor
    v: Tensor
    cos: Tensor
    sin: Tensor


class AttentionBackend(Protocol):
    def attend(
        self,
        q: Tensor,
        layer_kv: LayerKV,
        spec: AttentionSpec,
        sinks: Tensor | None,
        state: InferStateInfo,
        new: NewKeys | None = None,
    ) -> Tensor:
        """Causal attention of q [T, heads, head_dim], as the cache's keys want it (Position.write, `asking`), over a
        layer of the cache, [slots + 1, kv_heads, 2, head_dim].

        K and V of this step are in the cache already, or `new` in a step of decode rows alone, which are written there;
        q is turned with them. `sinks` [heads] are scores of a key without a value, for each head. Returns
        [T, heads, head_dim].
        """
