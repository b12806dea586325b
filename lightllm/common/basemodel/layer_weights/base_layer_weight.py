"""Loaded weights. `apply` is the only matrix product of the models; the kinds differ in what ranks do after it."""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from lightllm.common.basemodel.layer_weights.slot import Shard, Slot, padded_share
from lightllm.common.basemodel.normed import Lines, RMSNormed
from lightllm.common.basemodel.partial_sum import PartialSum
from lightllm.common.basemodel.triton_kernel.all_gather import join_columns
from lightllm.common.basemodel.triton_kernel.all_reduce import select_over_ranks
from lightllm.common.basemodel.triton_kernel.few_lines_linear import few_lines_config, few_lines_linear
from lightllm.common.basemodel.triton_kernel.gather_rows import gather_rows
from lightllm.common.basemodel.triton_kernel.many_lines_linear import many_lines_gated, suits_many_lines
from lightllm.common.basemodel.triton_kernel.silu_and_mul import silu_and_mul
from lightllm.common.basemodel.triton_kernel.skinny_linear import add_skinny_linear, skinny_config, skinny_linear
from lightllm.common.basemodel.triton_kernel.some_lines_linear import some_lines_config, some_lines_linear
from lightllm.distributed.parallel_state import ParallelState


@functools.cache
def _emulated_on_cpu(dtype: torch.dtype) -> bool:
    """Whether this CPU lacks instructions for products in `dtype`."""
    if dtype == torch.bfloat16:
        return not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float16 and not torch.ops.mkldnn._is_mkldnn_fp16_supported()


MOST_SWAPPED = 32  # lines that a CPU multiplies faster the other way round


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, gated: bool = False) -> Tensor:
    """x [T, inputs] times weight [outputs, inputs], plus bias; `gated`: silu_and_mul of that.

    On a CPU MKL computes W x of 2 to 32 lines 1.2 to 2.4 times as fast as x W (AVX2, two threads, inputs 576 to 1536).
    On a GPU up to 16 lines go to skinny_linear, up to 128 to few_lines_linear, up to 512 to some_lines_linear and
    `gated` ones of more to many_lines_gated, where these beat the library.
    """
    if skinny := skinny_config(len(x), weight, gated):
        return skinny_linear(x.contiguous(), weight, bias, skinny, gated=gated)
    if few := few_lines_config(len(x), weight, gated):
        return few_lines_linear(x.contiguous(), weight, bias, few, gated)
    if some := some_lines_config(len(x), weight, gated):
        return some_lines_linear(x.contiguous(), weight, bias, some, gated)
    if gated and bias is None and suits_many_lines(len(x), weight):
        return many_lines_gated(x.contiguous(), weight)
    if x.is_cpu and 1 < len(x) <= MOST_SWAPPED:
        product = (weight @ x.t()).t().contiguous()
        product = product if bias is None else product.add_(bias)
    else:
        product = F.linear(x, weight, bias)
    return silu_and_mul(product) if gated else product


