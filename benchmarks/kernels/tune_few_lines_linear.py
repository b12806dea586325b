"""Finds the configurations of few_lines_linear, up to 16 lines of ring_linear and from 129 on of some_lines_linear,
that make a layer fastest, and prints its time with them and without.

    python -m benchmarks.kernels.tune_few_lines_linear --model 8b --lines 16 [--out table.json]
    python -m benchmarks.kernels.tune_few_lines_linear --model 8b --lines 32 64 128 [--out table.json]
    python -m benchmarks.kernels.tune_few_lines_linear --model 8b --lines 160 192 256 320 384 512 [--out table.json]

A layer is timed as it decodes, with norms, rotation, attention and each product behind the one before it: a product
begins while the kernel before it runs, so that one alone says little. One after the other is given what is best beside
what the others have, twice; the library is one of the candidates.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import astuple, replace
from functools import partial
from itertools import product
from unittest import mock

import torch
from torch import Tensor

from benchmarks import ceilings
from benchmarks.arguments import need_gpu, results_file
from lightllm.common.basemodel import normed
from lightllm.common.basemodel.attention.backend import AttentionSpec
from lightllm.common.basemodel.layer_weights import base_layer_weight
from lightllm.common.basemodel.layer_weights.base_layer_weight import Weight
from lightllm.common.basemodel.triton_kernel.few_lines_linear import (
    BLOCK_K,
    LINES,
    FewLinesConfig,
    TileConfig,
    table_key,
)
from lightllm.common.basemodel.triton_kernel.ring_linear import MOST_BOXES, RingConfig
from lightllm.common.basemodel.triton_kernel.rmsnorm import add_rmsnorm
from lightllm.common.basemodel.triton_kernel.rotary_emb import rotary_copy_kv
from lightllm.common.basemodel.triton_kernel.skinny_linear import MOST_LINES
from lightllm.common.basemodel.triton_kernel.some_lines_linear import LINES as MORE_LINES
from lightllm.common.basemodel.triton_kernel.some_lines_linear import SomeLinesConfig
from lightllm.common.basemodel.triton_kernel.token_attention import token_attention, token_plan

MODELS = {  # hidden size, heads, KV heads, head_dim, width of the feed-forward block
    "1b": (2048, 32, 8, 64, 8192),
    "3b": (3072, 24, 8, 128, 8192),
    "8b": (4096, 32, 8, 128, 14336),
    "32b": (5120, 64, 8, 128, 25600),
    "8b-half": (4096, 16, 4, 128, 7168),  # of a rank under --tp 2; a norm stands in for the sum over ranks
    "32b-half": (5120, 32, 4, 128, 12800),
}
CONTEXT = 256  # tokens of a row
WEIGHT_BYTES = 6e8  # of all layers, many times the cache
SHARED_MEMORY = 225 << 10  # bytes of a multiprocessor that tiles may take
MOST_STAGES = 9
KEPT = 6  # of the candidates for a product, for a second turn
TILE_ROWS = 256  # of a ring at most
RING_BYTES = (72 << 10, 108 << 10, 216 << 10)  # of a program of ring_linear
HEIGHTS = (64, 96, 128, 160, 192, 256, 288, 320, 384)  # lines of a tile of some_lines_linear


def multiprocessors() -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count if torch.cuda.is_available() else 132


Config = TileConfig | RingConfig


def candidates(name: str, outputs: int, inputs: int, lines: int) -> Sequence[Config]:
    """For a product of that name in a layer."""
    gated, in_parts = name == "gate_up", name in ("o", "down")
    if lines <= MOST_LINES:
        return candidates_of_ring(outputs, inputs, gated)
    if lines > LINES[-1]:
        return candidates_of_some(outputs, inputs, lines, in_parts)
    return candidates_of_few(outputs, inputs, lines, gated, in_parts)


def candidates_of_few(outputs: int, inputs: int, lines: int, gated: bool, in_parts: bool) -> list[TileConfig]:
    """One to three programs fill a multiprocessor with their rings, and the programs fill the GPU at most once."""
    found: list[TileConfig] = []
    processors = multiprocessors()
    block_m = 64 if lines <= 64 else 128
    for block_n in (64, 128) if gated else (64, 128, 256):
        tiles = block_m + block_n * (1 + gated)
        blocks = -(-outputs // (block_n * (1 + gated))) * -(-lines // block_m)
        warps = 8 if block_m * block_n * (1 + gated) >= 1 << 15 else 4
        for together in (1, 2, 3):
            stages = min(MOST_STAGES, SHARED_MEMORY // together // (2 * BLOCK_K * tiles))
            most_split = max(1, min(16, processors * together // blocks, inputs // BLOCK_K // 4))
            splits = {1, most_split, max(1, most_split // 2)} if in_parts else {1}
            if stages >= 3:
                found += [FewLinesConfig(block_m, block_n, split, stages, warps) for split in sorted(splits)]
    return list(dict.fromkeys(found))


def candidates_of_some(outputs: int, inputs: int, lines: int, in_parts: bool) -> list[TileConfig]:
    """Tiles of all lines, halves or thirds, one for most multiprocessors."""
    found: list[TileConfig] = []
    processors = multiprocessors()
    for parts in (1, 2, 3):
        block_m = next((height for height in HEIGHTS if height * parts >= lines), 0)
        for block_n, most_lines in ((64, 256), (128, 384), (256, 128)):  # whose accumulators fit into registers
            tiles = -(-outputs // block_n) * -(-lines // block_m) if block_m else 0
            most_split = max(1, min(8, processors // tiles, inputs // BLOCK_K // 4)) if in_parts and tiles else 1
            stages = min(MOST_STAGES, SHARED_MEMORY // (2 * BLOCK_K * (block_m + block_n)))
            if block_m <= most_lines and tiles * most_split > 0.35 * processors:
                splits = sorted({1, max(1, most_split - 1), most_split})
                found += [SomeLinesConfig(block_m, block_n, split, stages) for split in splits]
    return list(dict.fromkeys(found))


def candidates_of_ring(outputs: int, inputs: int, gated: bool) -> list[RingConfig]:
    """One or two programs for every multiprocessor, whose rings leave room for those of the next kernel or do not."""
    found: list[RingConfig] = []
    unit, processors = 8 * (1 + gated), multiprocessors()
    for together, split, stack in product((1, 2), (1, 2, 3, 4), (1, 2, 4)):
        blocks = processors * together // split
        fewest = -(-outputs // (unit * blocks)) * unit
        tallest = TILE_ROWS // stack + 1
        rows = next((more for more in range(fewest, tallest, unit) if more.bit_count() <= MOST_BOXES), None)
        if rows is None:
            continue
        one = RingConfig(rows, blocks, split, 1, stack)
        tile = 2 * BLOCK_K * (one.tile_rows + MOST_LINES * stack)
        for shared in RING_BYTES:
            config = replace(one, num_stages=min(shared // tile, inputs // (BLOCK_K * stack * split)))
            if config.num_stages >= 3 and config.fits(outputs, inputs, gated):
                found.append(config)
    return list(dict.fromkeys(found))


def weight_shapes(model: str) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of a layer's products."""
    hidden, heads, kv_heads, head_dim, ffn = MODELS[model]
    q, kv = heads * head_dim, kv_heads * head_dim
    return {"qkv": (q + 2 * kv, hidden), "o": (hidden, q), "gate_up": (2 * ffn, hidden), "down": (hidden, ffn)}


