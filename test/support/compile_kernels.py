"""Compiles every launch of every kernel for GPUs that are not here, and prints what does not fit.

Run as a script, without TRITON_INTERPRET: the real launchers run on CPU tensors, and each launch is compiled for every
target instead of being run. Prints one line per failure and, last, the number of compilations.
"""

import sys
from typing import Any
from unittest import mock

import torch
import triton
from support.kernel_cases import quantized_pool
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction

from lightllm.common.basemodel.attention.backend import AttentionSpec
from lightllm.common.basemodel.infer_struct import Chunks
from lightllm.common.basemodel.triton_kernel import context_attention as context_module
from lightllm.common.basemodel.triton_kernel import grouped_gemm as grouped_gemm_module
from lightllm.common.basemodel.triton_kernel import latent_attention as latent_module
from lightllm.common.basemodel.triton_kernel import latent_context_attention as latent_context_module
from lightllm.common.basemodel.triton_kernel.all_gather import join_columns
from lightllm.common.basemodel.triton_kernel.all_reduce import add_received_rmsnorm, one_shot
from lightllm.common.basemodel.triton_kernel.apply_penalty import apply_penalty
from lightllm.common.basemodel.triton_kernel.context_attention import context_attention
from lightllm.common.basemodel.triton_kernel.decode_plan import PlanSize, plan_decode
from lightllm.common.basemodel.triton_kernel.destindex_copy_kv import destindex_copy_kv
from lightllm.common.basemodel.triton_kernel.few_lines_linear import FewLinesConfig, few_lines_linear
from lightllm.common.basemodel.triton_kernel.gather_rows import gather_rows
from lightllm.common.basemodel.triton_kernel.grouped_gemm import Routing, grouped_gemm
from lightllm.common.basemodel.triton_kernel.hopper_context_attention import hopper_context_attention
from lightllm.common.basemodel.triton_kernel.host_memory import deliver, fetch
from lightllm.common.basemodel.triton_kernel.latent_attention import latent_attention
from lightllm.common.basemodel.triton_kernel.latent_context_attention import latent_context_attention
from lightllm.common.basemodel.triton_kernel.many_lines_linear import many_lines_gated
from lightllm.common.basemodel.triton_kernel.prepare_decode import prepare_decode
from lightllm.common.basemodel.triton_kernel.quantized_kv import LayerKV
from lightllm.common.basemodel.triton_kernel.ring_linear import RingConfig
from lightllm.common.basemodel.triton_kernel.rmsnorm import add_rmsnorm, rmsnorm
from lightllm.common.basemodel.triton_kernel.rotary_emb import rotary_copy_kv, rotary_emb
from lightllm.common.basemodel.triton_kernel.rotary_spread_kv import rotary_spread_kv
from lightllm.common.basemodel.triton_kernel.router_logits import router_logits
from lightllm.common.basemodel.triton_kernel.sampling import sample
from lightllm.common.basemodel.triton_kernel.select_experts import TopK, select_experts
from lightllm.common.basemodel.triton_kernel.silu_and_mul import silu_and_mul
from lightllm.common.basemodel.triton_kernel.skinny_linear import (
    CANDIDATES,
    MOST_LINES,
    add_skinny_linear,
    skinny_linear,
)
from lightllm.common.basemodel.triton_kernel.some_lines_linear import SomeLinesConfig, some_lines_linear
from lightllm.common.basemodel.triton_kernel.token_attention import MANY_PROGRAMS, token_attention
from lightllm.common.basemodel.triton_kernel.weighted_sum import routed_sum, weighted_sum
from lightllm.common.basemodel.triton_kernel.write_latents import write_latents
from lightllm.distributed.parallel_state import ParallelState
from lightllm.distributed.peer_memory import PeerMemory

