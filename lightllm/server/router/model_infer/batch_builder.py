"""BatchBuilder: a StepPlan becomes ids, InferStateInfo and the rows to sample."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lightllm.common.basemodel.attention.backend import AttentionBackend
from lightllm.common.basemodel.infer_struct import InferStateInfo
from lightllm.common.kv_cache_mem_manager.kv_buffer import KVBuffer
from lightllm.common.kv_cache_mem_manager.req_table import ReqTable
from lightllm.common.sampling.sampling_batch import RowSampling, RowStart, SamplingBatch
from lightllm.common.sampling.transfer import to_device
from lightllm.server.core.messages import NewRow, StepPlan, sample_of, unpack


@dataclass(frozen=True)
class PromptSpan:
    """A chunk of a row that asks for prompt_logprobs: its tokens predict the ids behind them."""

    row: int
    start: int  # position of the first predicted id
    k: int  # likeliest ids to report per position
    index: Tensor  # int64 [count]: tokens of the step
    targets: Tensor  # int64 [count]: the id that follows each


@dataclass(frozen=True)
class Batch:
    ids: Tensor  # int64 [T]
    state: InferStateInfo
    sampling: SamplingBatch
    prompt_spans: list[PromptSpan]


def row_sampling(new: NewRow) -> RowSampling:
    """The resolved parameters of a sequence, as the sampler reads them."""
    p = new.sampling
    return RowSampling(
        temperature=_given(p.temperature),
        top_k=int(_given(p.top_k)),
        top_p=_given(p.top_p),
        min_p=_given(p.min_p),
        seed=int(_given(p.seed)),
        sample_index=sample_of(new.sequence_id),
        repetition=p.repetition_penalty,
        presence=p.presence_penalty,
        frequency=p.frequency_penalty,
        input_penalty=p.input_penalty,
        bias_ids=np.array(list(p.logit_bias), dtype=np.int64),
        bias_values=np.array(list(p.logit_bias.values()), dtype=np.float32),
        allowed_ids=np.array(p.allowed_token_ids, dtype=np.int64),
        stop_ids=np.unique(np.array(p.stop_token_ids, dtype=np.int64)),
        min_new_tokens=p.min_new_tokens,
        length_decay=p.exponential_decay_length_penalty,
        top_logprobs=p.logprobs or 0,
        grammar=p.guided_grammar or "",
    )


def _given(value: float | None) -> float:
    assert value is not None, "sampling parameters must be resolved"
    return value


class BatchBuilder:
    """Keeps what the host knows of each row: its ids, its prompt's length, its wish for prompt_logprobs.

    last_token int64 [max_rows + 1]: the last sampled token of each row; decode rows feed from it.
    """

    def __init__(self, req_table: ReqTable, kv: KVBuffer, backend: AttentionBackend, last_token: Tensor):
        rows = req_table.max_rows + 1
        self.device = req_table.table.device
        self._last_token = last_token
        self._req_table = req_table
        self._kv = kv
        self._backend = backend
        self._token_ids: dict[int, np.ndarray] = {}
        self._prompt_logprobs: dict[int, int] = {}
        self._prompt_lens = np.zeros(rows, dtype=np.int32)

    def start_rows(self, plan: StepPlan) -> list[RowStart]:
        """Forgets the rows that ended, then notes the new ones; returns what the sampler must know of them."""
        for row in unpack(plan.ended, np.int32).tolist():
            self._token_ids.pop(row, None)
            self._prompt_logprobs.pop(row, None)
        self._link_cached([new for new in plan.new_rows if new.cached])
        return [self._start(new) for new in plan.new_rows]

    def _link_cached(self, rows: list[NewRow]) -> None:
        """Lets rows find the slots of the prefixes that the cache holds for them."""
        if not rows:
            return
        slots = [unpack(new.cached, np.int32) for new in rows]
        index = [new.row * self._req_table.max_len + np.arange(len(own)) for new, own in zip(rows, slots)]
        wide, narrow = self._copy(wide=index, narrow=slots)
        self._req_table.write(torch.cat(wide), torch.cat(narrow))

    def _start(self, new: NewRow) -> RowStart:
        ids: np.ndarray = unpack(new.token_ids, np.int32)
        self._token_ids[new.row] = ids
        self._prompt_lens[new.row] = new.prompt_len
        self._prompt_logprobs.pop(new.row, None)
        # A resumed sequence has reported, and the samples of a request share its prompt.
        if new.sampling.prompt_logprobs is not None and len(ids) == new.prompt_len and sample_of(new.sequence_id) == 0:
            self._prompt_logprobs[new.row] = new.sampling.prompt_logprobs
        return RowStart(new.row, ids, new.prompt_len, row_sampling(new))

    def build(self, plan: StepPlan) -> Batch:
        """Lays the step out in one host buffer, copies it once, and writes the new slots into the request table."""
        n = plan.num_decode
        rows, starts, lengths = (unpack(column, np.int32) for column in (plan.rows, plan.starts, plan.lengths))
        slots = unpack(plan.slots, np.int32)
        kv_lens = starts + lengths
        cu_lengths = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum(lengths, out=cu_lengths[1:])
        if n == len(rows):
            token_rows, positions = rows, starts
        else:
            token_rows = np.repeat(rows, lengths)
            positions = np.arange(len(slots), dtype=np.int32) + np.repeat(starts - cu_lengths[:-1], lengths)
        sampled = unpack(plan.samples, np.uint8).nonzero()[0]
        sampled_rows = rows[sampled]
        output_index = kv_lens[sampled] - self._prompt_lens[sampled_rows]
        spans = self._prompt_spans(rows, starts, kv_lens, cu_lengths, n) if self._prompt_logprobs else []
        wide, narrow = self._copy(
            wide=[
                token_rows.astype(np.int64) * self._req_table.max_len + positions,
                cu_lengths[1:][sampled] - 1,
                sampled_rows,
                rows[:n],
                self._chunk_ids(rows[n:], starts[n:], kv_lens[n:]),
                *(array for *_, index, targets in spans for array in (index, targets)),
            ],
            narrow=[
                positions,
                slots,
                rows,
                starts,
                lengths,
                kv_lens,
                cu_lengths,
                np.maximum(self._prompt_lens[token_rows], positions + 1),
                output_index,
            ],
        )
        self._req_table.write(wide[0], narrow[1])
        ids = self._last_token.index_select(0, wide[3])
        state = InferStateInfo(
            positions=narrow[0],
            slots=narrow[1],
            rows=narrow[2],
            starts=narrow[3],
            lengths=narrow[4],
            kv_lens=narrow[5],
            cu_lengths=narrow[6],
            rope_lens=narrow[7],
            num_decode=n,
            max_chunk=int(lengths[n:].max(initial=0)),
            logits_index=wide[1],
            req_table=self._req_table.table,
            kv=self._kv,
            backend=self._backend,
            chunk_kv=int(kv_lens[n:].sum()),
        )
        return Batch(
            ids=ids if n == len(rows) else torch.cat((ids, wide[4])),
            state=state,
            sampling=SamplingBatch(sampled_rows, output_index, wide[2], narrow[8]),
            prompt_spans=[
                PromptSpan(row, start, k, index, targets)
                for (row, start, k, *_), index, targets in zip(spans, wide[5::2], wide[6::2])
            ],
        )

    def sampling(self, rows: np.ndarray, kv_lens: np.ndarray) -> SamplingBatch:
        """Rows int32 [S] that are all sampled, with so many tokens each."""
        output_index = kv_lens - self._prompt_lens[rows]
        device_rows, device_output_index = to_device(np.stack((rows, output_index)), self.device)
        return SamplingBatch(rows, output_index, device_rows, device_output_index)

    def _chunk_ids(self, rows: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """The ids that chunks feed, one after the other."""
        if not len(rows):
            return rows
        return np.concatenate(
            [self._token_ids[row][s:e] for row, s, e in zip(rows.tolist(), starts.tolist(), ends.tolist())]
        )

    def _prompt_spans(
        self, rows: np.ndarray, starts: np.ndarray, kv_lens: np.ndarray, cu_lengths: np.ndarray, n: int
    ) -> list[tuple[int, int, int, np.ndarray, np.ndarray]]:
        """The fields of a PromptSpan, arrays still on the host, for each chunk whose row asks."""
        spans = []
        for i in range(n, len(rows)):
            row, start = int(rows[i]), int(starts[i])
            end = min(int(kv_lens[i]) + 1, int(self._prompt_lens[row]))
            if row in self._prompt_logprobs and end > start + 1:
                targets = self._token_ids[row][start + 1 : end]
                index = np.arange(len(targets)) + cu_lengths[i]
                spans.append((row, start + 1, self._prompt_logprobs[row], index, targets))
        return spans

    def _copy(self, wide: list[np.ndarray], narrow: list[np.ndarray]) -> tuple[list[Tensor], list[Tensor]]:
        """The arrays as int64 and as int32 tensors on the device, cut out of one buffer that is copied once."""
        middle = 2 * sum(map(len, wide))
        buffer = np.empty(middle + sum(map(len, narrow)), dtype=np.int32)
        np.concatenate(wide, out=buffer[:middle].view(np.int64))
        np.concatenate(narrow, out=buffer[middle:])
        device = to_device(buffer, self.device)
        return (
            list(device[:middle].view(torch.int64).split([len(array) for array in wide])),
            list(device[middle:].split([len(array) for array in narrow])),
        )
