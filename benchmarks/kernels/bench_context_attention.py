"""Attention of prompts: TFLOP/s of our kernel over the token cache and of cuDNN over gathered keys.

    python -m benchmarks.kernels.bench_context_attention [--sweep]

`fresh` prompts have nothing in the cache; `behind` ones continue a prefix of that many tokens, which cuDNN attends to
apart and joins by log-sum-exp.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
from pathlib import Path

import torch
import triton

from benchmarks import ceilings
from benchmarks.kernels.bench_token_attention import FORMATS, HEADS, KV_HEADS, random_kv
from lightllm.common.basemodel.attention.backend import AttentionSpec
from lightllm.common.basemodel.triton_kernel import context_attention
from lightllm.common.basemodel.triton_kernel.quantized_kv import read_slots

LENGTHS = [(0, 256), (0, 1024), (0, 2048), (0, 8192), (2048, 2048), (24576, 8192)]  # prefix, chunk


def cudnn(q: torch.Tensor, kv, slots: torch.Tensor, prefix: int, scale: float) -> torch.Tensor:
    k, v = read_slots(kv, slots, q.dtype).permute(2, 1, 0, 3).unsqueeze(1)
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    queries = q.transpose(0, 1)[None]

    def attend(keys: slice, causal: bool):
        return torch.ops.aten._scaled_dot_product_cudnn_attention(
            queries, k[:, :, keys], v[:, :, keys], None, True, 0.0, causal, False, scale=scale
        )[:2]

    own, own_lse = attend(slice(prefix, None), True)
    if not prefix:
        return own[0].transpose(0, 1)
    old, old_lse = attend(slice(0, prefix), False)
    weight = torch.sigmoid(own_lse.view(1, q.shape[1], -1, 1) - old_lse.view(1, q.shape[1], -1, 1))
    return torch.lerp(old.float(), own.float(), weight)[0].transpose(0, 1).to(q.dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="other tiles too")
    parser.add_argument("--json", type=Path, help="where to write the results")
    options = parser.parse_args()
    results = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "cases": []}
    for head_dim, (prefix, chunk) in itertools.product((128, 64), LENGTHS):
        total = prefix + chunk
        flops = 4 * HEADS * head_dim * (chunk * prefix + chunk**2 / 2)
        q = torch.randn(chunk, HEADS, head_dim, dtype=torch.bfloat16, device="cuda")
        table = torch.randperm(total, device="cuda").int()[None]
        ints = lambda *values: torch.tensor(values, dtype=torch.int32, device="cuda")  # noqa: E731
        spec = AttentionSpec(head_dim**-0.5)

        def report(name: str, work) -> torch.Tensor:
            time = ceilings.milliseconds(work, 7)
            rate = flops / time / 1e9
            results["cases"].append(
                dict(head_dim=head_dim, prefix=prefix, chunk=chunk, what=name, ms=time, tflops=rate)
            )
            print(f"{head_dim:4d} {prefix:6d} + {chunk:5d} {name:28s} {1e3 * time:9.1f} us {rate:6.0f}", flush=True)
            return work().float()

        for kind in FORMATS:
            kv = random_kv(total, head_dim, kind)
            arguments = (q, kv, table, ints(0), ints(prefix), ints(chunk), ints(0, chunk), chunk, spec)
            ours = report(f"ours, {kind}", lambda: context_attention.context_attention(*arguments))
            if kind == "plain" or (prefix, chunk) == (0, 8192):
                theirs = report(f"cuDNN, {kind}", lambda: cudnn(q, kv, table[0], prefix, spec.scale))
                print(f"     difference {((ours - theirs).norm() / theirs.norm()).item():.1e}")
            if options.sweep and (prefix, chunk) in ((0, 8192), (2048, 2048)):
                own = context_attention.context_config
                for block_n, warps, stages in ((64, 4, 3), (64, 8, 3), (128, 8, 2), (128, 8, 3), (32, 4, 4)):
                    changed = {"BLOCK_N": block_n, "num_warps": warps, "num_stages": stages}
                    context_attention.context_config = lambda *shape, changed=changed: own(*shape) | changed
                    with contextlib.suppress(triton.runtime.errors.OutOfResources):
                        report(
                            f"  {block_n} {warps} {stages}, {kind}",
                            lambda: context_attention.context_attention(*arguments),
                        )
                context_attention.context_config = own
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
