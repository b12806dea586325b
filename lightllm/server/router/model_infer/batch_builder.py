"""BatchBuilder: a StepPlan becomes arrays on the host, then ids, InferStateInfo and the rows to sample."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lightllm.common.basemodel.attention.backend import AttentionBackend
from lightllm.common.basemodel.basemodel import BaseModel
from lightllm.common.basemodel.infer_struct import HostChunk, InferStateInfo
from lightllm.common.kv_cache_mem_manager.kv_buffer import KVBuffer, ReqTable
from lightllm.common.sampling.sampler import Sampler
from lightllm.common.sampling.sampling_batch import RowSampling, RowStart, SamplingBatch
from lightllm.common.sampling.transfer import to_device, to_device_at_once
from lightllm.server.core.messages import NewRow, StepPlan, sample_of, unpack


@dataclass(frozen=True)
class Parts:
    """What steps are computed with."""

    model: BaseModel
    sampler: Sampler
    req_table: ReqTable
    kv: KVBuffer
    backend: AttentionBackend


@dataclass(frozen=True)
class PromptSpan:
    """A chunk of a row that asks for prompt_logprobs: its tokens predict the ids behind them."""

    row: int
    start: int  # position of the first predicted id
    k: int  # likeliest ids to report per position
    index: Tensor  # int64 [count]: tokens of the step
    targets: Tensor  # int64 [count]: the id that follows each


@dataclass(frozen=True)
class StepArrays:
    """A step on the host: B rows, decode rows first, and T tokens; int32."""

    num_decode: int
    rows: np.ndarray  # [B]
    starts: np.ndarray  # [B]
    lengths: np.ndarray  # [B]
    cu_lengths: np.ndarray  # [B + 1]
    slots: np.ndarray  # [T]
    token_rows: np.ndarray  # [T]: row of each token
    positions: np.ndarray  # [T]
    rope_lens: np.ndarray  # [T]: see InferStateInfo
    chunk_ids: np.ndarray  # [T - num_decode]
    sampled_rows: np.ndarray  # [S]
    sampled_tokens: np.ndarray  # [S]: where the last tokens of these rows are in the step
    output_index: np.ndarray  # [S]: tokens that each of these rows has generated

    @property
    def kv_lens(self) -> np.ndarray:
        return self.starts + self.lengths

    @property
    def num_lone(self) -> int:
        """Rows of one token before the first of several: decode rows, and prompts whose other tokens are cached."""
        return int(np.append(self.lengths > 1, True).argmax())


@dataclass(frozen=True)
class Outcome:
    """What is wanted of a step."""

    logits_index: Tensor  # int64 [S]: tokens to sample from
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
        stop_ids=np.array(sorted({*p.stop_token_ids}), dtype=np.int64),
        min_new_tokens=p.min_new_tokens,
        length_decay=p.exponential_decay_length_penalty,
        top_logprobs=p.logprobs or 0,
        grammar=p.guided_grammar or "",
    )


def _given(value: float | None) -> float:
    assert value is not None, "sampling parameters must be resolved"
    return value


class BatchBuilder:
    """Keeps what the host knows of each row: its ids, its prompt's length, its wish for prompt_logprobs."""

    def __init__(self, parts: Parts):
        self.device = parts.req_table.table.device
        self._parts, self._req_table = parts, parts.req_table
        self._token_ids: dict[int, np.ndarray] = {}
        self._prompt_logprobs: dict[int, int] = {}
        self._prompt_lens = np.zeros(parts.req_table.max_rows + 1, dtype=np.int32)

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
        wide, narrow = to_device_at_once(index, slots, self.device)
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

    def arrays(self, plan: StepPlan) -> StepArrays:
        n = plan.num_decode
        rows, starts, lengths = (unpack(column, np.int32) for column in (plan.rows, plan.starts, plan.lengths))
        slots = unpack(plan.slots, np.int32)
        cu_lengths = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum(lengths, out=cu_lengths[1:])
        if n == len(rows):
            token_rows, positions = rows, starts
        else:
            token_rows = np.repeat(rows, lengths)
            positions = np.arange(len(slots), dtype=np.int32) + np.repeat(starts - cu_lengths[:-1], lengths)
        chunk_ids = self._chunk_ids(rows[n:], starts[n:], (starts + lengths)[n:])
        sampled = unpack(plan.samples, np.uint8).nonzero()[0]
        sampled_rows, sampled_tokens = rows[sampled], cu_lengths[1:][sampled] - 1
        output_index = positions[sampled_tokens] + 1 - self._prompt_lens[sampled_rows]
        rope_lens = np.maximum(self._prompt_lens[token_rows], positions + 1)
        columns = rows, starts, lengths, cu_lengths, slots, token_rows, positions, rope_lens, chunk_ids
        return StepArrays(n, *columns, sampled_rows, sampled_tokens, output_index)

    def build(self, step: StepArrays) -> tuple[Tensor, InferStateInfo]:
        """Copies the step to the device at once and writes the new slots into the request table; ids int64 [T]."""
        n, kv_lens = step.num_decode, step.kv_lens
        flat_index = step.token_rows.astype(np.int64) * self._req_table.max_len + step.positions
        by_token, by_row = (step.positions, step.slots), (step.rows, step.starts, step.lengths, kv_lens)
        wide, narrow = to_device_at_once(
            wide=(flat_index, step.rows[:n], step.chunk_ids),
            narrow=(*by_token, *by_row, step.cu_lengths, step.rope_lens),
            device=self.device,
        )
        where, decode_rows, chunk_ids = wide
        positions, slots, rows, starts, lengths, device_kv_lens, cu_lengths, rope_lens = narrow
        self._req_table.write(where, slots)
        ids = self._parts.sampler.table.last_token.index_select(0, decode_rows)
        state = InferStateInfo(
            positions=positions,
            slots=slots,
            rows=rows,
            starts=starts,
            lengths=lengths,
            kv_lens=device_kv_lens,
            cu_lengths=cu_lengths,
            rope_lens=rope_lens,
            num_decode=n,
            max_chunk=int(step.lengths[n:].max(initial=0)),
            req_table=self._req_table.table,
            kv=self._parts.kv,
            backend=self._parts.backend,
            chunk_kv=int(kv_lens[n:].sum()),
            host_chunks=_host_chunks(step),
        )
        return ids if n == len(step.rows) else torch.cat((ids, chunk_ids)), state

    @property
    def scores_prompts(self) -> bool:
        """Whether a row asks for prompt_logprobs."""
        return bool(self._prompt_logprobs)

    def outcome(self, step: StepArrays) -> Outcome | None:
        """Which tokens are sampled and which prompts are scored; None if neither is."""
        spans = self._prompt_spans(step) if self._prompt_logprobs else []
        if not (len(step.sampled_rows) or spans):
            return None
        wide, narrow = to_device_at_once(
            wide=[step.sampled_tokens, *(array for *_, index, targets in spans for array in (index, targets))],
            narrow=[step.sampled_rows, step.output_index],
            device=self.device,
        )
        return Outcome(
            wide[0],
            SamplingBatch(step.sampled_rows, step.output_index, *narrow),
            [
                PromptSpan(row, start, k, index, targets)
                for (row, start, k, *_), index, targets in zip(spans, wide[1::2], wide[2::2])
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

    def _prompt_spans(self, step: StepArrays) -> list[tuple[int, int, int, np.ndarray, np.ndarray]]:
        """The fields of a PromptSpan, arrays still on the host, for each chunk whose row asks."""
        spans = []
        for i in range(step.num_decode, len(step.rows)):
            row, start = int(step.rows[i]), int(step.starts[i])
            end = min(start + int(step.lengths[i]) + 1, int(self._prompt_lens[row]))
            if row in self._prompt_logprobs and end > start + 1:
                targets = self._token_ids[row][start + 1 : end]
                index = np.arange(len(targets)) + step.cu_lengths[i]
                spans.append((row, start + 1, self._prompt_logprobs[row], index, targets))
        return spans


def _host_chunks(step: StepArrays) -> list[HostChunk]:
    chunks = []
    for i in range(step.num_decode, len(step.rows)):
        first, length = int(step.cu_lengths[i]), int(step.lengths[i])
        slots = step.slots[first : first + length]
        first_slot = int(slots[0]) if (np.diff(slots) == 1).all() else None
        chunks.append(HostChunk(int(step.rows[i]), first, int(step.starts[i]), length, first_slot))
    return chunks
