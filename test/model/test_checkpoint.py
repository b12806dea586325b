"""Which weight files are read, and that every slot and every tensor is accounted for: cases 61, 63, 64 and 77."""

import itertools
import json
import os
import re
import shutil

import pytest
import torch
import transformers as T
from model.harness import SIZES, Driver, load, make_reference, random_ids, reference_logits, reload_reference
from safetensors.torch import load_file, save_file
from support.checkpoints import Payload, edit_json

from lightllm.common.basemodel.layer_weights.hf_load_utils import CheckpointError
from lightllm.common.basemodel.model_config import ConfigError
from lightllm.distributed.parallel_state import ParallelState

IDS = random_ids(20)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("source")
    make_reference(T.LlamaConfig(**SIZES)).save_pretrained(path)
    return path


@pytest.fixture
def plain(source, tmp_path):
    return shutil.copytree(source, tmp_path / "model")


@pytest.fixture
def sharded(source, tmp_path):
    """Several shards and an index."""
    path = tmp_path / "sharded"
    reload_reference(source).save_pretrained(path, max_shard_size="100KB")
    assert len(list(path.glob("model-*.safetensors"))) > 1
    return path


@pytest.fixture(scope="module")
def want(source):
    return reference_logits(reload_reference(source), IDS)


def logits(path, **options):
    return Driver(load(path, **options)).prefill(IDS)[1]


def loads_right(path, want):
    torch.testing.assert_close(logits(path), want, rtol=0, atol=1e-4)


def edit(path, change, file="model.safetensors"):
    tensors = load_file(path / file)
    change(tensors)
    save_file(tensors, path / file, metadata={"format": "pt"})


def test_shards_stream_with_progress(sharded, want):
    heard = []
    torch.testing.assert_close(logits(sharded, progress=lambda *report: heard.append(report)), want, rtol=0, atol=1e-4)
    assert heard == sorted(heard, key=lambda r: r[0])
    assert heard[-1][0] == heard[-1][1] > 0
    files = [file for _, _, file in heard]
    assert sum(a != b for a, b in itertools.pairwise(files)) == len(set(files)) - 1, "each shard is opened once"


def test_case_63_stray_files_beside_an_index(sharded, want):
    wrong = {name: torch.zeros_like(t) for f in sharded.glob("*.safetensors") for name, t in load_file(f).items()}
    save_file(wrong, sharded / "model.safetensors")
    save_file({"other.names": torch.ones(3)}, sharded / "consolidated.safetensors")
    loads_right(sharded, want)


def test_case_63_stale_tensor_in_another_shard(sharded, want):
    index = json.loads((sharded / "model.safetensors.index.json").read_text())["weight_map"]
    name, home = next(iter(index.items()))
    other = next(file for file in index.values() if file != home)
    edit(sharded, lambda t: t.update({name: torch.zeros_like(load_file(sharded / home)[name])}), other)
    loads_right(sharded, want)


def test_case_63_absent_shard_is_named(sharded):
    shard = sorted(sharded.glob("model-*.safetensors"))[0]
    shard.unlink()
    with pytest.raises(CheckpointError, match=shard.name):
        load(sharded)


@pytest.mark.parametrize("all_there", [True, False])
def test_case_63_no_index(sharded, want, all_there):
    (sharded / "model.safetensors.index.json").unlink()
    if all_there:
        return loads_right(sharded, want)
    sorted(sharded.glob("model-*.safetensors"))[1].unlink()
    with pytest.raises(CheckpointError, match=r"shards \[2\] are absent"):
        load(sharded)


def test_case_63_index_with_trailing_garbage(sharded):
    with open(sharded / "model.safetensors.index.json", "a") as file:
        file.write("garbage")
    with pytest.raises(ConfigError, match=r"model\.safetensors\.index\.json"):
        load(sharded)


def test_index_that_names_the_wrong_shard(sharded):
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    name, home = next(iter(index["weight_map"].items()))
    index["weight_map"][name] = next(f for f in index["weight_map"].values() if f != home)
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=name):
        load(sharded)


