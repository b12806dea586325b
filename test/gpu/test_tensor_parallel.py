"""Two ranks on GPUs, with and without CUDA graphs and shared memory, give the tokens of one.

Where there are no two GPUs they run on CPUs over gloo.
"""

import pytest
import torch
import torch.multiprocessing as mp
from gpu.tensor_parallel_ranks import VOCAB, answers, halves_main, sums_main, tokens_main
from support.step_driver import save_random_model

from lightllm.distributed.parallel_state import ParallelState

ON_GPUS = torch.cuda.device_count() >= 2
MODELS = {  # 3 KV heads are held twice, and the second rank's half of the vocabulary ends with padding
    "llama": dict(hidden_size=384, num_attention_heads=6, num_key_value_heads=3, head_dim=64, vocab_size=VOCAB),
    "gemma2": dict(head_dim=64, vocab_size=VOCAB),
}


@pytest.mark.parametrize("model", ["llama", pytest.param("gemma2", marks=pytest.mark.slow)])
def test_two_ranks_give_the_tokens_of_one(model, tmp_path) -> None:
    random_model = save_random_model(tmp_path, model, **MODELS[model])
    with torch.no_grad():  # the very last token is likely
        random_model.lm_head.weight[-1] *= 5
    random_model.save_pretrained(tmp_path)
    ranks = mp.spawn(tokens_main, (2, str(tmp_path)), nprocs=2, join=False)
    device = torch.device("cuda", 0) if ON_GPUS else torch.device("cpu")
    alone = answers(tmp_path, ParallelState(), device, ())
    while not ranks.join():
        pass
    assert any(VOCAB - 1 in row for rows in alone.values() for row in rows)
    for rank in range(2):
        found = torch.load(tmp_path / f"tokens-{rank}.pt")
        assert len(found) == (3 if ON_GPUS else 1)
        for way, tokens in found.items():
            assert tokens == alone, (rank, way)


@pytest.mark.skipif(not ON_GPUS, reason="needs two GPUs")
@pytest.mark.parametrize("run", [sums_main, halves_main], ids=["sums", "halves"])
def test_sums_in_graphs_of_any_order_and_beside_products(run, tmp_path) -> None:
    mp.spawn(run, (2, str(tmp_path)), nprocs=2)
