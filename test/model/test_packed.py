"""Checkpoints whose weights are stored in few bits and dequantized when they are read: fp8 blocks and MXFP4."""

import json

import pytest
import torch
import transformers as T
from model.harness import SIZES, Driver, load, make_reference, random_ids, reference_logits
from safetensors.torch import load_file, save_file
from support.checkpoints import edit_json
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from lightllm.common.basemodel.layer_weights.hf_load_utils import CheckpointError
from lightllm.common.basemodel.model_config import ConfigError
from lightllm.distributed.parallel_state import ParallelState

LATENT = dict(q_lora_rank=24, kv_lora_rank=20, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12)
EXPERTS = dict(n_routed_experts=4, n_group=2, topk_group=1, num_experts_per_tok=2, moe_intermediate_size=24)
DEEPSEEK = T.DeepseekV3Config(**SIZES | dict(num_key_value_heads=4), **LATENT, **EXPERTS, first_k_dense_replace=1)
PUBLISHED = T.DeepseekV3Config(  # sizes beside multiples of the blocks of 128 that DeepSeek publishes
    **SIZES | dict(num_key_value_heads=4, hidden_size=160, intermediate_size=300), **LATENT | dict(q_lora_rank=136),
    **EXPERTS | dict(moe_intermediate_size=144), first_k_dense_replace=1,
)  # fmt: skip
IDS = random_ids(20)
BLOCK = 16


def quantize(weight: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """float8 values, scales of blocks of block x block, and what they mean."""
    values, scales = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), []
    meant = torch.empty_like(weight)
    for r in range(0, weight.shape[0], block):
        scales.append([])
        for c in range(0, weight.shape[1], block):
            at = slice(r, r + block), slice(c, c + block)
            scale = weight[at].abs().max() / 448
            values[at] = (weight[at] / scale).to(torch.float8_e4m3fn)
            meant[at] = values[at].float() * scale
            scales[-1].append(scale)
    return values, torch.tensor(scales), meant


@pytest.fixture
def fp8(tmp_path):
    return fp8_checkpoint(tmp_path, DEEPSEEK, BLOCK)


def fp8_checkpoint(tmp_path, config, block):
    """A DeepSeek-V3 checkpoint as published, in shards, and the logits of what its weights mean."""
    model = make_reference(config)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    meant, scales = dict(tensors), {}
    for name, weight in tensors.items():
        if name.endswith("_proj.weight"):
            tensors[name], scales[f"{name}_scale_inv"], meant[name] = quantize(weight, block)
    save_file(meant, tmp_path / "model.safetensors", metadata={"format": "pt"})
    reference = T.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    want = reference_logits(reference.eval(), IDS)
    (tmp_path / "model.safetensors").unlink()
    tensors |= scales
    names = sorted(tensors)  # the last scales are in another shard than their weights
    files = {}
    for i, part in enumerate((names[: len(names) // 2 + 1], names[len(names) // 2 + 1 :])):
        file = f"model-0000{i + 1}-of-00002.safetensors"
        save_file({n: tensors[n] for n in part}, tmp_path / file)
        files |= dict.fromkeys(part, file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(dict(weight_map=files)))
    kind = dict(quant_method="fp8", weight_block_size=[block, block], fmt="e4m3")
    edit_json(tmp_path / "config.json", quantization_config=kind)
    return tmp_path, want


@pytest.mark.parametrize(("config", "block"), [(DEEPSEEK, BLOCK), (PUBLISHED, 128)], ids=["16", "128"])
def test_fp8_blocks(tmp_path, config, block):
    path, want = fp8_checkpoint(tmp_path, config, block)
    torch.testing.assert_close(Driver(load(path)).prefill(IDS)[1], want, rtol=0, atol=1e-4)


def test_fp8_blocks_of_a_rank(fp8):
    """Cuts that do not start at a block."""
    path, _ = fp8
    whole = load(path).layer_weights[1]
    for rank in range(4):
        part = load(path, ParallelState(rank, 4)).layer_weights[1]
        assert torch.equal(part["o"].weight, whole["o"].weight[:, rank * 12 : rank * 12 + 12])
        assert torch.equal(part["experts_down"].weight, whole["experts_down"].weight[..., rank * 6 : rank * 6 + 6])


def test_fp8_without_scales_is_refused(fp8):
    path, _ = fp8
    index = path / "model.safetensors.index.json"
    files = json.loads(index.read_text())["weight_map"]
    left = {n: f for n, f in files.items() if n != "model.layers.0.self_attn.o_proj.weight_scale_inv"}
    index.write_text(json.dumps(dict(weight_map=left)))
    with pytest.raises(CheckpointError, match=r"layers\.0\.self_attn\.o_proj\.weight.*float8"):
        load(path)


@pytest.mark.parametrize("block", [None, 128, [128], [0, 128], ["a", "b"]])
def test_fp8_of_another_kind_is_refused(fp8, block):
    path, _ = fp8
    edit_json(path / "config.json", quantization_config=dict(quant_method="fp8", weight_block_size=block))
    with pytest.raises(ConfigError, match="fp8"):
        load(path)


def test_mxfp4_experts(tmp_path):
    """gpt-oss as published; what the packed experts mean is transformers' word."""
    sizes = SIZES | dict(intermediate_size=96)
    model = make_reference(T.GptOssConfig(**sizes, num_local_experts=4, num_experts_per_tok=2, head_dim=16))
    generator = torch.Generator().manual_seed(0)
    packed = {}
    for i, layer in enumerate(model.model.layers):
        for name in ("gate_up_proj", "down_proj"):
            weight = getattr(layer.mlp.experts, name)
            experts, inputs, outputs = weight.shape
            blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=generator).to(torch.uint8)
            scales = torch.randint(120, 126, (experts, outputs, inputs // 32), generator=generator).to(torch.uint8)
            packed[f"model.layers.{i}.mlp.experts.{name}_blocks"] = blocks
            packed[f"model.layers.{i}.mlp.experts.{name}_scales"] = scales
            weight.data.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    plain = {n: t for n, t in tensors.items() if not n.endswith(("experts.gate_up_proj", "experts.down_proj"))}
    save_file(plain | packed, tmp_path / "model.safetensors")
    edit_json(tmp_path / "config.json", quantization_config=dict(quant_method="mxfp4"))
    torch.testing.assert_close(Driver(load(tmp_path)).prefill(IDS)[1], reference_logits(model, IDS), rtol=0, atol=1e-4)
