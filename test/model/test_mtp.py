"""Case 78: blocks that predict further tokens are recognised behind the last layer, however the config counts them."""

import pytest
import torch
import transformers as T
from model.harness import SIZES, Driver, load, make_reference, random_ids, reference_logits
from safetensors.torch import load_file, save_file
from support.checkpoints import edit_json

from lightllm.common.basemodel.model_config import ConfigError

LATENT = dict(q_lora_rank=24, kv_lora_rank=20, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12)
EXPERTS = dict(n_routed_experts=4, n_group=2, topk_group=1, num_experts_per_tok=2, moe_intermediate_size=16)
CONFIGS = {
    "deepseek_v3": T.DeepseekV3Config(
        **SIZES | dict(num_key_value_heads=4), **LATENT, **EXPERTS, first_k_dense_replace=1
    ),
    "glm4_moe": T.Glm4MoeConfig(**SIZES, **EXPERTS, head_dim=16),
}
IDS = random_ids(20)


@pytest.fixture
def checkpoint(tmp_path, request):
    """A checkpoint with a fourth layer's tensors and those that only MTP blocks have; and transformers' logits."""
    model = make_reference(CONFIGS[request.param])
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    block = {n.replace("layers.2.", "layers.3."): t.clone() for n, t in tensors.items() if "layers.2." in n}
    block |= {f"model.layers.3.{n}.weight": torch.randn(64) for n in ("enorm", "hnorm", "shared_head.norm")}
    block |= {"model.layers.3.eh_proj.weight": torch.randn(64, 128)}
    save_file(tensors | block, tmp_path / "model.safetensors")
    return tmp_path, reference_logits(model, IDS)


@pytest.mark.parametrize("count", [1, 0, None])
@pytest.mark.parametrize("checkpoint", CONFIGS, indirect=True)
def test_case_78_mtp_blocks_are_left_aside(checkpoint, count):
    path, want = checkpoint
    edit_json(path / "config.json", num_nextn_predict_layers=count)
    torch.testing.assert_close(Driver(load(path)).prefill(IDS)[1], want, rtol=0, atol=1e-4)


def test_other_families_have_none(tmp_path):
    make_reference(T.LlamaConfig(**SIZES)).save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", num_hidden_layers=2)
    with pytest.raises(ConfigError, match=r"no slot of the model takes model\.layers\.2"):
        load(tmp_path)
