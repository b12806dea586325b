"""Lines of a table that ranks hold together, each some neighbours."""

from torch import Tensor

from lightllm.common.basemodel.triton_kernel.all_reduce import sum_over_ranks
from lightllm.distributed.parallel_state import ParallelState


def select_over_ranks(held: Tensor, first: int, index: Tensor, parallel: ParallelState) -> Tensor:
    """Lines [S, D] of index int64 [S], whichever rank holds them. held [N, D]: the table's from `first` on."""
    local = index - first
    absent = (local < 0) | (local >= len(held))
    found = held.index_select(0, local.masked_fill(absent, 0))
    return sum_over_ranks(found.masked_fill_(absent[:, None], 0), parallel)