class Layers:
    """Several layers with random weights and caches, and the configurations with which they are computed."""

    def __init__(self, model: str, lines: int) -> None:
        self.hidden, self.heads, self.kv_heads, self.head_dim, _ = MODELS[model]
        self.lines, self.shapes = lines, weight_shapes(model)
        self.number = max(
            2, round(WEIGHT_BYTES / 2 / sum(outputs * inputs for outputs, inputs in self.shapes.values()))
        )
        self.layers = [
            {name: Weight(noise(*shape) / shape[1] ** 0.5, None) for name, shape in self.shapes.items()}
            for _ in range(self.number)
        ]
        tokens = lines * CONTEXT
        self.caches = [noise(tokens, self.kv_heads, 2, self.head_dim) for _ in self.layers]
        self.table = torch.randperm(tokens, device="cuda").int().view(lines, CONTEXT)
        self.slots = self.table[:, -1].contiguous()
        self.rows = torch.arange(lines, dtype=torch.int32, device="cuda")
        self.kv_lens = torch.full_like(self.rows, CONTEXT)
        self.spec = AttentionSpec(self.head_dim**-0.5)
        self.angles = torch.rand(2, lines, self.head_dim // 2, device="cuda")
        self.x, self.norm = noise(lines, self.hidden), noise(self.hidden)
        queries = noise(lines, self.heads, self.head_dim)
        self.plan = token_plan(queries, self.caches[0], self.rows, self.kv_lens, self.spec)
        self.chosen: dict[str, Config | None] = dict.fromkeys(self.shapes)

    def config(
        self, kind: type[TileConfig], lines: int, weight: Tensor, gated: bool = False, in_parts: bool = False
    ) -> TileConfig | None:
        """Stands in for few_lines_config and some_lines_config."""
        name = next(name for name, shape in self.shapes.items() if shape == tuple(weight.shape))
        config = self.chosen[name] if gated == (name == "gate_up") else None
        return config if isinstance(config, kind) and (in_parts or config.split == 1) else None

    def ring(self, lines: int, weight: Tensor, gated: bool = False) -> RingConfig | None:
        """Stands in for skinny_config."""
        config = next(self.chosen[name] for name, shape in self.shapes.items() if shape == tuple(weight.shape))
        return config if isinstance(config, RingConfig) else None

    def run(self) -> Tensor:
        normed, residual = add_rmsnorm(self.x, self.x, self.norm, 1e-5)
        for weights, cache in zip(self.layers, self.caches):
            qkv = weights["qkv"].apply(normed).view(self.lines, -1, self.head_dim)
            q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], 1)
            rotary_copy_kv(q, k, v, *self.angles, cache, self.slots)
            out = token_attention(q, cache, self.table, self.rows, self.kv_lens, self.spec, None, self.plan)
            out = weights["o"].partial(out.view(self.lines, -1))
            normed, residual = out.add_rmsnorm(residual, self.norm, 1e-5)
            out = weights["down"].partial(weights["gate_up"].apply(normed, gated=True))
            normed, residual = out.add_rmsnorm(residual, self.norm, 1e-5)
        return residual

    def microseconds(self, **chosen: Config | None) -> float:
        """Of one layer."""
        with (
            mock.patch.object(base_layer_weight, "skinny_config", self.ring),
            mock.patch.object(normed, "skinny_config", self.ring),
            mock.patch.object(base_layer_weight, "few_lines_config", partial(self.config, FewLinesConfig)),
            mock.patch.object(base_layer_weight, "some_lines_config", partial(self.config, SomeLinesConfig)),
            mock.patch.object(self, "chosen", self.chosen | chosen),
        ):
            return ceilings.graph_microseconds([self.run]) / self.number


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, device="cuda")


