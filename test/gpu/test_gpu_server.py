"""The real server on a GPU: float32 greedy tokens of tiny checkpoints equal transformers'."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from support.checkpoints import build, random_prompt, reference
from support.server import assert_greedy, start_server

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LENGTHS = (1, 2, 15, 16, 17, 31, 33, 64, 100, 127, 128, 129, 200)
NEW_TOKENS = 40


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_greedy_tokens_equal_transformers(family: str, tmp_path: Path) -> None:
    model_dir = build(family, tmp_path / family)
    wanted = [reference(model_dir, random_prompt(length), NEW_TOKENS) for length in LENGTHS]
    flags = ("--data_type", "fp32", "--max_total_token_num", "20000", "--chunked_prefill_size", "64")
    with start_server(model_dir, *flags) as server, ThreadPoolExecutor(len(LENGTHS)) as pool:
        list(pool.map(partial(assert_greedy, server), wanted))  # all at once
        assert_greedy(server, wanted[-1])  # alone
