"""Families that transformers has no class for: checkpoints in their own layouts, and independent references.

Each builder writes a random checkpoint and returns what the family's published code computes of it, written down from
that code in plain torch: one prompt at a time, without a cache, from the tensors of the file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from model.harness import SIZES
from safetensors.torch import save_file
from torch import Tensor

Reference = Callable[[list[int]], Tensor]
HIDDEN, HEADS, KV_HEADS, DIM, FFN, VOCAB, LAYERS = 64, 4, 2, 16, 96, SIZES["vocab_size"], 3
EPS = 1e-6
CONFIG = dict(
    hidden_size=HIDDEN, intermediate_size=FFN, num_hidden_layers=LAYERS, vocab_size=VOCAB, num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS, hidden_act="silu", max_position_embeddings=256, rms_norm_eps=EPS,
    tie_word_embeddings=False,
)  # fmt: skip


class Weights(dict):
    """Random tensors under the checkpoint's names; `of` is the part below a prefix."""

    @staticmethod
    def random(shapes: dict[str, tuple[int, ...]]) -> Weights:
        torch.manual_seed(0)
        norms = lambda name: 1.0 if "norm" in name else 0.0
        return Weights({name: torch.randn(shape) * 0.2 + norms(name) for name, shape in shapes.items()})

    def of(self, prefix: str) -> Weights:
        return Weights({name.removeprefix(prefix): t for name, t in self.items() if name.startswith(prefix)})

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self[f"{name}.weight"], self.get(f"{name}.bias"))

    def norm(self, name: str, x: Tensor, eps: float = EPS) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * self[f"{name}.weight"]


