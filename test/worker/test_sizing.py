"""The arithmetic of the KV pool."""

import numpy as np
import pytest

from lightllm.common.kv_cache_mem_manager.sizing import (
    GIB,
    NotEnoughMemory,
    asked_pool,
    check_rows,
    cpu_pool,
    default_rows,
    gpu_pool,
)
from lightllm.server.core.messages import unpack
from lightllm.server.core.server_args import ServerArgs
from lightllm.server.router.model_infer.warm_up import largest_step, small_steps


def test_gpu_pool_is_a_share_of_what_the_largest_step_leaves():
    pool = gpu_pool(free_before=100 * GIB, free_after=80 * GIB, mem_fraction=0.5, bytes_per_token=1 << 20)
    assert pool.tokens == 40 * 1024
    assert "100.00 GiB free - 20.00 GiB for the largest step and graphs = 80.00 GiB; x 0.5" in pool.arithmetic


def test_cpu_pool_has_two_caps():
    assert cpu_pool(100 * GIB, ranks=1, most_tokens=10**9, bytes_per_token=1 << 20).tokens == 2048
    assert cpu_pool(100 * GIB, ranks=2, most_tokens=10**9, bytes_per_token=1 << 20).tokens == 1024
    assert cpu_pool(1 * GIB, ranks=1, most_tokens=10**9, bytes_per_token=1 << 20).tokens == 307
    assert cpu_pool(100 * GIB, ranks=1, most_tokens=500, bytes_per_token=1 << 20).tokens == 500


def test_no_room_for_a_request_is_refused():
    with pytest.raises(NotEnoughMemory, match="no memory is left for the KV pool"):
        gpu_pool(free_before=GIB, free_after=0, mem_fraction=0.9, bytes_per_token=1 << 20)
    with pytest.raises(NotEnoughMemory, match="no memory is left for the KV pool"):
        cpu_pool(0, ranks=1, most_tokens=1000, bytes_per_token=1 << 20)


def test_a_flag_that_does_not_fit_is_refused():
    assert asked_pool(1000, limit=GIB, bytes_per_token=1 << 20).tokens == 1000
    with pytest.raises(NotEnoughMemory, match=r"--max_total_token_num 1025 does not fit: .* 1.00 GiB free"):
        asked_pool(1025, limit=GIB, bytes_per_token=1 << 20)


def test_more_rows_than_a_table_has_room_for_are_refused():
    check_rows(131072, max_len=1024, free=GIB)
    with pytest.raises(NotEnoughMemory, match=r"--running_max_req_size 131073 does not fit: .* at most 131072 fit"):
        check_rows(131073, max_len=1024, free=GIB)


@pytest.mark.parametrize(
    "rows, tokens, chunk, max_len", [(512, 8192, 2048, 8192), (512, 64, 16, 32), (4, 8192, 2048, 99)]
)
def test_the_largest_step_keeps_to_the_flags(rows, tokens, chunk, max_len):
    args = ServerArgs(batch_max_tokens=tokens, chunked_prefill_size=chunk)
    plan = largest_step(args, rows, max_len)
    lengths, starts = unpack(plan.lengths, np.int32), unpack(plan.starts, np.int32)
    assert len(lengths) <= rows
    assert lengths.sum() <= tokens and (len(lengths) == rows or lengths.sum() == tokens)
    assert (lengths[: plan.num_decode] == 1).all() and (lengths <= chunk).all()
    assert (starts + lengths <= max_len).all()
    assert len(unpack(plan.slots, np.int32)) == lengths.sum()


@pytest.mark.parametrize("rows, tokens, chunk", [(512, 8192, 2048), (1, 8192, 2048), (512, 17, 17), (512, 1, 1)])
def test_small_steps_keep_to_the_flags(rows, tokens, chunk):
    args = ServerArgs(batch_max_tokens=tokens, chunked_prefill_size=chunk)
    plans = list(small_steps(args, rows, 4096))
    assert plans
    for plan in plans:
        lengths = unpack(plan.lengths, np.int32)
        assert len(lengths) - plan.num_decode == 1 and len(lengths) <= rows
        assert lengths.sum() <= tokens and lengths[-1] <= chunk


@pytest.mark.parametrize("gpu_memory, rows", [(0, 512), (24 * GIB, 512), (80 * GIB, 1024), (141 * GIB, 1024)])
def test_a_large_gpu_runs_more_sequences(gpu_memory, rows):
    assert default_rows(gpu_memory) == rows
