"""InferStateInfo: the facts of one step, on the device, that every layer reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lightllm.common.basemodel.attention.backend import AttentionBackend
    from lightllm.common.basemodel.triton_kernel.decode_plan import DecodePlan
    from lightllm.common.basemodel.triton_kernel.quantized_kv import LayerKV


class KVStore(Protocol):
    """What a layer needs of a KV buffer (the implementations live in common/kv_cache_mem_manager)."""

    def layer(self, index: int) -> LayerKV:
        """One layer of the cache: [slots + 1, *slot_shape(index) of the model]."""


class Chunks(NamedTuple):
    """The rows of a step that compute more than one token or their prompt."""

    rows: Tensor  # int32 [C]
    starts: Tensor  # int32 [C]
    lengths: Tensor  # int32 [C]
    cu_lengths: Tensor  # int32 [C + 1], counted from the step's token `chunk_base`
    longest: int  # no length is larger


@dataclass(frozen=True)
class HostChunk:
    """What the host knows of a chunk."""

    row: int
    first: int  # its first token in the step
    start: int
    length: int
    first_slot: int | None = None  # where its tokens' slots are neighbours


@dataclass(frozen=True)
class ChunkContext:
    """All tokens that the chunks' rows have so far, packed row after row."""

    slots: Tensor  # int32 [chunk_kv]
    cu_lengths: Tensor  # int32 [C]: where each row begins


@dataclass(frozen=True)
class InferStateInfo:
    """One step: B rows, T tokens. The first `num_decode` rows compute one token each, the others a chunk.

    The tokens of row i are [cu_lengths[i], cu_lengths[i + 1]) and have the positions starts[i] ... kv_lens[i] - 1.
    """

    positions: Tensor  # int32 [T]
    slots: Tensor  # int32 [T]: where K and V of each token go
    rows: Tensor  # int32 [B]: row of req_table
    starts: Tensor  # int32 [B]: tokens of the row that are in the cache already
    lengths: Tensor  # int32 [B]: tokens of the row in this step
    kv_lens: Tensor  # int32 [B] = starts + lengths
    cu_lengths: Tensor  # int32 [B + 1]
    rope_lens: Tensor  # int32 [T] = max(prompt length of the row, position + 1), read by dynamic and longrope scaling
    num_decode: int
    max_chunk: int  # longest chunk, 0 without chunks
    req_table: Tensor  # int32 [rows, max_len]: slot of each position of each row
    kv: KVStore
    backend: AttentionBackend
    decode_plans: dict[tuple, DecodePlan] = field(default_factory=dict)  # by kind of layer
    chunk_kv: int = 0  # kv_lens of all chunks together
    host_chunks: Sequence[HostChunk] = ()  # empty where the lengths are on the device alone
    # int32 [T], row of req_table of each token: in steps of a fixed size, whose launches may depend on no length.
    # Decode rows with kv_lens 0 are none there; their tokens, if there are, belong to chunks.
    token_rows: Tensor | None = None

    @cached_property
    def chunks(self) -> Chunks:
        """The rows behind the decode rows, cut out once per step for all layers."""
        n, base = self.num_decode, self.chunk_base
        cu_lengths = self.cu_lengths[n:] - base if base else self.cu_lengths[n:]
        return Chunks(self.rows[n:], self.starts[n:], self.lengths[n:], cu_lengths, self.max_chunk)

    @property
    def chunk_base(self) -> int:
        """The token from which the chunks' offsets count."""
        return self.num_decode if self.token_rows is None else 0

    @cached_property
    def chunk_context(self) -> ChunkContext:
        """Where the chunks' rows lie, for attention that needs their cache as a whole; made once per step."""
        chunks, kv_lens = self.chunks, self.kv_lens[self.num_decode :]
        first = kv_lens.cumsum(0) - kv_lens
        origin = chunks.rows.long() * self.req_table.stride(0) - first  # where a row's table would begin
        flat = torch.repeat_interleave(origin, kv_lens, output_size=self.chunk_kv)
        flat += torch.arange(self.chunk_kv, device=kv_lens.device)
        return ChunkContext(self.req_table.view(-1).index_select(0, flat), first.int())

    def decode_plan(self, kind: tuple, make: Callable[[], DecodePlan]) -> DecodePlan:
        """Made by the first layer of each kind, for all of them."""
        if kind not in self.decode_plans:
            self.decode_plans[kind] = make()
        return self.decode_plans[kind]

    @cached_property
    def lone_tokens(self) -> tuple[Tensor, Tensor]:
        """(rows, kv_lens) of tokens that attention may take one by one: decode rows, in steps of a fixed size all."""
        return self.decode if self.token_rows is None else (self.token_rows, self.positions + 1)

    @cached_property
    def decode(self) -> tuple[Tensor, Tensor]:
        """(rows, kv_lens) of the decode rows."""
        return self.rows[: self.num_decode], self.kv_lens[: self.num_decode]