@pytest.mark.parametrize("share", [0.99, 0.001, 0], ids=["a tensor", "the header", "all"])
def test_truncated_file_is_named(plain, share):
    file = plain / "model.safetensors"
    os.truncate(file, int(share * file.stat().st_size))
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load(plain)


def test_no_weights_at_all(plain):
    (plain / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=str(plain)):
        load(plain)


def test_a_missing_tensor_names_slot_and_tensor(plain):
    edit(plain, lambda t: t.pop("model.layers.1.self_attn.k_proj.weight"))
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.self_attn\.k_proj\.weight.*qkv"):
        load(plain)


@pytest.mark.parametrize("name", ["self_attn.q_norm.weight", "mlp.gate_proj.weight_scale_inv"])
def test_an_unused_tensor_is_named(plain, name):
    edit(plain, lambda t: t.update({f"model.layers.1.{name}": torch.ones(16)}))
    with pytest.raises(CheckpointError, match=re.escape(name)):
        load(plain)


def test_rotary_buffers_are_ignored(plain, want):
    edit(plain, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    loads_right(plain, want)


@pytest.mark.parametrize(
    "name", ["model.layers.2.mlp.down_proj.weight", "model.norm.weight", "model.embed_tokens.weight"]
)
def test_a_misshapen_tensor_is_named(plain, name):
    edit(plain, lambda t: t.update({name: torch.cat((t[name], t[name]))}))
    with pytest.raises(CheckpointError, match=name):
        load(plain)


def test_a_number_in_place_of_a_tensor_is_named(plain):
    edit(plain, lambda t: t.update({"model.norm.weight": torch.tensor(1.0)}))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
        load(plain)


def test_case_77_integer_weights_are_refused(plain):
    name = "model.layers.0.mlp.up_proj.weight"
    edit(plain, lambda t: t.update({name: t[name].to(torch.int8)}))
    with pytest.raises(CheckpointError, match=r"up_proj.*int8"):
        load(plain)


def test_case_64_bin_only(plain, want):
    torch.save(load_file(plain / "model.safetensors"), plain / "pytorch_model.bin")
    (plain / "model.safetensors").unlink()
    loads_right(plain, want)


def test_case_64_sharded_bin_of_the_old_format(plain, want):
    tensors = list(load_file(plain / "model.safetensors").items())
    (plain / "model.safetensors").unlink()
    index = {}
    for i, part in enumerate((tensors[:10], tensors[10:])):
        file = f"pytorch_model-0000{i + 1}-of-00002.bin"
        torch.save(dict(part), plain / file, _use_new_zipfile_serialization=False)
        index |= {name: file for name, _ in part}
    (plain / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": index}))
    loads_right(plain, want)


@pytest.mark.parametrize("zipped", [True, False])
def test_case_64_a_payload_is_not_run(plain, tmp_path, zipped):
    tensors = load_file(plain / "model.safetensors")
    (plain / "model.safetensors").unlink()
    torch.save(
        tensors | {"x": Payload(tmp_path / "touched")},
        plain / "pytorch_model.bin",
        _use_new_zipfile_serialization=zipped,
    )
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
        load(plain)
    assert not (tmp_path / "touched").exists()


def tied_forms():
    equal = lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()})
    yield "tied, no head", True, lambda t: t.pop("lm_head.weight")
    yield "tied, equal head", True, equal
    yield "tied, other head", True, lambda t: None
    yield "tied, head only", True, lambda t: t.pop("model.embed_tokens.weight")
    yield "untied", False, lambda t: None
    yield "class default", None, lambda t: None


