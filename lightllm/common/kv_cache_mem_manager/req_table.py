"""ReqTable: which slot holds each position of each running row."""

import torch
from torch import Tensor


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
