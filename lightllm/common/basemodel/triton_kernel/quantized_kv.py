"""KV in 8 bits: numbers of one byte, and a 16-bit scale for K and for V of each token and head.

Features are spread before they are quantized: the transform of Hadamard makes of one large number many of like size, so
that it does not take the others' digits (on SmolLM2 a third of the wrong tokens is left). Queries and answers are
transformed too.
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_LARGEST = {torch.uint8: 127.0, torch.float8_e4m3fn: 448.0}  # what the largest number of a head becomes
_SMALLEST_SCALE = 2.0**-20


@dataclass(frozen=True)
class QuantizedKV:
    """One layer of a cache, of what is `spread`. values [slot, KH, 2, hd], K first: uint8, which mean value - 128, or
    float8_e4m3fn; scales float16 [slot, KH, 2]. A number is its value times the scale."""

    values: Tensor
    scales: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def device(self) -> torch.device:
        return self.values.device


LayerKV = Tensor | QuantizedKV
"""K and V of each slot, [slot, KH, 2, hd], as they are or in 8 bits."""


@functools.cache
def hadamard(features: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Twice the same symmetric matrix [features, features], scaled by powers of two so that their product is one: for
    what is kept, and for what asks."""
    block = torch.ones(1, 1)
    while features % (2 * len(block)) == 0:
        block = torch.cat((torch.cat((block, block), 1), torch.cat((block, -block), 1)))
    matrix, power = torch.block_diag(*[block] * (features // len(block))), len(block).bit_length() - 1
    scales = 2.0 ** -(power // 2), 2.0 ** -(power - power // 2)
    return tuple((matrix * scale).to(device, dtype) for scale in scales)


def spread(kv: Tensor) -> Tensor:
    """Keys or values [..., hd] as they are kept."""
    return kv @ hadamard(kv.shape[-1], kv.dtype, kv.device)[0]


def unspread(x: Tensor) -> Tensor:
    """Queries [..., hd] as kept keys want them; answers made of kept values as everybody else does."""
    return x @ hadamard(x.shape[-1], x.dtype, x.device)[1]


def asking(q: Tensor, layer_kv: LayerKV) -> Tensor:
    """Queries [..., hd] as the keys of this cache want them."""
    return unspread(q) if isinstance(layer_kv, QuantizedKV) else q


def read_slots(layer_kv: LayerKV, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """[len(slots), KH, 2, hd]; slots int. A cache that is not quantized has its own dtype."""
    if isinstance(layer_kv, Tensor):
        return layer_kv.index_select(0, slots)
    kind = layer_kv.values.dtype
    values = layer_kv.values.view(torch.uint8).index_select(0, slots).view(kind).float()
    numbers = values - 128 if kind == torch.uint8 else values
    return (numbers * layer_kv.scales.index_select(0, slots)[..., None]).to(dtype)


def write_slots(layer_kv: LayerKV, slots: Tensor, kv: Tensor) -> None:
    """kv [T, KH, 2, hd] to slots int64 [T]."""
    if isinstance(layer_kv, Tensor):
        layer_kv.index_copy_(0, slots, kv)
        return
    kind, numbers = layer_kv.values.dtype, kv.float()
    scales = (numbers.abs().amax(-1) / _LARGEST[kind]).clamp(min=_SMALLEST_SCALE).half()
    numbers = numbers / scales.float()[..., None]
    values = (numbers + 128.5).clamp(0, 255).to(kind) if kind == torch.uint8 else numbers.clamp(-448, 448).to(kind)
    layer_kv.values.view(torch.uint8).index_copy_(0, slots, values.view(torch.uint8))
    layer_kv.scales.index_copy_(0, slots, scales)


def kernel_pools(layer_kv: LayerKV) -> tuple[Tensor, Tensor, str]:
    """(KV, Scales, FORMAT) for kernels that write: values and scales as they are."""
    if isinstance(layer_kv, Tensor):
        return layer_kv, layer_kv, "plain"
    return layer_kv.values, layer_kv.scales, "int8" if layer_kv.values.dtype == torch.uint8 else "fp8"


def kernel_views(layer_kv: LayerKV) -> tuple[Tensor, Tensor, str]:
    """(KV, Scales, FORMAT) for kernels that read: in 8 bits KV is int16 [slot, KH, 2, hd / 2], Scales int32 [slot, KH]:
    the bits of K's scale, then of V's."""
    kv, scales, kind = kernel_pools(layer_kv)
    return (kv, scales, kind) if kind == "plain" else (kv.view(torch.int16), scales.view(torch.int32).squeeze(-1), kind)


def has_ptx() -> bool:
    """Whether kernels may hold assembly of NVIDIA's GPUs."""
    return torch.version.hip is None and not triton.knobs.runtime.interpret


@triton.jit
def encode_scale(largest, FORMAT: tl.constexpr):
    """The float16 scale of a head whose largest magnitude is given."""
    most: tl.constexpr = 127.0 if FORMAT == "int8" else 448.0
    return tl.maximum(largest / most, 9.5367431640625e-07).to(tl.float16)


@triton.jit
def encode(x, scale, FORMAT: tl.constexpr):
    """float32 numbers as bytes."""
    x = x / scale.to(tl.float32)
    if FORMAT == "int8":
        return tl.minimum(tl.maximum(x + 128.5, 0.0), 255.0).to(tl.int32).to(tl.uint8)
    else:
        return tl.minimum(tl.maximum(x, -448.0), 448.0).to(tl.float8e4nv)


@triton.jit
def decode_scales(pair):
    """The scales of K and of V, float32, of what `Scales` holds."""
    return (
        pair.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32),
        (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32),
    )


@triton.jit
def _decode_byte(byte, FORMAT: tl.constexpr):
    if FORMAT == "int8":
        return (byte | 0x6400).to(tl.float16, bitcast=True) - 1152.0
    return (((byte & 0x80) << 8) | ((byte & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0


@triton.jit
def decode(pair, FORMAT: tl.constexpr, PTX: tl.constexpr):
    """The low and the high bytes of int16 as float16, exactly. Placed behind 0x64 a byte is a float16 of 1024 and more,
    so that four of them take two permutations and two subtractions."""
    if not PTX:
        return _decode_byte((pair & 0xFF).to(tl.int16), FORMAT), _decode_byte(((pair >> 8) & 0xFF).to(tl.int16), FORMAT)
    if FORMAT == "int8":
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 high, bias;
            mov.b32 high, 0x64646464;
            mov.b32 bias, 0x64806480;
            prmt.b32 $0, $2, high, 0x4240;
            prmt.b32 $1, $2, high, 0x4341;
            sub.f16x2 $0, $0, bias;
            sub.f16x2 $1, $1, bias;
            }
            """,
            "=&r,=&r,r", [pair], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 sorted;
        .reg .b16 low, high;
        prmt.b32 sorted, $2, $2, 0x3120;
        mov.b32 {low, high}, sorted;
        cvt.rn.f16x2.e4m3x2 $0, low;
        cvt.rn.f16x2.e4m3x2 $1, high;
        }
        """,
        "=&r,=&r,r", [pair], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
    )  # fmt: skip