def tune(layers: Layers, say: Callable[[str], None]) -> None:
    """Leaves in `chosen` what was best."""
    library = layers.microseconds()
    kept: dict[str, list[Config | None]] = {
        name: [None, *candidates(name, *shape, layers.lines)] for name, shape in layers.shapes.items()
    }
    for last in (False, True):
        for name in ("gate_up", "down", "o", "qkv"):
            times = {config: layers.microseconds(**{name: config}) for config in kept[name]}
            kept[name] = sorted(times, key=times.__getitem__)[:KEPT]
            layers.chosen[name] = kept[name][0]
            if last:
                say(f"  {name}: " + ", ".join(f"{times[of]:.1f} us {of and astuple(of)}" for of in kept[name][:4]))
    say(f"  a layer takes {layers.microseconds():.1f} us, by the library {library:.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--lines", nargs="+", type=int, choices=(MOST_LINES, *LINES, *MORE_LINES), default=LINES)
    parser.add_argument("--out", type=results_file, help="where to write the table")
    options = parser.parse_args()
    if len({(lines > MOST_LINES) + (lines > LINES[-1]) for lines in options.lines}) > 1:
        parser.error(f"a table is of up to {MOST_LINES}, of up to {LINES[-1]} lines, or of more")
    need_gpu(parser)
    table: dict[str, dict[str, tuple]] = {}
    rings: dict[str, tuple] = {}
    for model in options.model:
        for lines in options.lines:
            print(f"{model}, {lines} lines", flush=True)
            layers = Layers(model, lines)
            tune(layers, lambda line: print(line, flush=True))
            for name, config in layers.chosen.items():
                key = table_key(*layers.shapes[name], name == "gate_up")
                if isinstance(config, RingConfig):
                    rings[key] = astuple(config)
                elif config:
                    table.setdefault(key, {})[str(lines)] = astuple(config)
    if options.out:
        rows = ",\n".join(
            f"  {json.dumps(shape)}: {json.dumps(configs)}" for shape, configs in (rings or table).items()
        )
        options.out.write_text(f"{{\n{rows}\n}}\n")


if __name__ == "__main__":
    main()