class Weight:
    """weight [outputs, inputs] (or a vector) and bias [outputs] of this rank. `parallel`: the ranks over which the
    inputs are cut, for `partial`; one of them holds the bias, so it is added once."""

    def __init__(self, weight: Tensor, bias: Tensor | None, parallel: ParallelState | None = None) -> None:
        self.weight = weight
        self.bias = bias
        self.parallel = parallel or ParallelState()
        self._emulated = weight.device.type == "cpu" and _emulated_on_cpu(weight.dtype)
        self._wide: tuple[Tensor, Tensor | None] | None = None

    def apply(self, x: Lines, gated: bool = False) -> Tensor:
        """x [T, inputs] -> [T, outputs]; `gated`: silu of their first half times the second, [T, outputs / 2]."""
        return self.product(x, gated) if isinstance(x, Tensor) else x.product(self, gated)

    def product(self, x: Tensor, gated: bool) -> Tensor:
        """`apply`, of this rank's outputs alone."""
        if self._emulated and len(x) > 1:
            product = self._apply_wide(x)
            return silu_and_mul(product) if gated else product
        return linear(x, self.weight, self.bias, gated)

    def add_normed(self, x: Tensor, residual: Tensor, norm: Tensor, eps: float) -> RMSNormed | None:
        """residual [T, outputs] + the sum over the ranks of apply(x), normed with the weight `norm`; None where the
        product leaves that to others."""
        config = skinny_config(len(x), self.weight)
        if config is None or not self.parallel.exchanges:
            return None
        total, scaled, squares = add_skinny_linear(
            x.contiguous(), self.weight, self.bias, residual, norm, config, self.parallel.next_boxes()
        )
        return RMSNormed(total, norm, eps, (scaled, squares))

    def fuses_silu(self, lines: int) -> bool:
        """Whether a product of so many lines, which may be computed in two halves, ends with silu_and_mul."""
        return self.bias is None and suits_many_lines(lines, self.weight)

    def product_into(self, x: Tensor, y: Tensor, gated: bool = False) -> None:
        """This rank's outputs of many lines into y [T, outputs]; `gated`, only where `fuses_silu`: silu_and_mul of them
        into y [T, outputs / 2]."""
        if gated:
            many_lines_gated(x, self.weight, y)
        elif self.bias is None:
            torch.mm(x, self.weight.t(), out=y)
        else:
            torch.addmm(self.bias, x, self.weight.t(), out=y)

    def lookup(self, ids: Tensor) -> Tensor:
        """ids int64 [T] -> lines [T, inputs] of an embedding."""
        return gather_rows(self.weight[None], ids)[0]

    def partial(self, x: Tensor) -> PartialSum:
        """x [T, inputs], which are cut as the weight's -> the sum over the ranks of `apply`."""
        return PartialSum(x, self.parallel, self.apply, self.add_normed, self.in_parts)

    def in_parts(self, x: Tensor) -> Tensor | None:
        """Parts [S, T, outputs] that add up to apply(x), where its kernel leaves them to who needs them."""
        if (few := few_lines_config(len(x), self.weight, in_parts=True)) and few.split > 1:
            return few_lines_linear(x.contiguous(), self.weight, self.bias, few)
        if (some := some_lines_config(len(x), self.weight, in_parts=True)) and some.split > 1:
            return some_lines_linear(x.contiguous(), self.weight, self.bias, some)
        return None

    def _apply_wide(self, x: Tensor) -> Tensor:
        """For CPUs that compute the dtype several times slower than float32 as soon as x has two lines: the product
        with a float32 copy, rounded once. The copy is made at the first use."""
        if self._wide is None:
            self._wide = self.weight.float(), None if self.bias is None else self.bias.float()
        return linear(x.float(), *self._wide).to(x.dtype)


Weights = dict[str, Weight]  # by slot: those of a layer, or those outside of all


class VocabParallelWeight(Weight):
    """Embedding or head: this rank holds the tokens from `first` on, the last rank's rows may be padding."""

    def __init__(self, weight: Tensor, bias: Tensor | None, vocab_size: int, parallel: ParallelState) -> None:
        super().__init__(weight, bias, parallel)
        self.vocab_size = vocab_size
        self.first = parallel.rank * len(weight)

    def lookup(self, ids: Tensor) -> Tensor:
        """ids int64 [T] -> [T, hidden], whichever rank holds a token."""
        if self.parallel.size == 1:
            return super().lookup(ids)
        return select_over_ranks(self.weight, self.first, ids, self.parallel)

    def apply(self, x: Lines, gated: bool = False) -> Tensor:
        """x [T, hidden] -> [T, vocab_size]: padding never leaves this class."""
        assert not gated
        return join_columns(super().apply(x), self.vocab_size, self.parallel)


def make_weight(slot: Slot, weight: Tensor, bias: Tensor | None, parallel: ParallelState) -> Weight:
    if slot.shard is Shard.ROW:
        return Weight(weight, bias if parallel.rank == 0 else None, parallel)
    if slot.shard is Shard.VOCAB:
        assert len(weight) == padded_share(slot.parts[0].size, parallel)
        return VocabParallelWeight(weight, bias, slot.parts[0].size, parallel)
    return Weight(weight, bias)