def in_layers(prefix: str, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {prefix.format(i) + name: shape for i in range(LAYERS) for name, shape in shapes.items()}


def save(path: Path, config: dict, tensors: dict[str, Tensor]) -> None:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")


def rotate_half(x: Tensor, theta: float = 1e4) -> Tensor:
    """x [T, heads, dim]: pairs (i, i + dim / 2)."""
    dim = x.shape[-1]
    angle = torch.arange(len(x))[:, None, None] / theta ** (torch.arange(0, dim, 2) / dim)
    first, second = x.chunk(2, -1)
    return torch.cat((first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()), -1)


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | float = 0.0) -> Tensor:
    """q [T, heads, dim], k and v [T, kv heads, dim] -> [T, heads * dim]; `bias` [heads, T, T] is part of the scores."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    score = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1]) + bias
    hidden = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
    return torch.einsum("hqk,khd->qhd", score.masked_fill(hidden, -torch.inf).softmax(-1), v).flatten(1)


def llama_shapes(hidden: int) -> dict[str, tuple[int, ...]]:
    """What lies behind attention in a layer, and its norms, where they are called as in LLaMA."""
    shapes = {"mlp.gate_proj.weight": (FFN, hidden), "mlp.up_proj.weight": (FFN, hidden)}
    shapes |= {"mlp.down_proj.weight": (hidden, FFN)}
    return shapes | {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}


def llama_ffn(layer: Weights, x: Tensor) -> Tensor:
    h = layer.norm("post_attention_layernorm", x)
    return layer.linear("mlp.down_proj", F.silu(layer.linear("mlp.gate_proj", h)) * layer.linear("mlp.up_proj", h))


def llama_ends(hidden: int, vocab: int) -> dict[str, tuple[int, ...]]:
    ends = {"model.embed_tokens.weight": (vocab, hidden), "lm_head.weight": (vocab, hidden)}
    return ends | {"model.norm.weight": (hidden,)}


def internlm(path: Path) -> Reference:
    """InternLM 1: LLaMA whose attention has biases, also in its output."""
    shapes = {f"self_attn.{x}_proj.weight": (HIDDEN, HIDDEN) for x in "qkvo"}
    shapes |= {f"self_attn.{x}_proj.bias": (HIDDEN,) for x in "qkvo"}
    shapes = in_layers("model.layers.{}.", shapes | llama_shapes(HIDDEN))
    w = Weights.random(shapes | llama_ends(HIDDEN, VOCAB))
    config = {key: value for key, value in CONFIG.items() if key != "num_key_value_heads"}
    save(path, config | dict(model_type="internlm", bias=True), w)

    def reference(ids: list[int]) -> Tensor:
        x = w["model.embed_tokens.weight"][ids]
        for i in range(LAYERS):
            layer = w.of(f"model.layers.{i}.")
            h = layer.norm("input_layernorm", x)
            q, k, v = (layer.linear(f"self_attn.{n}_proj", h).view(-1, HEADS, DIM) for n in "qkv")
            x = x + layer.linear("self_attn.o_proj", attend(rotate_half(q), rotate_half(k), v))
            x = x + llama_ffn(layer, x)
        return w.linear("lm_head", w.norm("model.norm", x))

    return reference


def internlm2(path: Path, bias: bool = False) -> Reference:
    """wqkv holds for each KV head its queries, its k and its v."""
    group = HEADS // KV_HEADS
    shapes = {"attention.wqkv.weight": (KV_HEADS * (group + 2) * DIM, HIDDEN), "attention.wo.weight": (HIDDEN, HIDDEN)}
    if bias:
        shapes |= {"attention.wqkv.bias": (KV_HEADS * (group + 2) * DIM,), "attention.wo.bias": (HIDDEN,)}
    shapes |= {"feed_forward.w1.weight": (FFN, HIDDEN), "feed_forward.w3.weight": (FFN, HIDDEN)}
    shapes |= {"feed_forward.w2.weight": (HIDDEN, FFN)}
    shapes |= {"attention_norm.weight": (HIDDEN,), "ffn_norm.weight": (HIDDEN,)}
    outer = {"model.tok_embeddings.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    w = Weights.random(in_layers("model.layers.{}.", shapes) | outer | {"output.weight": (VOCAB, HIDDEN)})
    save(path, CONFIG | dict(model_type="internlm2", bias=bias, rope_theta=1e6), w)

    def reference(ids: list[int]) -> Tensor:
        x = w["model.tok_embeddings.weight"][ids]
        for i in range(LAYERS):
            layer = w.of(f"model.layers.{i}.")
            qkv = layer.linear("attention.wqkv", layer.norm("attention_norm", x)).view(-1, KV_HEADS, group + 2, DIM)
            q, k, v = qkv[:, :, :group].flatten(1, 2), qkv[:, :, -2], qkv[:, :, -1]
            x = x + layer.linear("attention.wo", attend(rotate_half(q, 1e6), rotate_half(k, 1e6), v))
            h = layer.norm("ffn_norm", x)
            h = F.silu(layer.linear("feed_forward.w1", h)) * layer.linear("feed_forward.w3", h)
            x = x + layer.linear("feed_forward.w2", h)
        return w.linear("output", w.norm("model.norm", x))

    return reference


def chatglm(path: Path, rope_ratio: float = 1, groups: int | None = KV_HEADS) -> Reference:
    """ChatGLM 2, 3 and GLM-4: half of each head is turned, as complex numbers of neighbours; `groups` None: no MQA."""
    kv_heads, eps = groups or HEADS, 1e-5
    fused = (HEADS + 2 * kv_heads) * DIM
    shapes = {"self_attention.query_key_value.weight": (fused, HIDDEN), "self_attention.query_key_value.bias": (fused,)}
    shapes |= {"self_attention.dense.weight": (HIDDEN, HIDDEN), "mlp.dense_h_to_4h.weight": (2 * FFN, HIDDEN)}
    shapes |= {"mlp.dense_4h_to_h.weight": (HIDDEN, FFN)}
    shapes |= {"input_layernorm.weight": (HIDDEN,), "post_attention_layernorm.weight": (HIDDEN,)}
    outer = {"embedding.word_embeddings.weight": (VOCAB, HIDDEN), "encoder.final_layernorm.weight": (HIDDEN,)}
    outer |= {"output_layer.weight": (VOCAB, HIDDEN), "rotary_pos_emb.inv_freq": (DIM // 4,)}
    shapes = in_layers("encoder.layers.{}.", shapes) | outer
    stored = Weights.random({f"transformer.{name}": shape for name, shape in shapes.items()})
    config = dict(
        model_type="chatglm", num_layers=LAYERS, padded_vocab_size=VOCAB, ffn_hidden_size=FFN, kv_channels=DIM,
        hidden_size=HIDDEN, num_attention_heads=HEADS, multi_query_attention=groups is not None, add_qkv_bias=True,
        multi_query_group_num=groups or 1, add_bias_linear=False, rmsnorm=True, layernorm_epsilon=eps, seq_length=256,
        apply_residual_connection_post_layernorm=False, rope_ratio=rope_ratio,
    )  # fmt: skip
    save(path, config, stored)
    w = stored.of("transformer.")

    def turn(x: Tensor) -> Tensor:
        turned, rest = x.chunk(2, -1)
        angle = torch.arange(len(x))[:, None, None] / (1e4 * rope_ratio) ** (torch.arange(0, DIM // 2, 2) / (DIM // 2))
        product = torch.view_as_complex(turned.unflatten(-1, (-1, 2)).contiguous()) * torch.polar(
            torch.ones_like(angle), angle
        )
        return torch.cat((torch.view_as_real(product).flatten(-2), rest), -1)

    def reference(ids: list[int]) -> Tensor:
        x = w["embedding.word_embeddings.weight"][ids]
        for i in range(LAYERS):
            layer = w.of(f"encoder.layers.{i}.")
            qkv = layer.linear("self_attention.query_key_value", layer.norm("input_layernorm", x, eps))
            q, k, v = qkv.view(-1, HEADS + 2 * kv_heads, DIM).split((HEADS, kv_heads, kv_heads), 1)
            x = x + layer.linear("self_attention.dense", attend(turn(q), turn(k), v))
            gate, up = layer.linear("mlp.dense_h_to_4h", layer.norm("post_attention_layernorm", x, eps)).chunk(2, -1)
            x = x + layer.linear("mlp.dense_4h_to_h", F.silu(gate) * up)
        return w.linear("output_layer", w.norm("encoder.final_layernorm", x, eps))

    return reference


def minicpm(path: Path, tie: bool = False) -> Reference:
    """MiniCPM: embeddings, branches and the head's input are scaled."""
    scale_emb, scale_depth, base = 12, 1.4, 16
    shapes = {f"self_attn.{x}_proj.weight": (HIDDEN, HIDDEN) for x in "qo"}
    shapes |= {f"self_attn.{x}_proj.weight": (KV_HEADS * DIM, HIDDEN) for x in "kv"}
    shapes = in_layers("model.layers.{}.", shapes | llama_shapes(HIDDEN)) | llama_ends(HIDDEN, VOCAB)
    if tie:
        del shapes["lm_head.weight"]
    w = Weights.random(shapes)
    factors = dict(scale_emb=scale_emb, scale_depth=scale_depth, dim_model_base=base)
    save(path, CONFIG | factors | dict(model_type="minicpm", tie_word_embeddings=tie), w)

    def reference(ids: list[int]) -> Tensor:
        x = w["model.embed_tokens.weight"][ids] * scale_emb
        for i in range(LAYERS):
            layer = w.of(f"model.layers.{i}.")
            h = layer.norm("input_layernorm", x)
            q, k, v = (layer.linear(f"self_attn.{n}_proj", h).unflatten(1, (-1, DIM)) for n in "qkv")
            h = layer.linear("self_attn.o_proj", attend(rotate_half(q), rotate_half(k), v))
            x = x + h * (scale_depth / math.sqrt(LAYERS))
            x = x + llama_ffn(layer, x) * (scale_depth / math.sqrt(LAYERS))
        x = w.norm("model.norm", x) / (HIDDEN / base)
        return F.linear(x, w["model.embed_tokens.weight" if tie else "lm_head.weight"])

    return reference


