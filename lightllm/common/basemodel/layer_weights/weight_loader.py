"""WeightLoader: declares what slots want, then fills it from a checkpoint, proving that all of both was used."""

import functools
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lightllm.common.basemodel.layer_weights.base_layer_weight import Weight, Weights, make_weight
from lightllm.common.basemodel.layer_weights.experts import ExpertSlot, ExpertsWeight
from lightllm.common.basemodel.layer_weights.hf_load_utils import Checkpoint, CheckpointError, TensorReader
from lightllm.common.basemodel.layer_weights.slot import Expert, Part, Shard, Slot, padded_share
from lightllm.distributed.parallel_state import ParallelState

Progress = Callable[[float, float, str], None]


@dataclass(frozen=True)
class Copy:
    """Fill `target` with these rows (and input features) of a checkpoint tensor of the shape [size, inputs] or [size],
    or of one expert's part of it. `seed` says which random numbers may stand in for it."""

    slot: str
    target: Tensor
    rows: slice | Tensor
    columns: slice | None
    size: int
    inputs: int | None
    expert: Expert | None
    seed: str

    def run(self, reader: TensorReader) -> None:
        wanted: tuple[int, ...] = (self.size,) if self.inputs is None else (self.size, self.inputs)
        if self.expert is not None:
            wanted = (self.expert.total, *(wanted[::-1] if self.expert.transposed else wanted))
        if reader.shape != wanted:
            raise CheckpointError(
                f"{reader.where}: slot {self.slot!r} wants the shape {list(wanted)}, "
                f"the checkpoint has {list(reader.shape)}"
            )
        if self.target.numel():  # a rank may hold nothing but padding
            self.target.copy_(reader.read(self.rows, self.columns, self.expert))


class WeightLoader:
    """Targets are allocated on the device in the model's dtype when slots are declared; tensors are read one by one,
    only this rank's part, straight into them."""

    def __init__(self, parallel: ParallelState, dtype: torch.dtype, device: torch.device) -> None:
        self.parallel, self.dtype, self.device = parallel, dtype, device
        self.copies: dict[str, list[Copy]] = {}
        self.elsewhere: set[str] = set()  # tensors that only other ranks read

    def declare(self, slots: Mapping[str, Slot | ExpertSlot], prefix: str = "") -> Weights:
        """Allocate the slots' weights, unfilled."""
        return {
            name: self._declare_experts(name, slot, prefix)
            if isinstance(slot, ExpertSlot)
            else self._declare(name, slot, prefix)
            for name, slot in slots.items()
        }

    def _declare(self, name: str, slot: Slot, prefix: str) -> Weight:
        new = functools.partial(self._empty, zeroed=slot.shard is Shard.VOCAB, dtype=slot.dtype)
        weight = new(*self._shape(slot))
        bias = new(len(weight)) if slot.bias else None
        self._want_parts(name, slot, prefix, weight, bias)
        return make_weight(slot, weight, bias, self.parallel)

    def _declare_experts(self, name: str, experts: ExpertSlot, prefix: str) -> Weight:
        first = experts.slots[0]
        weight = self._empty(len(experts.held), *self._shape(first))
        bias = self._empty(*weight.shape[:2]) if first.bias else None
        for e, slot in enumerate(experts.slots):
            if e in experts.held:
                at = e - experts.held.start
                self._want_parts(name, slot, prefix, weight[at], None if bias is None else bias[at])
            else:
                self.elsewhere.update(n for part in slot.parts for n in part.tensors(prefix, slot.bias))
        if first.shard is Shard.ROW and self.parallel.rank > 0:
            bias = None  # it is added once
        return ExpertsWeight(weight, bias, experts.held.start)

    def _shape(self, slot: Slot) -> tuple[int, ...]:
        """This rank's part of the weight."""
        columns = slot.local_inputs(self.parallel)
        outputs = sum(self._held(part, slot.shard) for part in slot.parts)
        return (outputs,) if columns is None else (outputs, columns.stop - columns.start)

    def _want_parts(self, name: str, slot: Slot, prefix: str, weight: Tensor, bias: Tensor | None) -> None:
        columns, at = slot.local_inputs(self.parallel), 0
        for place, part in enumerate(slot.parts):
            end = at + self._held(part, slot.shard)
            key, bias_key = part.tensors(prefix, True)
            self._want(key, name, place, slot, weight[at:end], columns, slot.inputs)
            if bias is not None and part.bare:
                bias[at:end] = 0
            elif bias is not None:
                self._want(bias_key, name, place, slot, bias[at:end], None, None)
            at = end

    def _held(self, part: Part, shard: Shard) -> int:
        if shard is Shard.VOCAB:
            return padded_share(part.size, self.parallel)
        return self.parallel.share(part.size * part.copies) if shard is Shard.COLUMN else part.size

    def _empty(self, *shape: int, zeroed: bool = False, dtype: torch.dtype | None = None) -> Tensor:
        return (torch.zeros if zeroed else torch.empty)(*shape, dtype=dtype or self.dtype, device=self.device)

    def _want(
        self, key: str, name: str, place: int, slot: Slot, target: Tensor, columns: slice | None, inputs: int | None
    ) -> None:
        part = slot.parts[place]
        rows = part.local_rows(slot.shard, self.parallel)
        if isinstance(rows, slice):
            target = target[: rows.stop - rows.start]  # the rest of a padded vocabulary stays zero
        size = part.size if part.rows is None else part.total
        corner = rows.start if isinstance(rows, slice) else int(rows[0]), columns.start if columns else 0
        seed = f"{key}/{place}/{part.expert.index if part.expert else 0}/{corner}"
        copy = Copy(name, target, rows, columns, size, inputs, part.expert, seed)
        self.copies.setdefault(key, []).append(copy)

    def fill(self, checkpoint: Checkpoint, ignored: Callable[[str], bool], progress: Progress) -> None:
        """Read everything that was declared. CheckpointError names slots without tensors and tensors without slots,
        but for those that are `ignored`."""
        if missing := [name for name in (*self.copies, *self.elsewhere) if name not in checkpoint.tensors]:
            slots = sorted({copy.slot for name in missing for copy in self.copies.get(name, ())})
            raise CheckpointError(
                f"{checkpoint.directory}: the checkpoint lacks {_some(missing)} (slots: {_some(slots)})"
            )
        known = self.copies.keys() | self.elsewhere
        unused = [n for n in checkpoint.tensors if n not in known and not ignored(n)]
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
        for copies in self.copies.values():
            for copy in copies:
                generator.manual_seed(zlib.crc32(copy.seed.encode()))
                if copy.target.dim() == 1:
                    copy.target.uniform_(0.5, 1.5, generator=generator)
                else:
                    copy.target.normal_(0, (copy.inputs or 1) ** -0.5, generator=generator)
                done += copy.target.nbytes
            progress(done, total, "random weights")


def _some(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
