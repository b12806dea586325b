"""MixedStep: a step with prompt tokens on buffers that stay, of few fixed sizes, so that CUDA graphs can replay it."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lightllm.common.basemodel.cuda_graph import make_runner
from lightllm.common.basemodel.infer_struct import InferStateInfo
from lightllm.common.basemodel.layer_infer.template.residual import Attended
from lightllm.common.basemodel.triton_kernel.host_memory import ADDRESS
from lightllm.common.basemodel.triton_kernel.prepare_decode import prepare_decode
from lightllm.common.sampling.transfer import send
from lightllm.server.router.model_infer.batch_builder import Parts, StepArrays
from lightllm.server.router.model_infer.draw_step import DrawStep


class MixedStep:
    """The host sends five numbers a token and five a row; the rest is made on the device from the tables by row. What
    sampling knows of new rows may follow, before the draw.

    A step of `size` tokens has room for that many rows of one token, decode rows first, and for `_chunk_rows(size)`
    chunks. Tokens of padding are a chunk of the ReqTable's row that is no request's, in the KVBuffer's dump slot; rows
    of padding have no tokens. What stays is the last layer behind its attention: `draw` takes tokens from it, and
    logits are computed from it for those who want more. A step is `stage` and then `run`.
    """

    def __init__(self, parts: Parts, sizes: Sequence[int], draw_sizes: Sequence[int]):
        """sizes, draw_sizes: numbers of tokens and of sampled rows for which CUDA graphs are captured."""
        self._parts, self._max_rows, self._most = parts, parts.req_table.max_rows, max(sizes)
        drawn = ADDRESS + 3 * max(draw_sizes, default=self._max_rows)
        numbers = 5 * self._most + 5 * self._rows(self._most) + 1
        self._buffer = torch.zeros(drawn + numbers, dtype=torch.int32, device=parts.req_table.table.device)
        draw_letter, self._columns = self._buffer.split((drawn, numbers))
        self._attended: Attended | None = None
        self.run = make_runner(self.body, sizes)
        self.draw = DrawStep(parts, lambda: self.attended, draw_letter, draw_sizes)

    def padded(self, step: StepArrays) -> int | None:
        """How many tokens are computed for this step; None if it fits no size."""
        size = self.run.padded(len(step.slots))
        if size is None or size - len(step.slots) > self._parts.req_table.max_len:
            return None
        if (step.positions + 1).sum() > self._parts.model.most_graph_keys:
            return None
        return size if len(step.rows) - step.num_lone <= _chunk_rows(size) else None

    @property
    def attended(self) -> Attended:
        """Of the last step's tokens, in their order, and of others behind them."""
        assert self._attended is not None, "no step was computed"
        return self._attended

    def stage(self, step: StepArrays, size: int, lines: int | None) -> Tensor:
        """Sends the step with its padding, and what `draw` of so many lines is to know. Gives `Sampled.drawn` on the
        host, to which that writes, [2, 0] for no lines; to be kept until the step is done."""
        lines = lines or 0
        n, tokens = step.num_lone, len(step.slots)
        padding, decode, no_row = size - tokens, self._decode_rows(size), self._max_rows
        columns = np.zeros((5, size), np.int32)
        token_rows, positions, slots, ids, rope_lens = columns
        columns[:3, :tokens] = step.token_rows, step.positions, step.slots
        rope_lens[:tokens] = step.rope_lens
        token_rows[tokens:], positions[tokens:], slots[tokens:] = no_row, np.arange(padding), self._parts.kv.num_slots
        ids[: step.num_decode], ids[step.num_decode : tokens] = -1, step.chunk_ids
        rows = np.zeros((4, self._rows(size)), np.int32)
        here = step.rows, step.starts, step.lengths, step.kv_lens
        rows[:, :n] = [column[:n] for column in here]
        chunks = decode + len(step.rows) - n
        rows[:, decode:chunks] = [column[n:] for column in here]
        rows[:, chunks] = no_row, 0, padding, padding
        offsets = np.full(rows.shape[1] + 1, size, np.int32)
        offsets[decode:chunks] = step.cu_lengths[n:-1]
        offsets[chunks] = tokens
        drawn = self.draw.numbers(step, lines) if lines else offsets[:0]
        first = len(self._buffer) - len(self._columns) - len(drawn) - ADDRESS
        numbers = np.concatenate((drawn, columns.reshape(-1), rows.reshape(-1), offsets))
        letter = self._buffer[first : first + ADDRESS + len(numbers)]
        answer = send(letter, numbers, 2 * lines).view(2, lines)
        self._last_answer = answer  # what `draw` writes to is never free memory, whoever forgets it
        return answer

    def body(self, size: int) -> None:
        """From what was staged to `attended`."""
        of_rows = self._rows(size)
        columns, rows, offsets = self._columns[: 5 * size + 5 * of_rows + 1].split((5 * size, 4 * of_rows, of_rows + 1))
        columns, (rows, starts, lengths, kv_lens) = columns.view(5, size), rows.view(4, of_rows)
        token_rows, positions, slots, _, rope_lens = columns
        parts, table = self._parts, self._parts.sampler.table
        ids, _ = prepare_decode(columns[:4], table.last_token, table.prompt_len, parts.req_table.table)
        state = InferStateInfo(
            positions=positions,
            slots=slots,
            rows=rows,
            starts=starts,
            lengths=lengths,
            kv_lens=kv_lens,
            cu_lengths=offsets,
            rope_lens=rope_lens,
            num_decode=self._decode_rows(size),
            max_chunk=size,
            req_table=parts.req_table.table,
            kv=parts.kv,
            backend=parts.backend,
            token_rows=token_rows,
        )
        self._keep(parts.model.attended(ids, state))

    def _keep(self, attended: Attended) -> None:
        tensors = attended.tensors
        if self._attended is None:
            self._attended = attended.with_tensors([part.new_empty(self._most, *part.shape[1:]) for part in tensors])
        for kept, part in zip(self._attended.tensors, tensors):
            kept[: len(part)].copy_(part)

    def _decode_rows(self, size: int) -> int:
        return min(size, self._max_rows)

    def _rows(self, size: int) -> int:
        return self._decode_rows(size) + _chunk_rows(size) + 1  # padding is a chunk too


def _chunk_rows(size: int) -> int:
    """Most chunks of a step: more of them are so short that their attention is not worth a graph's fixed grid."""
    return max(8, size // 16)
