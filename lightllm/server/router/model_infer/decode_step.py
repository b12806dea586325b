"""DecodeStep: a step in which every row computes one token, on buffers that stay, so that CUDA graphs can replay it."""

import numpy as np
import torch
from torch import Tensor

from lightllm.common.basemodel.attention.backend import AttentionBackend
from lightllm.common.basemodel.basemodel import BaseModel
from lightllm.common.basemodel.infer_struct import InferStateInfo
from lightllm.common.basemodel.triton_kernel.prepare_decode import prepare_decode
from lightllm.common.kv_cache_mem_manager.kv_buffer import KVBuffer, ReqTable
from lightllm.common.sampling.sampler import Sampler
from lightllm.common.sampling.transfer import copy_to


class DecodeStep:
    """The host sends three numbers a line; the rest is made on the device from the tables by row.

    A step is `stage` and then one of two bodies: `draw`, whose tokens are `drawn`, or `forward`, whose logits are
    `logits`, for rows that want more than a draw. Padding computes the row of the ReqTable that is no request's, in the
    dump slot of the KVBuffer.
    """

    def __init__(
        self,
        model: BaseModel,
        sampler: Sampler,
        req_table: ReqTable,
        kv: KVBuffer,
        backend: AttentionBackend,
        max_lines: int,
    ):
        device = req_table.table.device
        self._model, self._sampler, self._req_table, self._kv, self._backend = model, sampler, req_table, kv, backend
        self._columns = torch.zeros(3 * max_lines, dtype=torch.int32, device=device)
        self._line = torch.arange(max_lines + 1, dtype=torch.int32, device=device)
        self._one = torch.ones(max_lines, dtype=torch.int32, device=device)
        self._drawn = torch.zeros(2 * max_lines, dtype=torch.int32, device=device)
        self._logits = torch.empty(max_lines, model.vocab_size, device=device)
        self._padding = np.array([[req_table.max_rows], [0], [kv.num_slots]], dtype=np.int32)

    def stage(self, rows: np.ndarray, positions: np.ndarray, slots: np.ndarray, lines: int) -> None:
        """Sends the step's rows, int32 [n] each, and padding up to `lines` behind them."""
        columns = np.concatenate((np.stack((rows, positions, slots)), self._padding.repeat(lines - len(rows), 1)), 1)
        copy_to(self._columns[: 3 * lines], columns.reshape(-1))

    def drawn(self, lines: int) -> Tensor:
        """int32 [2, lines]: tokens and the bits of their logprobs."""
        return self._drawn[: 2 * lines].view(2, lines)

    def logits(self, lines: int) -> Tensor:
        """float32 [lines, V]."""
        return self._logits[:lines]

    def draw(self, lines: int) -> None:
        logits, rows, output_index = self._forward(lines)
        self.drawn(lines).copy_(self._sampler.draw(logits, rows, output_index))

    def forward(self, lines: int) -> None:
        self.logits(lines).copy_(self._forward(lines)[0])

    def _forward(self, lines: int) -> tuple[Tensor, Tensor, Tensor]:
        """(logits, rows, output_index)."""
        columns = self._columns[: 3 * lines].view(3, lines)
        rows, positions, slots = columns
        table = self._sampler.table
        ids, lens = prepare_decode(columns, table.last_token, table.prompt_len, self._req_table.table)
        kv_lens, rope_lens, output_index = lens
        starts, lengths, cu_lengths = positions, self._one[:lines], self._line[: lines + 1]
        state = InferStateInfo(
            *(positions, slots, rows, starts, lengths, kv_lens, cu_lengths, rope_lens),
            num_decode=lines,
            max_chunk=0,
            req_table=self._req_table.table,
            kv=self._kv,
            backend=self._backend,
        )
        return self._model.forward(ids, state), rows, output_index