TARGETS = {  # name -> target, bytes of shared memory of one program
    "sm_80": (GPUTarget("cuda", 80, 32), 166912),
    "sm_90": (GPUTarget("cuda", 90, 32), 232448),
    "gfx942": (GPUTarget("hip", "gfx942", 64), 65536),
}
TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int32: "*i32"}
TYPES |= {torch.int64: "*i64", torch.bool: "*i1", torch.int16: "*i16", torch.uint8: "*u8"}
TYPES |= {torch.float8_e4m3fn: "*fp8e4nv"}
HOPPER = ("sm_90",)  # with numbers of 8 bits and kernels in Gluon
HEADS = [(64, 4, None), (96, 4, 100), (128, 48, None), (256, 1, None)]  # head_dim, query heads per KV head, window
FEW_LINES_CONFIGS = [
    FewLinesConfig(64, 64, 1, 4, 4),
    FewLinesConfig(128, 128, 1, 4, 8),
    FewLinesConfig(64, 128, 4, 8, 4),
]
SOME_LINES_CONFIGS = [
    SomeLinesConfig(256, 128, 1, 4),
    SomeLinesConfig(320, 128, 1, 4),
    SomeLinesConfig(192, 64, 3, 7),
    SomeLinesConfig(128, 256, 4, 4),
]
RING_CONFIGS = [
    RingConfig(208, 132, 1, 6),
    RingConfig(80, 66, 2, 12),
    RingConfig(32, 132, 1, 18, stack=2),
]
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion", "launch_pdl", "maxnreg")


class Recorder:
    """Stands in for JITFunction.run and compiles each distinct launch once for one target."""

    def __init__(self, name: str) -> None:
        self.name, (self.target, self.limit) = name, TARGETS[name]
        self.done: dict[tuple, int] = {}

    def run(self, kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        options = {key: kwargs.pop(key) for key in OPTIONS if key in kwargs}
        signature, constants, attributes = {}, {}, {}
        for index, (parameter, value) in enumerate(zip(kernel.params, [*args, *kwargs.values()], strict=True)):
            if parameter.is_constexpr or value is None:
                signature[parameter.name], constants[(index,)] = "constexpr", kwargs.get(parameter.name)
                continue
            aligned = isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)
            if isinstance(value, torch.Tensor):
                signature[parameter.name] = TYPES[value.dtype]
            elif isinstance(value, TensorDescriptor):
                signature[parameter.name] = f"tensordesc<bf16{list(value.block_shape)},{value.layout!r}>"
            else:
                signature[parameter.name] = "i32" if isinstance(value, int) else "fp32"
            if aligned and not parameter.do_not_specialize:
                attributes[(index,)] = [["tt.divisibility", 16]]
        key = (kernel.fn.__name__, *signature.values(), *constants.values(), *options.values(), *attributes)
        if key in self.done:
            return
        source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, signature, constants, attributes)
        try:
            shared = triton.compile(source, target=self.target, options=options).metadata.shared
        except Exception as error:
            print(f"{self.name} {key}: {type(error).__name__} {error}".replace("\n", " ")[:600])
            shared = 0
        if shared > self.limit:
            print(f"{self.name} {key}: {shared} bytes of shared memory, at most {self.limit}")
        self.done[key] = shared


def attention_features(window: int | None, per_head: torch.Tensor) -> tuple[AttentionSpec, torch.Tensor | None]:
    """Every other feature rides on the launches with a window."""
    if window is None:
        return AttentionSpec(0.1), None
    return AttentionSpec(0.1, window, softcap=50.0, slopes=per_head), per_head


def kv_pools(kv_heads: int, head_dim: int, dtype: torch.dtype, fp8: bool) -> list[LayerKV]:
    """As it is, and in 8 bits."""
    plain = torch.empty(8, kv_heads, 2, head_dim, dtype=dtype)
    kinds = [torch.uint8, torch.float8_e4m3fn][: 1 + fp8] if dtype == torch.bfloat16 else []
    return [plain, *(quantized_pool(8, kv_heads, head_dim, kind, "cpu") for kind in kinds)]


