"""KVBuffer: what every layer keeps of each token, one slot per token."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


class KVBuffer:
    """Layer i is [num_slots + 1, *slot_shapes[i]]; the model says the shapes (BaseModel.slot_shapes).

    With [kv_heads, 2, head_dim] K is `layer(i)[:, :, 0]` and V `layer(i)[:, :, 1]`. Slot `num_slots` is the dump slot,
    to which padding writes. On a GPU the memory starts as zeros, so that a masked read of a slot that was never written
    is finite; on a CPU, where nothing is padded, pages stay untouched until tokens come.
    """

    def __init__(
        self,
        num_slots: int,
        slot_shapes: Sequence[tuple[int, ...]],
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.num_slots = num_slots
        new = torch.empty if device.type == "cpu" else torch.zeros
        self._layers = [new((num_slots + 1, *shape), dtype=dtype, device=device) for shape in slot_shapes]

    def layer(self, index: int) -> torch.Tensor:
        """[num_slots + 1, *slot_shapes[index]]."""
        return self._layers[index]

    @staticmethod
    def bytes_per_token(slot_shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> int:
        """Bytes that one slot takes in all layers together."""
        return sum(map(math.prod, slot_shapes)) * dtype.itemsize
