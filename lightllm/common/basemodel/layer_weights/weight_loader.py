"""WeightLoader: declares what slots want, then fills it from a checkpoint, proving that all of both was used."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lightllm.common.basemodel.layer_weights.base_layer_weight import Weight, make_weight
from lightllm.common.basemodel.layer_weights.hf_load_utils import Checkpoint, CheckpointError, TensorReader
from lightllm.common.basemodel.layer_weights.slot import Part, Shard, Slot, padded_share
from lightllm.distributed.parallel_state import ParallelState

Progress = Callable[[float, float, str], None]


@dataclass(frozen=True)
class Copy:
    """Fill `target` with these rows (and input features) of a checkpoint tensor of the shape [size, inputs] or [size].

    `size` is None where the part is cut out of a fused tensor, whose length no slot knows.
    """

    slot: str
    target: Tensor
    rows: slice | Tensor
    columns: slice | None
    size: int | None
    inputs: int | None

    def run(self, reader: TensorReader) -> None:
        last = self.rows.stop if isinstance(self.rows, slice) else int(self.rows.max()) + 1
        shape = reader.shape
        fits = len(shape) > 0 and (last <= shape[0] if self.size is None else shape[0] == self.size)
        if not fits or shape[1:] != (() if self.inputs is None else (self.inputs,)):
            wanted = [self.size or f">={last}"] + ([] if self.inputs is None else [self.inputs])
            raise CheckpointError(
                f"{reader.where}: slot {self.slot!r} wants the shape [{', '.join(map(str, wanted))}], "
                f"the checkpoint has {list(shape)}"
            )
        if self.target.numel():  # a rank may hold nothing but padding
            self.target.copy_(reader.read(self.rows, self.columns))


class WeightLoader:
    """Targets are allocated on the device in the model's dtype when slots are declared; tensors are read one by one,
    only this rank's part, straight into them."""

    def __init__(self, parallel: ParallelState, dtype: torch.dtype, device: torch.device) -> None:
        self.parallel, self.dtype, self.device = parallel, dtype, device
        self.copies: dict[str, list[Copy]] = {}

    def declare(self, slots: Mapping[str, Slot], prefix: str = "") -> dict[str, Weight]:
        """Allocate the slots' weights, unfilled."""
        return {name: self._declare(name, slot, prefix) for name, slot in slots.items()}

    def _declare(self, name: str, slot: Slot, prefix: str) -> Weight:
        columns = slot.local_inputs(self.parallel)
        held = [self._held(part, slot.shard) for part in slot.parts]
        width = () if columns is None else (columns.stop - columns.start,)
        weight = self._empty(sum(held), *width, zeroed=slot.shard is Shard.VOCAB)
        bias = self._empty(sum(held), zeroed=slot.shard is Shard.VOCAB) if slot.bias else None
        at = 0
        for part, n in zip(slot.parts, held):
            key = f"{prefix}{part.name}"
            self._want(f"{key}.{part.leaf}", name, part, slot, weight[at : at + n], columns, slot.inputs)
            if bias is not None:
                self._want(f"{key}.bias", name, part, slot, bias[at : at + n], None, None)
            at += n
        return make_weight(slot, weight, bias, self.parallel)

    def _held(self, part: Part, shard: Shard) -> int:
        if shard is Shard.VOCAB:
            return padded_share(part.size, self.parallel)
        return self.parallel.share(part.size * part.copies) if shard is Shard.COLUMN else part.size

    def _empty(self, *shape: int, zeroed: bool = False) -> Tensor:
        return (torch.zeros if zeroed else torch.empty)(*shape, dtype=self.dtype, device=self.device)

    def _want(
        self, key: str, name: str, part: Part, slot: Slot, target: Tensor, columns: slice | None, inputs: int | None
    ) -> None:
        rows = part.local_rows(slot.shard, self.parallel)
        if isinstance(rows, slice):
            target = target[: rows.stop - rows.start]  # the rest of a padded vocabulary stays zero
        size = part.size if part.rows is None else None
        self.copies.setdefault(key, []).append(Copy(name, target, rows, columns, size, inputs))

    def fill(self, checkpoint: Checkpoint, ignored: Callable[[str], bool], progress: Progress) -> None:
        """Read everything that was declared. CheckpointError names slots without tensors and tensors without slots,
        but for those that are `ignored`."""
        if missing := [name for name in self.copies if name not in checkpoint.files]:
            slots = sorted({copy.slot for name in missing for copy in self.copies[name]})
            raise CheckpointError(
                f"{checkpoint.directory}: the checkpoint lacks {_some(missing)} (slots: {_some(slots)})"
            )
        unused = [n for n in checkpoint.files if n not in self.copies and not ignored(n)]
        if unused:
            raise CheckpointError(f"{checkpoint.directory}: no slot of the model takes {_some(sorted(unused))}")
        done, total = 0, sum(copy.target.nbytes for copies in self.copies.values() for copy in copies)
        for reader in checkpoint.stream(self.copies):
            for copy in self.copies[reader.name]:
                copy.run(reader)
                done += copy.target.nbytes
            progress(done, total, Path(reader.file).name)

    def randomize(self, progress: Progress) -> None:
        """Random weights of a sane scale instead of a checkpoint's; the same ones in every run."""
        done, total = 0, sum(copy.target.nbytes for copies in self.copies.values() for copy in copies)
        generator = torch.Generator(self.device)
        for name, copies in self.copies.items():
            for place, copy in enumerate(copies):
                cut = copy.target.shape != (copy.size, *(() if copy.inputs is None else (copy.inputs,)))
                generator.manual_seed(zlib.crc32(f"{name}/{place}/{self.parallel.rank if cut else 0}".encode()))
                if copy.target.dim() == 1:
                    copy.target.uniform_(0.5, 1.5, generator=generator)
                else:
                    copy.target.normal_(0, (copy.inputs or 1) ** -0.5, generator=generator)
                done += copy.target.nbytes
            progress(done, total, "random weights")


def _some(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
