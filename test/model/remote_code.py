"""Families that transformers has no class for.

Each builder writes a checkpoint in the family's own layout and returns an independent reference: a transformers model
that computes the same by other means (renamed, repacked or rescaled weights, masks, position ids).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import torch
import transformers as T
from model.harness import SIZES, make_reference
from safetensors.torch import save_file

Reference = Callable[[list[int]], torch.Tensor]


def save(path: Path, config: dict, tensors: dict[str, torch.Tensor]) -> None:
    path.mkdir(parents=True, exist_ok=True)
    sizes = {k: v for k, v in SIZES.items() if not k.endswith("token_id")}
    (path / "config.json").write_text(json.dumps(sizes | config))
    save_file({k: v.contiguous().clone() for k, v in tensors.items()}, path / "model.safetensors")


def logits_of(model: T.PreTrainedModel) -> Reference:
    return torch.no_grad()(lambda ids: model(torch.tensor([ids])).logits[0])


def renamed(state: dict[str, torch.Tensor], *pairs: tuple[str, str]) -> dict[str, torch.Tensor]:
    def rename(name: str) -> str:
        for old, new in pairs:
            name = name.replace(old, new)
        return name

    return {rename(name): tensor for name, tensor in state.items()}


def fuse(state: dict[str, torch.Tensor], layer: str, names: tuple[str, ...], join: Callable) -> torch.Tensor:
    return join(*(state.pop(f"{layer}{name}") for name in names))


def internlm2(path: Path) -> Reference:
    model = make_reference(T.LlamaConfig(**SIZES))
    state = dict(model.state_dict())
    heads, kv_heads, dim = 4, 2, 16

    def grouped(q, k, v):
        q = q.view(kv_heads, heads // kv_heads, dim, -1)
        return torch.cat((q, k.view(kv_heads, 1, dim, -1), v.view(kv_heads, 1, dim, -1)), 1).flatten(0, 2)

    for i in range(SIZES["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        names = tuple(f"self_attn.{x}_proj.weight" for x in "qkv")
        state[f"{layer}attention.wqkv.weight"] = fuse(state, layer, names, grouped)
    state = renamed(
        state,
        *(
            ("self_attn.o_proj", "attention.wo"),
            ("mlp.gate_proj", "feed_forward.w1"),
            ("mlp.up_proj", "feed_forward.w3"),
        ),
        *(("mlp.down_proj", "feed_forward.w2"), ("input_layernorm", "attention_norm")),
        *(("post_attention_layernorm", "ffn_norm"), ("embed_tokens", "tok_embeddings"), ("lm_head", "output")),
    )
    save(path, dict(model_type="internlm2", bias=False, rms_norm_eps=1e-6), state)
    return logits_of(model)


def chatglm(path: Path) -> Reference:
    sizes = SIZES | dict(head_dim=16)
    model = make_reference(T.GlmConfig(**sizes, rms_norm_eps=1e-5))
    state = dict(model.state_dict())
    cat = lambda *parts: torch.cat(parts)
    for i in range(SIZES["num_hidden_layers"]):
        for leaf in ("weight", "bias"):
            names = tuple(f"self_attn.{x}_proj.{leaf}" for x in "qkv")
            fused = fuse(state, f"model.layers.{i}.", names, cat)
            state[f"model.layers.{i}.self_attention.query_key_value.{leaf}"] = fused
    state = renamed(
        state,
        *(("model.layers", "transformer.encoder.layers"), ("self_attn.o_proj", "self_attention.dense")),
        *(("mlp.gate_up_proj", "mlp.dense_h_to_4h"), ("mlp.down_proj", "mlp.dense_4h_to_h")),
        *(("model.embed_tokens", "transformer.embedding.word_embeddings"), ("lm_head", "transformer.output_layer")),
        ("model.norm", "transformer.encoder.final_layernorm"),
    )
    state["transformer.rotary_pos_emb.inv_freq"] = torch.ones(4)
    config = dict(
        model_type="chatglm", num_layers=3, padded_vocab_size=131, ffn_hidden_size=96, kv_channels=16,
        multi_query_attention=True, multi_query_group_num=2, add_qkv_bias=True, add_bias_linear=False, rmsnorm=True,
        layernorm_epsilon=1e-5, seq_length=256, apply_residual_connection_post_layernorm=False,
        num_hidden_layers=3, vocab_size=131,
    )  # fmt: skip
    save(path, config, state)
    return logits_of(model)


def minicpm(path: Path, tie: bool = False) -> Reference:
    """The factors of MiniCPM's code moved into the weights of an untied LLaMA."""
    model = make_reference(T.LlamaConfig(**SIZES))
    if tie:
        model.lm_head.weight.data.copy_(model.model.embed_tokens.weight)
    state = (
        dict(model.state_dict()) if not tie else {k: v for k, v in model.state_dict().items() if k != "lm_head.weight"}
    )
    scale_emb, scale_depth, base = 12, 1.4, 16
    config = dict(model_type="minicpm", scale_emb=scale_emb, scale_depth=scale_depth, dim_model_base=base)
    save(path, config | dict(rms_norm_eps=1e-6, tie_word_embeddings=tie), state)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(scale_emb)
        model.lm_head.weight.div_(SIZES["hidden_size"] / base)
        for layer in model.model.layers:
            for branch in (layer.self_attn.o_proj, layer.mlp.down_proj):
                branch.weight.mul_(scale_depth / math.sqrt(SIZES["num_hidden_layers"]))
    return logits_of(model)


def baichuan(path: Path, alibi: bool = False, second: bool = False) -> Reference:
    """W_pack; Baichuan 2 scales the rows of its head away; 13B: ALiBi as a mask, all tokens at position 0."""
    vocab = 125696 if second else 131
    model = make_reference(T.LlamaConfig(**SIZES | dict(num_key_value_heads=4, vocab_size=vocab, hidden_size=48)))
    state = dict(model.state_dict())
    for i in range(SIZES["num_hidden_layers"]):
        names = tuple(f"self_attn.{x}_proj.weight" for x in "qkv")
        state[f"model.layers.{i}.self_attn.W_pack.weight"] = fuse(
            state, f"model.layers.{i}.", names, lambda *parts: torch.cat(parts)
        )
    config = dict(model_type="baichuan", num_key_value_heads=None, vocab_size=vocab, hidden_size=48, rms_norm_eps=1e-6)
    save(path, config, state)
    if alibi:
        written = json.loads((path / "config.json").read_text())
        written["model_max_length"] = written.pop("max_position_embeddings")
        (path / "config.json").write_text(json.dumps(written))
    if second:
        with torch.no_grad():
            model.lm_head.weight.div_(model.lm_head.weight.norm(dim=1, keepdim=True))
    if not alibi:
        return logits_of(model)
    slopes = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8])

    @torch.no_grad()
    def reference(ids: list[int]) -> torch.Tensor:
        at = torch.arange(len(ids))
        mask = (slopes[:, None, None] * (at - at[:, None])).masked_fill(at > at[:, None], torch.finfo().min)
        positions = torch.zeros(1, len(ids), dtype=torch.long)
        return model(torch.tensor([ids]), attention_mask=mask[None], position_ids=positions).logits[0]

    return reference


BUILDERS: dict[str, Callable[[Path], Reference]] = {
    "internlm2": internlm2,
    "chatglm": chatglm,
    "minicpm": minicpm,
    "minicpm-tied": lambda path: minicpm(path, tie=True),
    "baichuan-7b": baichuan,
    "baichuan-13b": lambda path: baichuan(path, alibi=True),
    "baichuan2-7b": lambda path: baichuan(path, second=True),
}
