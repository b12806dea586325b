"""Inverse frequencies of rotary embeddings for every scaling type, in the operations and order of transformers'
modeling_rope_utils, so that the float32 results are the same to the last bit."""

import math

import torch
from torch import Tensor

from lightllm.common.basemodel.rope_config import RopeConfig


def base_exponents(dim: int) -> Tensor:
    """float32 [dim / 2]: x in 1 / theta ** x."""
    return torch.arange(0, dim, 2, dtype=torch.int64).float() / dim


def static_inverse_frequencies(rope: RopeConfig, dim: int) -> tuple[Tensor, float]:
    """(float32 [dim / 2], factor on cos and sin) of the scalings that do not depend on the sequence's length."""
    inverse = 1.0 / (rope.theta ** base_exponents(dim))
    match rope.rope_type:
        case "default":
            return inverse, 1.0
        case "linear":
            return inverse / rope.parameters["factor"], 1.0
        case "llama3":
            return _llama3(rope, inverse), 1.0
        case "yarn":
            return _yarn(rope, dim)
        case "proportional":
            return _proportional(rope, inverse), 1.0
    raise ValueError(f"rope scaling {rope.rope_type!r} depends on the sequence's length")


def _proportional(rope: RopeConfig, inverse: Tensor) -> Tensor:
    """Gemma 4: only the fastest pairs of the whole head are turned."""
    turned = int(rope.parameters["partial_rotary_factor"] * 2 * len(inverse) // 2)
    return inverse.masked_fill(torch.arange(len(inverse)) >= turned, 0.0) / rope.get("factor", 1.0)


def _llama3(rope: RopeConfig, inverse: Tensor) -> Tensor:
    """Llama 3.1: long wavelengths divided by the factor, short ones kept, a ramp between."""
    factor, original = rope.parameters["factor"], rope.original_max_position_embeddings
    low, high = rope.parameters["low_freq_factor"], rope.parameters["high_freq_factor"]
    wavelength = 2 * math.pi / inverse
    scaled = torch.where(wavelength > original / low, inverse / factor, inverse)
    smooth = (original / wavelength - low) / (high - low)
    smoothed = (1 - smooth) * scaled / factor + smooth * scaled
    between = ~(wavelength < original / high) * ~(wavelength > original / low)
    return torch.where(between, smoothed, scaled)


def _yarn(rope: RopeConfig, dim: int) -> tuple[Tensor, float]:
    """YaRN (arXiv 2309.00071): interpolate slow dimensions, keep fast ones, ramp by number of rotations."""
    original = rope.original_max_position_embeddings
    factor = rope.get("factor", rope.max_position_embeddings / original)

    def dimension_of(rotations: float) -> float:
        return (dim * math.log(original / (rotations * 2 * math.pi))) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.get("beta_fast", 32)), dimension_of(rope.get("beta_slow", 1))
    if rope.parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = torch.clamp((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    frequencies = rope.theta ** base_exponents(dim)
    keep = 1 - ramp
    inverse = 1.0 / (factor * frequencies) * (1 - keep) + 1.0 / frequencies * keep
    return inverse, _yarn_attention_factor(rope, factor)


def yarn_mscale(factor: float, weight: float) -> float:
    """By how much YaRN sharpens attention when the context is stretched by `factor`."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _yarn_attention_factor(rope: RopeConfig, factor: float) -> float:
    if (given := rope.get("attention_factor")) is not None:
        return float(given)
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return yarn_mscale(factor, rope.parameters["mscale"]) / yarn_mscale(factor, rope.parameters["mscale_all_dim"])
    return yarn_mscale(factor, 1)


def longrope_inverse_frequencies(rope: RopeConfig, dim: int) -> tuple[Tensor, Tensor, float]:
    """LongRoPE (arXiv 2402.13753): (short, long, factor on cos and sin); long counts past the original length."""
    original = rope.original_max_position_embeddings
    factor = rope.get("factor", rope.max_position_embeddings / original)
    attention_factor = rope.get("attention_factor")
    if attention_factor is None:
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    frequencies = rope.theta ** base_exponents(dim)
    short, long = (
        1.0 / (torch.tensor(rope.parameters[f"{k}_factor"]).float() * frequencies) for k in ("short", "long")
    )
    return short, long, float(attention_factor)