def baichuan(path: Path, alibi: bool = False, second: bool = False) -> Reference:
    """W_pack holds q, k and v. 13B: ALiBi instead of rotary embeddings; Baichuan 2: the head's rows have length 1."""
    vocab, heads = 125696 if second else VOCAB, 6 if alibi else HEADS
    hidden, slopes = heads * DIM, [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]
    shapes = {"self_attn.W_pack.weight": (3 * hidden, hidden), "self_attn.o_proj.weight": (hidden, hidden)}
    shapes = in_layers("model.layers.{}.", shapes | llama_shapes(hidden))
    w = Weights.random(shapes | llama_ends(hidden, vocab))
    config = CONFIG | dict(model_type="baichuan", hidden_size=hidden, num_attention_heads=heads, vocab_size=vocab)
    del config["num_key_value_heads"]
    if alibi:
        config["model_max_length"] = config.pop("max_position_embeddings")
    save(path, config, w)

    def reference(ids: list[int]) -> Tensor:
        x = w["model.embed_tokens.weight"][ids]
        bias = torch.tensor(slopes)[:, None, None] * torch.arange(len(ids)) if alibi else 0.0
        for i in range(LAYERS):
            layer = w.of(f"model.layers.{i}.")
            qkv = layer.linear("self_attn.W_pack", layer.norm("input_layernorm", x))
            q, k, v = qkv.view(-1, 3, heads, DIM).unbind(1)
            if not alibi:
                q, k = rotate_half(q), rotate_half(k)
            x = x + layer.linear("self_attn.o_proj", attend(q, k, v, bias))
            x = x + llama_ffn(layer, x)
        head = w["lm_head.weight"]
        return F.linear(w.norm("model.norm", x), head / head.norm(dim=1, keepdim=True) if second else head)

    return reference


BUILDERS: dict[str, Callable[[Path], Reference]] = {
    "internlm": internlm,
    "internlm2": internlm2,
    "internlm2-bias": lambda path: internlm2(path, bias=True),
    "chatglm": chatglm,
    "chatglm-ratio": lambda path: chatglm(path, rope_ratio=50),
    "chatglm-mha": lambda path: chatglm(path, groups=None),
    "minicpm": minicpm,
    "minicpm-tied": lambda path: minicpm(path, tie=True),
    "baichuan-7b": baichuan,
    "baichuan-13b": lambda path: baichuan(path, alibi=True),
    "baichuan2-7b": lambda path: baichuan(path, second=True),
    "baichuan2-13b": lambda path: baichuan(path, alibi=True, second=True),
}
