"""Checkpoint: the weight files of a Hugging Face directory, which tensor is in which, read tensor by tensor."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable, Container, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lightllm.common.basemodel.layer_weights.packed import Packing
from lightllm.common.basemodel.layer_weights.slot import Expert
from lightllm.common.basemodel.model_config import ConfigError, read_json


class CheckpointError(ConfigError):
    """Weight files that are missing, damaged or do not fit the model; the message names file or tensor."""


_READABLE = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


@dataclass(frozen=True)
class TensorReader:
    """One tensor of an open file. `stored` is a safetensors slice or a memory-mapped tensor: both are indexed
    without reading the rest."""

    name: str
    file: str
    stored: Any
    shape: tuple[int, ...]

    @property
    def where(self) -> str:
        return f"{self.file}, tensor {self.name!r}"

    def read(self, rows: slice | Tensor, columns: slice | None, expert: Expert | None = None) -> Tensor:
        """The given rows (and columns of a matrix), of one expert in a tensor of all."""
        if not isinstance(rows, slice):
            first, last = int(rows.min()), int(rows.max()) + 1
            return self.read(slice(first, last), columns, expert)[rows - first]
        transposed = expert is not None and expert.transposed and columns is not None
        at = (rows,) if columns is None else (columns, rows) if transposed else (rows, columns)
        part = self.stored[at if expert is None else (expert.index, *at)]
        if part.dtype not in _READABLE:
            raise CheckpointError(f"{self.where}: weights of type {part.dtype} are not supported")
        return part.t() if transposed else part


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies, by the name that it has there, and where its scales do if it is packed."""

    path: Path
    name: str
    scales: Stored | None = None


@dataclass(frozen=True)
class Checkpoint:
    directory: Path
    tensors: dict[str, Stored]
    packing: Packing | None = None

    @classmethod
    def open(cls, directory: str | Path) -> Checkpoint:
        """Find the tensors: the index file decides where there is one, else the single file, else all shards.

        Raises CheckpointError for absent, incomplete, damaged or contradictory files, naming them.
        """
        directory = Path(directory)
        for stem, suffix in (("model", ".safetensors"), ("pytorch_model", ".bin")):
            index = directory / f"{stem}{suffix}.index.json"
            if index.exists():
                return cls(directory, _from_index(index))
            if files := _without_index(directory, stem, suffix):
                return cls(directory, _from_files(files))
        raise CheckpointError(f"{directory} holds no weights: no *.safetensors and no pytorch_model*.bin")

    def renamed(self, rename: Callable[[str], str]) -> Checkpoint:
        """The same tensors under the names that `rename` gives for theirs."""
        return replace(self, tensors={rename(name): stored for name, stored in self.tensors.items()})

    def unpacked(self, packing: Packing | None) -> Checkpoint:
        """Pairs of values and scales as one tensor each, that of the weight; to be called before `renamed`."""
        if packing is None:
            return self
        tensors = dict(self.tensors)
        for name in self.tensors:
            if (names := packing.tensors(name)) and names[1] in self.tensors:
                weight, values, _ = names
                tensors[weight] = replace(tensors.pop(values), scales=tensors.pop(name))
        if len(tensors) == len(self.tensors):
            raise CheckpointError(f"config.json says that the weights are {packing.method}, but no tensor has scales")
        return Checkpoint(self.directory, tensors, packing)

    def stream(self, wanted: Container[str]) -> Iterator[TensorReader]:
        """The wanted tensors, file by file."""
        for path in dict.fromkeys(stored.path for stored in self.tensors.values()):
            with _open(path) as file:
                for name, stored in self.tensors.items():
                    if stored.path == path and name in wanted:
                        reader = file.reader(name, stored.name)
                        yield self._unpack(reader, file, stored.scales) if stored.scales else reader

    def _unpack(self, reader: TensorReader, file: _OpenFile, scales: Stored) -> TensorReader:
        """Reads the scales, from the file that is open if they are there."""
        assert self.packing is not None
        with nullcontext(file) if str(scales.path) == file.file else _open(scales.path) as home:
            read = home.stored(scales.name)[:]
        stored, shape = self.packing.unpack(reader.stored, reader.shape, read)
        return TensorReader(reader.name, reader.file, stored, shape)


def _from_index(index: Path) -> dict[str, Stored]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} holds no weight_map")
    tensors = {name: Stored(index.parent / file, name) for name, file in weight_map.items()}
    if absent := sorted({stored.path.name for stored in tensors.values() if not stored.path.is_file()}):
        raise CheckpointError(f"{index} names files that do not exist: {', '.join(absent)}")
    return tensors


def _without_index(directory: Path, stem: str, suffix: str) -> list[Path]:
    single = directory / f"{stem}{suffix}"
    if single.is_file():
        return [single]
    shards = sorted(directory.glob(f"{stem}-*-of-*{suffix}"))
    if not shards:
        return sorted(directory.glob(f"*{suffix}")) if suffix == ".safetensors" else []
    numbered = [re.search(r"-(\d+)-of-(\d+)\.", path.name) for path in shards]
    total = max((int(m[2]) for m in numbered if m), default=0)
    if absent := sorted(set(range(1, total + 1)) - {int(m[1]) for m in numbered if m}):
        raise CheckpointError(f"{directory}: of {total} {stem}{suffix} shards {absent} are absent")
    return shards


def _from_files(paths: list[Path]) -> dict[str, Stored]:
    tensors: dict[str, Stored] = {}
    for path in paths:
        with _open(path) as file:
            for name in file.names:
                if known := tensors.get(name):
                    raise CheckpointError(f"tensor {name!r} is in both {known.path} and {path.name}, without an index")
                tensors[name] = Stored(path, name)
    return tensors


@dataclass(frozen=True)
class _OpenFile:
    file: str
    names: list[str]
    stored: Callable[[str], Any]

    def reader(self, name: str, stored_name: str) -> TensorReader:
        if stored_name not in self.names:
            raise CheckpointError(f"{self.file} lacks tensor {stored_name!r}, which the index assigns to it")
        stored = self.stored(stored_name)
        shape = stored.shape if isinstance(stored, Tensor) else stored.get_shape()
        return TensorReader(name, self.file, stored, tuple(shape))


def _open(path: Path) -> AbstractContextManager[_OpenFile]:
    return _open_safetensors(path) if path.suffix == ".safetensors" else _open_bin(path)


@contextmanager
def _open_safetensors(path: Path) -> Iterator[_OpenFile]:
    try:
        with safe_open(path, framework="pt") as handle:
            yield _OpenFile(str(path), list(handle.keys()), handle.get_slice)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged or truncated: {error}") from None


@contextmanager
def _open_bin(path: Path) -> Iterator[_OpenFile]:
    """weights_only: nothing that the pickle names is run. Only zip files (torch >= 1.6) can be mapped."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # pickle, zip, storage and I/O errors have no common base
        raise CheckpointError(f"{path} is damaged or holds more than tensors: {error}") from None
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} holds no tensors by name")
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    yield _OpenFile(str(path), list(tensors), tensors.__getitem__)
