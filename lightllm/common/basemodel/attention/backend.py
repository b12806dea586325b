"""AttentionBackend: the socket between a layer and the attention kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from lightllm.common.basemodel.infer_struct import InferStateInfo


@dataclass(frozen=True)
class AttentionSpec:
    """What differs between layers: the factor on q·k, and how many last positions a query sees (None: all)."""

    scale: float
    window: int | None = None


class AttentionBackend(Protocol):
    def attend(self, q: Tensor, layer_kv: Tensor, spec: AttentionSpec, state: InferStateInfo) -> Tensor:
        """Causal attention of q [T, heads, head_dim] over the cache layer_kv [slots + 1, kv_heads, 2, head_dim].

        K and V of this step are in the cache already. Returns [T, heads, head_dim].
        """
        ...
