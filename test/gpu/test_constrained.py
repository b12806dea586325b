"""Constrained rows on a GPU, with graphs on: beside free rows, and in a model whose vocabulary is padded."""

from pathlib import Path

import pytest
import torch
from support.checkpoints import build
from support.constrained import assert_constraints_hold
from support.server import start_server

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_constrained_rows_beside_free_ones(tmp_path: Path) -> None:
    model_dir = build("llama", tmp_path, vocab_size=515)
    flags = ("--data_type", "fp32", "--max_total_token_num", "20000", "--chunked_prefill_size", "64")
    with start_server(model_dir, *flags, "--graph_max_batch_size", "32") as server:
        assert_constraints_hold(server)
