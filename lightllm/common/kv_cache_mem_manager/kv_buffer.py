"""KVBuffer: what every layer keeps of each token, one slot per token."""

from __future__ import annotations

import math

import torch


class KVBuffer:
    """One layer is [num_slots + 1, *slot_shape]; the model says the shape (BaseModel.slot_shape).

    With [kv_heads, 2, head_dim] K is `layer(i)[:, :, 0]` and V `layer(i)[:, :, 1]`. Slot `num_slots` is the dump slot,
    to which padding writes. On a GPU the memory starts as zeros, so that a masked read of a slot that was never written
    is finite; on a CPU, where nothing is padded, pages stay untouched until tokens come.
    """

    def __init__(
        self,
        num_slots: int,
        num_layers: int,
        slot_shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.num_slots = num_slots
        shape = (num_slots + 1, *slot_shape)
        new = torch.empty if device.type == "cpu" else torch.zeros
        self._layers = [new(shape, dtype=dtype, device=device) for _ in range(num_layers)]

    def layer(self, index: int) -> torch.Tensor:
        """[num_slots + 1, *slot_shape]."""
        return self._layers[index]

    @staticmethod
    def bytes_per_token(num_layers: int, slot_shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Bytes that one slot takes in all layers together."""
        return num_layers * math.prod(slot_shape) * dtype.itemsize
