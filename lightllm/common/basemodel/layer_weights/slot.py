"""Slots: what a family's weights are called in its checkpoint, their shapes, and how one rank cuts them."""

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from lightllm.distributed.parallel_state import ParallelState


class Shard(Enum):
    NONE = "none"  # every rank holds all of it
    COLUMN = "column"  # output features are cut: each part first, then the parts are joined
    ROW = "row"  # input features are cut: the product is a partial sum, all-reduced
    VOCAB = "vocab"  # output features are cut into equal runs, the last one padded


@dataclass(frozen=True)
class Expert:
    """One of `total` experts in a tensor of all: [experts, outputs, inputs], transposed [experts, inputs, outputs]."""

    index: int
    total: int
    transposed: bool = False


@dataclass(frozen=True)
class Part:
    """Output features that one checkpoint tensor gives to a slot.

    `rows` picks them out of a fused tensor of `total` features; it is an index and not a function of the tensor, so
    that the same rule applies to packed layouts. Runs of `block` features are held `copies` times: KV heads that ranks
    share. The tensor is called name.leaf and its bias name.bias, or without a leaf name and name_bias; `bare` ones have
    none, whatever the slot has.
    """

    name: str
    size: int
    rows: slice | Tensor | None = None
    total: int = 0
    block: int = 1
    copies: int = 1
    leaf: str = "weight"
    expert: Expert | None = None
    bare: bool = False

    def tensors(self, prefix: str, bias: bool) -> list[str]:
        """Names in the checkpoint: of the weight and, with `bias`, of the bias."""
        weight = f"{prefix}{self.name}.{self.leaf}" if self.leaf else f"{prefix}{self.name}"
        return [weight, f"{prefix}{self.name}.bias" if self.leaf else f"{weight}_bias"][: 1 + bias]

    def local_rows(self, shard: Shard, parallel: ParallelState) -> slice | Tensor:
        """Which rows of the checkpoint tensor this rank holds, in its order."""
        rows: slice | Tensor
        if shard is Shard.COLUMN:
            share = self.size * self.copies // parallel.size
            rows = self._uncopied(torch.arange(share) + parallel.rank * share)
        elif shard is Shard.VOCAB:
            share = padded_share(self.size, parallel)
            rows = slice(min(parallel.rank * share, self.size), min((parallel.rank + 1) * share, self.size))
        else:
            rows = slice(0, self.size)
        if self.rows is None:
            return rows
        return as_slice(
            torch.arange(self.rows.stop)[self.rows][rows] if isinstance(self.rows, slice) else self.rows[rows]
        )

    def _uncopied(self, features: Tensor) -> slice | Tensor:
        if self.copies == 1:
            return slice(int(features[0]), int(features[-1]) + 1)
        return as_slice(features // self.block // self.copies * self.block + features % self.block)


@dataclass(frozen=True)
class Slot:
    """One weight of a layer: parts joined along the output features; `inputs` is None for vectors (norms). `dtype` is
    for weights that are held in another one than the model's."""

    parts: tuple[Part, ...]
    inputs: int | None
    shard: Shard = Shard.NONE
    bias: bool = False
    dtype: torch.dtype | None = None

    def local_inputs(self, parallel: ParallelState) -> slice | None:
        """Which input features this rank holds; None for vectors."""
        if self.inputs is None:
            return None
        if self.shard is not Shard.ROW:
            return slice(0, self.inputs)
        share = parallel.share(self.inputs)
        return slice(parallel.rank * share, (parallel.rank + 1) * share)


def whole(
    name: str,
    outputs: int,
    inputs: int | None = None,
    bias: bool = False,
    leaf: str = "weight",
    dtype: torch.dtype | None = None,
) -> Slot:
    """A vector, as a norm's, or a small matrix, which every rank holds whole."""
    return Slot((Part(name, outputs, leaf=leaf),), inputs, bias=bias, dtype=dtype)


def column(*parts: Part, inputs: int | None, bias: bool = False) -> Slot:
    return Slot(parts, inputs, Shard.COLUMN, bias)


def row(name: str, outputs: int, inputs: int, bias: bool = False) -> Slot:
    return Slot((Part(name, outputs),), inputs, Shard.ROW, bias)


def vocabulary(name: str, size: int, inputs: int, bias: bool = False) -> Slot:
    """Embedding or head: one row per token."""
    return Slot((Part(name, size),), inputs, Shard.VOCAB, bias)


def padded_share(size: int, parallel: ParallelState) -> int:
    """Rows per rank of a vocabulary of `size`, rounded up."""
    return -(-size // parallel.size)


def as_slice(index: Tensor) -> slice | Tensor:
    """The same selection as a slice if it is one run, so that only that run is read from the file."""
    first, n = int(index[0]), len(index)
    return slice(first, first + n) if torch.equal(index, torch.arange(first, first + n)) else index
