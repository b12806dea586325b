"""Weights that lie in a checkpoint as small values and scales, and are dequantized while they are read."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightllm.common.basemodel.model_config import ModelConfig

_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class BlockFp8:
    """float8 values, one float32 scale for each block of outputs x inputs (DeepSeek V3)."""

    method: ClassVar[str] = "fp8"
    outputs: int
    inputs: int

    def tensors(self, name: str) -> tuple[str, str, str] | None:
        """If `name` holds scales: the names of the weight, of its values, and of its scales."""
        weight = name.removesuffix("_scale_inv")
        return None if weight == name else (weight, weight, name)

    def unpack(self, values: Any, shape: tuple[int, ...], scales: Tensor) -> tuple[Any, tuple[int, ...]]:
        """Stored values (indexed by slices, read only where indexed) of a shape -> the weight to index, its shape."""
        return _BlockScaled(values, shape, scales, self), shape


@dataclass(frozen=True)
class _BlockScaled:
    values: Any
    shape: tuple[int, ...]
    scales: Tensor
    block: BlockFp8

    def __getitem__(self, at: tuple[slice, slice]) -> Tensor:
        rows, columns = (torch.arange(size)[part] for size, part in zip(self.shape, at))
        scales = self.scales.float()[rows // self.block.outputs][:, columns // self.block.inputs]
        return self.values[at].float() * scales


@dataclass(frozen=True)
class Mxfp4:
    """Experts in MXFP4 (gpt-oss): 32 inputs share a power of two, two fp4 values lie in a byte, the first one low.

    The weight reads as [experts, inputs, outputs], as it does in checkpoints that are not quantized.
    """

    method: ClassVar[str] = "mxfp4"

    def tensors(self, name: str) -> tuple[str, str, str] | None:
        weight = name.removesuffix("_scales")
        return None if weight == name else (weight, f"{weight}_blocks", name)

    def unpack(self, values: Any, shape: tuple[int, ...], scales: Tensor) -> tuple[Any, tuple[int, ...]]:
        experts, outputs, groups, half = shape
        return _Fp4Experts(values, scales), (experts, groups * half * 2, outputs)


@dataclass(frozen=True)
class _Fp4Experts:
    values: Any
    scales: Tensor

    def __getitem__(self, at: tuple[int, slice, slice]) -> Tensor:
        expert, inputs, outputs = at
        packed = self.values[expert, outputs].long()
        table = torch.tensor([*_FP4, *(-value for value in _FP4)])
        values = table[torch.stack((packed & 15, packed >> 4), -1)].flatten(-2)
        exponents = self.scales[expert, outputs].int() - 127
        return torch.ldexp(values, exponents[..., None]).flatten(1).t()[inputs]


Packing = BlockFp8 | Mxfp4  # what BlockFp8 says of its methods holds for both


def packing_of(config: ModelConfig) -> Packing | None:
    """How the weights are packed, None for plain ones; ModelConfig refuses what is not listed here."""
    quantization = config.raw.get("quantization_config", {})
    match quantization.get("quant_method"):
        case "fp8":
            return BlockFp8(*quantization["weight_block_size"])
        case "mxfp4":
            return Mxfp4()
    return None