@pytest.mark.parametrize(("tie", "change"), [pytest.param(*f[1:], id=f[0]) for f in tied_forms()])
@pytest.mark.parametrize(
    "config",
    [T.LlamaConfig, T.Qwen2Config, T.Qwen3Config, T.MistralConfig, T.GemmaConfig, T.Gemma2Config, T.Gemma3TextConfig,
     T.CohereConfig, T.Cohere2Config, T.Phi3Config, T.StableLmConfig, T.Starcoder2Config, T.Olmo2Config, T.Glm4Config,
     T.MixtralConfig, T.Qwen3MoeConfig, T.GptOssConfig],
)  # fmt: skip
def test_case_61_tied_embeddings_as_transformers(tmp_path, config, tie, change):
    sizes = SIZES | dict(num_hidden_layers=1, head_dim=16, tie_word_embeddings=False)
    make_reference(config(**sizes)).save_pretrained(tmp_path)
    edit(tmp_path, change)
    edit_json(tmp_path / "config.json", tie_word_embeddings=tie)
    torch.testing.assert_close(logits(tmp_path), reference_logits(reload_reference(tmp_path), IDS), rtol=0, atol=1e-4)


@pytest.mark.parametrize("tie", [False, None])
def test_case_61_untied_without_head_is_refused(plain, tie):
    edit(plain, lambda t: t.pop("lm_head.weight"))
    edit_json(plain / "config.json", tie_word_embeddings=tie)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight.*head"):
        load(plain)


def test_tied_weights_are_held_once(plain):
    edit(plain, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    edit_json(plain / "config.json", tie_word_embeddings=True)
    weights = load(plain).outer_weights
    assert weights["head"].weight is weights["embed"].weight


def test_random_weights_need_only_the_config(plain):
    (plain / "model.safetensors").unlink()
    first, second = (logits(plain, load_format="random") for _ in range(2))
    assert torch.equal(first, second)
    assert first.isfinite().all() and first.std() > 0.1
    model = load(plain, load_format="random")
    weights = [w.weight for layer in [model.outer_weights, *model.layer_weights] for w in layer.values()]
    assert all((w != 0).all() for w in weights)


def test_random_parts_of_a_fused_tensor_differ(tmp_path):
    T.Phi3Config(**SIZES).save_pretrained(tmp_path)
    q, k, v = load(tmp_path, load_format="random").layer_weights[0]["qkv"].weight.split((64, 32, 32))
    assert not torch.equal(q[:32], k) and not torch.equal(k, v)


def test_random_weights_that_ranks_share_are_the_same(tmp_path):
    config = T.DeepseekV3Config(**SIZES | dict(num_key_value_heads=4), first_k_dense_replace=3)
    config.save_pretrained(tmp_path)
    ranks = [load(tmp_path, ParallelState(rank, 2), load_format="random").layer_weights[0] for rank in range(2)]
    for name in ("q_kv_a", "attn_norm"):
        assert torch.equal(ranks[0][name].weight, ranks[1][name].weight), name
    assert not torch.equal(ranks[0]["q_b"].weight, ranks[1]["q_b"].weight)


FUSED = {
    "qkv": (T.Phi3Config(**SIZES), "model.layers.0.self_attn.qkv_proj.weight", 0),
    "gate_up": (T.Phi3Config(**SIZES), "model.layers.0.mlp.gate_up_proj.weight", 0),
    "experts_down": (
        T.GptOssConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, head_dim=16),
        "model.layers.0.mlp.experts.down_proj",
        0,
    ),
    "experts_gate_up": (
        T.GptOssConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, head_dim=16),
        "model.layers.0.mlp.experts.gate_up_proj",
        2,
    ),
}


@pytest.mark.parametrize("slot", FUSED)
def test_a_fused_tensor_that_is_too_long_is_named(tmp_path, slot):
    config, name, dim = FUSED[slot]
    make_reference(config).save_pretrained(tmp_path)
    edit(tmp_path, lambda t: t.update({name: torch.cat((t[name], t[name]), dim)}))
    with pytest.raises(CheckpointError, match=f"{name}.*slot '{slot}'"):
        load(tmp_path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near(plain, want, dtype):
    got = logits(plain, dtype=dtype)
    assert got.dtype is torch.float32
    error = (got.log_softmax(-1) - want.log_softmax(-1)).abs().mean() / want.log_softmax(-1).abs().mean()
    assert error < 0.03
