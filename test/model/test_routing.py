"""Expert parallelism and tensor parallelism refuse what they cannot cut, by name and number."""

import pytest
import torch
import transformers as T
from model.harness import SIZES, load, make_reference
from safetensors.torch import load_file

from lightllm.common.basemodel.model_config import ConfigError
from lightllm.distributed.parallel_state import ParallelState


@pytest.mark.parametrize(("ep_moe", "problem"), [(True, "num_experts 5"), (False, "moe_intermediate_size 27")])
def test_experts_that_ranks_cannot_share(tmp_path, ep_moe, problem):
    moe = dict(num_experts=5, moe_intermediate_size=27)
    make_reference(T.Qwen3MoeConfig(**SIZES, **moe, num_experts_per_tok=2, head_dim=16)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"--tp 2.*{problem}"):
        load(tmp_path, ParallelState(0, 2, ep_moe=ep_moe))


def test_expert_parallelism_of_a_model_without_experts(tmp_path):
    make_reference(T.LlamaConfig(**SIZES)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="--enable_ep_moe: llama has no experts"):
        load(tmp_path, ParallelState(ep_moe=True))


@pytest.mark.parametrize("wrong", [dict(n_group=3), dict(topk_group=5), dict(topk_group=1, num_experts_per_tok=3)])
def test_groups_that_cannot_hold_a_tokens_experts(tmp_path, wrong):
    experts = dict(n_routed_experts=8, n_group=4, topk_group=2, num_experts_per_tok=2, moe_intermediate_size=16) | wrong
    config = T.DeepseekV3Config(**SIZES | dict(num_key_value_heads=4), **experts, first_k_dense_replace=0)
    config.save_pretrained(tmp_path)
    (word, value), *_ = wrong.items()
    with pytest.raises(ConfigError, match=f"{word} {value}"):
        load(tmp_path, load_format="random")


def test_routers_are_held_in_float32(tmp_path):
    """The bias of DeepSeek V3's router decides between near scores; in bfloat16 it would choose other experts."""
    sizes = SIZES | dict(num_key_value_heads=4, q_lora_rank=24, kv_lora_rank=20, qk_nope_head_dim=16)
    experts = dict(n_routed_experts=8, n_group=2, topk_group=1, moe_intermediate_size=16, first_k_dense_replace=0)
    config = T.DeepseekV3Config(**sizes, **experts, qk_rope_head_dim=8, v_head_dim=12, num_experts_per_tok=2)
    make_reference(config).save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    weights = load(tmp_path, dtype=torch.bfloat16).layer_weights[0]
    assert torch.equal(weights["router"].weight.cpu(), stored["model.layers.0.mlp.gate.weight"])
    assert torch.equal(weights["router_bias"].weight.cpu(), stored["model.layers.0.mlp.gate.e_score_correction_bias"])
