"""KVBuffer: the keys and values of every layer, one slot per token."""

from __future__ import annotations

import torch


class KVBuffer:
    """K and V of a head lie side by side: one layer is [num_slots + 1, kv_heads, 2, head_dim].

    K is `layer(i)[:, :, 0]`, V is `layer(i)[:, :, 1]`. Slot `num_slots` is the dump slot, to which padding writes. On
    a GPU the memory starts as zeros, so that a masked read of a slot that was never written is finite; on a CPU, where
    nothing is padded, pages stay untouched until tokens come.
    """

    def __init__(
        self, num_slots: int, num_layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ):
        self.num_slots = num_slots
        shape = (num_slots + 1, kv_heads, 2, head_dim)
        new = torch.empty if device.type == "cpu" else torch.zeros
        self._layers = [new(shape, dtype=dtype, device=device) for _ in range(num_layers)]

    def layer(self, index: int) -> torch.Tensor:
        """[num_slots + 1, kv_heads, 2, head_dim]."""
        return self._layers[index]

    @staticmethod
    def bytes_per_token(num_layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Bytes that one slot takes in all layers together."""
        return 2 * num_layers * kv_heads * head_dim * dtype.itemsize