def launch_everything(hopper: bool) -> None:
    def ints(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32)

    for dtype in (torch.float32, torch.bfloat16):
        for dim in (128, 8192):
            x, weight = torch.empty(3, dim, dtype=dtype), torch.empty(dim, dtype=dtype)
            rmsnorm.launcher(x, weight, 1e-5)
            add_rmsnorm.launcher(x, x, weight, 1e-5)
            add_rmsnorm.launcher(torch.empty(2, *x.shape), x, weight, 1e-5)
            add_received_rmsnorm.launcher(x, x, x, weight, 1e-5, x, x)
            rmsnorm.launcher(x, weight, 1e-5, True)
            peers = PeerMemory(torch.zeros(4, dtype=torch.int64), ints(64), 64, 8192, dtype, 64, x)
            for ranks in (2, 4):
                one_shot(x, None, None, 0.0, ParallelState(1, ranks), peers)
                one_shot(x, x, weight, 1e-5, ParallelState(1, ranks), peers)
                one_shot(torch.empty(2, *x.shape), x, weight, 1e-5, ParallelState(1, ranks), peers)
                join_columns.launcher(x, ranks * dim, ParallelState(1, ranks, peers=peers))
        silu_and_mul.launcher(torch.empty(3, 4096, dtype=dtype))
        for tokens in (1, 10, 40, 100, 400):  # a block of every size
            x, weight = torch.empty(tokens, 2048, dtype=dtype), torch.empty(8, 1536, 2048, dtype=dtype)
            for gated in (False, True):
                grouped_gemm.launcher(x, weight, weight[:, :, 0], Routing(ints(tokens, 4), 0, 8), gated)
            weighted_sum.launcher(x, torch.empty(tokens, 1))
        for bias in (None, weight[:, :, 0]):
            routed_sum.launcher(x[:4], weight, bias, Routing(ints(1, 4), 0, 8), torch.empty(1, 4), weight[0, :1, 0])
        router_logits.launcher(x[:3], torch.empty(64, 2048), None)
        for heads, kv_heads, head_dim, rotary_dim in ((9, 3, 64, 64), (8, 1, 80, 20), (4, 1, 128, 128)):
            q, k = torch.empty(3, heads, head_dim, dtype=dtype), torch.empty(3, kv_heads, head_dim, dtype=dtype)
            angle = torch.empty(3, rotary_dim // 2)
            rotary_emb.launcher(q, k, angle, angle)
            plain, *small = kv_pools(kv_heads, head_dim, dtype, fp8=hopper)
            rotary_copy_kv.launcher(q, k, k, angle, angle, plain, ints(3))
            for pool in (plain, *small):
                destindex_copy_kv.launcher(k, k, pool, ints(3))
            if rotary_dim == head_dim:
                for pool in small:
                    rotary_spread_kv.launcher(q, k, k, angle, angle, pool, ints(3))
        for head_dim, group, window in HEADS if dtype == torch.bfloat16 else HEADS[:1] + HEADS[3:]:
            table, features = ints(4, 8), attention_features(window, torch.empty(2 * group))
            plan_decode.launcher(ints(3), ints(3), features[0], 2, 64, PlanSize(9, 9))
            for pool in kv_pools(2, head_dim, dtype, fp8=hopper):
                for batch in (3, MANY_PROGRAMS // 2):
                    q = torch.empty(batch, 2 * group, head_dim, dtype=dtype)
                    token_attention.launcher(q, pool, table, ints(batch), ints(batch) + 1, *features)
                for chunk in (1, 200, 2048, 4096):  # tiles of every size
                    q = torch.empty(chunk, 2 * group, head_dim, dtype=dtype)
                    context_attention.launcher(q, pool, table, Chunks(*[ints(1)] * 4, chunk), *features)
        for batch in (1, 128):
            q, latents = torch.empty(batch, 16, 576, dtype=dtype), torch.empty(8, 576, dtype=dtype)
            latent_attention.launcher(q[..., :64], q[..., 64:], latents, ints(4, 8), ints(batch), ints(batch) + 1, 0.1)
        angle, rows = torch.empty(3, 32), torch.empty(3, 576, dtype=dtype)
        write_latents.launcher(q[:3, :, :192], rows, rows[0, 64:], 1e-6, angle, angle, latents, ints(3))
        for chunk in (1, 2048):
            q, kv = torch.empty(chunk, 16, 192, dtype=dtype), torch.empty(chunk, 16, 256, dtype=dtype)
            latent_context_attention.launcher(q, rows[:, :64], kv, Chunks(*[ints(1)] * 4, chunk), ints(1), 0.1)
    for config in CANDIDATES:
        x = torch.empty(MOST_LINES if config.dot else 1, 4096, dtype=torch.bfloat16)
        weight, squares = torch.empty(256, 4096, dtype=torch.bfloat16), torch.empty(100, len(x))
        skinny_linear.launcher(x, weight, None, config)
        skinny_linear.launcher(x, weight, None, config, squares, 1e-5, gated=True)
        add_skinny_linear.launcher(x, weight, weight[:, 0], x[:, :256].contiguous(), weight[:, 0], config)
    for config in CANDIDATES[::5]:
        x, boxes = torch.empty(1, 4096, dtype=torch.bfloat16), (torch.empty(16, 256, dtype=torch.int16),) * 2
        add_skinny_linear.launcher(x, weight, None, x[:, :256].contiguous(), weight[:, 0], config, boxes)
    if hopper:
        pool = torch.empty(8, 2, 2, 128, dtype=torch.bfloat16)
        for window in (None, 100):
            q, spec = torch.empty(200, 8, 128, dtype=torch.bfloat16), AttentionSpec(0.1, window)
            hopper_context_attention(q, pool, ints(4, 8), Chunks(*[ints(1)] * 4, 200), spec, q)
        x, weight = torch.empty(9, 4096, dtype=torch.bfloat16), torch.empty(512, 4096, dtype=torch.bfloat16)
        for ring in RING_CONFIGS:
            if ring.split == ring.stack == 1:
                skinny_linear.launcher(x, weight, weight[:, 0], ring, torch.empty(100, 9), 1e-5, gated=True)
            add_skinny_linear.launcher(x, weight, None, x[:, :512].contiguous(), weight[:, 0], ring, boxes)
        x = torch.empty(40, 4096, dtype=torch.bfloat16)
        for config in FEW_LINES_CONFIGS:
            few_lines_linear.launcher(x, weight, weight[:, 0], config, config.split == 1)
        for of_some in SOME_LINES_CONFIGS:
            for gated in {False, of_some.split == 1}:
                some_lines_linear.launcher(x, weight, weight[:, 0], of_some, gated)
        many_lines_gated.launcher(x, weight)
    select_experts.launcher(torch.empty(3, 64), None, TopK(6))
    select_experts.launcher(torch.empty(3, 256), torch.empty(256), TopK(8, "sigmoid", True, 2.5, 8, 4, 2))
    logits, line = torch.empty(2, 128256), torch.empty(2)
    apply_penalty.launcher(logits, ints(2), ints(2, 128256), line, line, line, torch.zeros(2, dtype=torch.bool))
    long = torch.zeros(2, dtype=torch.int64)
    for drawn_from in (logits, logits.bfloat16()):
        sample.launcher(drawn_from, ints(2), ints(2), line, ints(2), line, line, long, ints(2), long)
    gather_rows.launcher(torch.empty(2, 8, 64), ints(3))
    gather_rows.launcher(torch.empty(1, 8, 4096, dtype=torch.bfloat16), long)
    fetch.launcher(ints(9), ints(9))
    deliver.launcher(ints(9), ints(2))
    prepare_decode.launcher(ints(3, 2), long, ints(2), ints(2, 8))


def compile_for(name: str) -> None:
    recorder = Recorder(name)
    hip = "7.0" if recorder.target.backend == "hip" else None
    with (
        mock.patch.object(JITFunction, "run", lambda kernel, *args, **kwargs: recorder.run(kernel, *args, **kwargs)),
        mock.patch.object(torch.version, "hip", hip),
        mock.patch.object(context_module, "shared_memory", lambda device: recorder.limit),
        mock.patch.object(grouped_gemm_module, "shared_memory", lambda device: recorder.limit),
        mock.patch.object(latent_module, "shared_memory", lambda device: recorder.limit),
        mock.patch.object(latent_context_module, "shared_memory", lambda device: recorder.limit),
    ):
        launch_everything(name in HOPPER)
    print(f"{name}: {len(recorder.done)} compiled, at most {max(recorder.done.values())} bytes of shared memory")


if __name__ == "__main__":
    for name in sys.argv[1:] or TARGETS:
        compile_for(name)
