"""DecodeStep: a step in which every row computes one token, on buffers that stay, so that CUDA graphs can replay it."""

import numpy as np
import torch
from torch import Tensor

from lightllm.common.basemodel.infer_struct import InferStateInfo
from lightllm.common.basemodel.triton_kernel.host_memory import ADDRESS, deliver
from lightllm.common.basemodel.triton_kernel.prepare_decode import prepare_decode
from lightllm.common.sampling.transfer import send
from lightllm.server.router.model_infer.batch_builder import Parts


class DecodeStep:
    """The host sends three numbers a line; the rest is made on the device from the tables by row.

    A step is `stage` and then one of two bodies: `draw`, which answers on the host, or `forward`, whose logits are
    `logits`, for rows that want more than a draw. Padding computes the row of the ReqTable that is no request's, in the
    dump slot of the KVBuffer.
    """

    def __init__(self, parts: Parts, max_lines: int):
        self._parts, device = parts, parts.req_table.table.device
        self._letter = torch.zeros(ADDRESS + 3 * max_lines, dtype=torch.int32, device=device)
        self._line = torch.arange(max_lines + 1, dtype=torch.int32, device=device)
        self._one = torch.ones(max_lines, dtype=torch.int32, device=device)
        self._logits = torch.empty(max_lines, parts.model.vocab_size, device=device)
        self._padding = np.array([[parts.req_table.max_rows], [0], [parts.kv.num_slots]], dtype=np.int32)

    def stage(self, rows: np.ndarray, positions: np.ndarray, slots: np.ndarray, lines: int) -> Tensor:
        """Sends the step's rows, int32 [n] each, and padding up to `lines` behind them. Gives `Sampled.drawn` on the
        host, to which `draw` writes; to be kept until the step is done."""
        columns = np.concatenate((np.stack((rows, positions, slots)), self._padding.repeat(lines - len(rows), 1)), 1)
        answer = send(self._letter[: ADDRESS + 3 * lines], columns.reshape(-1), 2 * lines).view(2, lines)
        self._last_answer = answer  # what `draw` writes to is never free memory, whoever forgets it
        return answer

    def logits(self, lines: int) -> Tensor:
        """float32 [lines, V]."""
        return self._logits[:lines]

    def draw(self, lines: int) -> None:
        logits, rows, output_index = self._forward(lines)
        deliver(self._parts.sampler.draw(logits, rows, output_index), self._letter[:ADDRESS])

    def forward(self, lines: int) -> None:
        self.logits(lines).copy_(self._forward(lines)[0])

    def _forward(self, lines: int) -> tuple[Tensor, Tensor, Tensor]:
        """(logits, rows, output_index)."""
        columns = self._letter[ADDRESS : ADDRESS + 3 * lines].view(3, lines)
        rows, positions, slots = columns
        parts, table = self._parts, self._parts.sampler.table
        ids, lens = prepare_decode(columns, table.last_token, table.prompt_len, parts.req_table.table)
        kv_lens, rope_lens, output_index = lens
        state = InferStateInfo(
            positions=positions,
            slots=slots,
            rows=rows,
            starts=positions,
            lengths=self._one[:lines],
            kv_lens=kv_lens,
            cu_lengths=self._line[: lines + 1],
            rope_lens=rope_lens,
            num_decode=lines,
            max_chunk=0,
            req_table=parts.req_table.table,
            kv=parts.kv,
            backend=parts.backend,
        )
        return parts.model.forward(ids, state), rows, output_index
