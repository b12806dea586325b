"""Prompts of latent attention: what is decompressed at a time is bounded, however many heads and tokens there are."""

import torch
import transformers as T
from model.harness import SIZES, Driver, load, make_reference, random_ids, reference_logits

from lightllm.common.basemodel.layer_infer.template import latent_attention

LATENT = dict(q_lora_rank=24, kv_lora_rank=20, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12)
WIDTH = LATENT["qk_nope_head_dim"] + LATENT["v_head_dim"]
IDS = random_ids(40)


def test_a_prompt_is_decompressed_in_pieces(tmp_path, monkeypatch):
    sizes = SIZES | dict(num_attention_heads=6, num_key_value_heads=6, hidden_size=48)
    model = make_reference(T.DeepseekV3Config(**sizes, **LATENT, first_k_dense_replace=3, n_routed_experts=8))
    model.save_pretrained(tmp_path)
    held, attend = [], latent_attention.latent_context_attention

    def counted(q, turned, kv, *others):
        held.append(kv.numel())
        return attend(q, turned, kv, *others)

    monkeypatch.setattr(latent_attention, "latent_context_attention", counted)
    for piece, calls in ((1 << 27, 1), (4 * 40 * WIDTH, 2), (1, 6)):
        monkeypatch.setattr(latent_attention, "PIECE", piece)
        held.clear()
        driver = Driver(load(tmp_path))
        row = driver.add(IDS)
        driver.step([(row, 25)])
        got = driver.step([(row, 15)], all_logits=True)
        torch.testing.assert_close(got, reference_logits(model, IDS)[25:], rtol=0, atol=1e-4)
        assert max(held) <= max(piece, 40 * WIDTH)
        assert len(held[-calls:]) == calls and sum(held[-calls:]) == 6 * 40 * WIDTH
