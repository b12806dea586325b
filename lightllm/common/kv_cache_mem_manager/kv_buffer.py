"""KVBuffer: what every layer keeps of each token, one slot per token. ReqTable: which slot holds which token."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lightllm.common.basemodel.triton_kernel.quantized_kv import LayerKV, QuantizedKV

KV_TYPES = {"int8kv": torch.uint8, "fp8kv": torch.float8_e4m3fn}
SCALE = torch.float16


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
        kv_type: str | None = None,
    ):
        """kv_type: one of KV_TYPES, for layers that keep K and V of heads; None: everything in `dtype`."""
        self.num_slots = num_slots
        new = torch.empty if device.type == "cpu" else torch.zeros

        def layer(shape: tuple[int, ...]) -> LayerKV:
            slots = (num_slots + 1, *shape)
            if kv_type is None or not math.prod(shape):
                return new(slots, dtype=dtype, device=device)
            values = new(slots, dtype=torch.uint8, device=device).view(KV_TYPES[kv_type])
            return QuantizedKV(values, new(slots[:-1], dtype=SCALE, device=device))

        self._layers = list(map(layer, slot_shapes))

    def layer(self, index: int) -> LayerKV:
        """[num_slots + 1, *slot_shapes[index]]."""
        return self._layers[index]

    @staticmethod
    def bytes_per_token(slot_shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, kv_type: str | None = None) -> int:
        """Bytes that one slot takes in all layers together."""
        numbers = sum(map(math.prod, slot_shapes))
        if kv_type is None:
            return numbers * dtype.itemsize
        scales = sum(math.prod(shape[:-1]) for shape in slot_shapes if math.prod(shape))
        return numbers * KV_TYPES[kv_type].itemsize + scales * SCALE.itemsize


class ReqTable:
    """`table` int32 [max_rows + 1, max_len] on the device: `table[row, position]` is a slot of the KVBuffer.

    The last row is for padding: it is no request's, and its entries are the zero slot until something is written there.
    """

    def __init__(self, max_rows: int, max_len: int, device: torch.device):
        self.max_rows = max_rows
        self.max_len = max_len
        self.table = torch.zeros(max_rows + 1, max_len, dtype=torch.int32, device=device)

    def write(self, flat_index: Tensor, slots: Tensor) -> None:
        """Sets `table[row, position] = slot`; flat_index int64 [T] = row * max_len + position, slots int32 [T]."""
        self.table.view(-1).index_copy_(0, flat_index, slots)
