"""BaseModel: loading and the forward pass of every decoder. LLaMA is the default of every hook; a family states only
what it does differently."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from lightllm.common.basemodel.attention.backend import AttentionSpec
from lightllm.common.basemodel.infer_struct import InferStateInfo
from lightllm.common.basemodel.layer_infer.post_layer_infer import PostLayerInfer
from lightllm.common.basemodel.layer_infer.pre_layer_infer import PreLayerInfer
from lightllm.common.basemodel.layer_infer.template.attention import Attention, AttentionBlock
from lightllm.common.basemodel.layer_infer.template.feed_forward import FeedForward, GatedFeedForward, PlainFeedForward
from lightllm.common.basemodel.layer_infer.template.norm import LayerNorm, Norm, RMSNorm, UnitOffsetRMSNorm
from lightllm.common.basemodel.layer_infer.template.position import Angles, NoRope, Position, alibi_slopes, make_rope
from lightllm.common.basemodel.layer_infer.template.residual import Attended, PreNorm, Residual
from lightllm.common.basemodel.layer_infer.transformer_layer_infer import TransformerLayerInfer
from lightllm.common.basemodel.layer_weights.base_layer_weight import Weights
from lightllm.common.basemodel.layer_weights.experts import ExpertSlot, ExpertsWeight
from lightllm.common.basemodel.layer_weights.hf_load_utils import Checkpoint
from lightllm.common.basemodel.layer_weights.packed import packing_of
from lightllm.common.basemodel.layer_weights.qkv_rows import qkv_parts
from lightllm.common.basemodel.layer_weights.slot import Part, Slot, column, row, vocabulary, whole
from lightllm.common.basemodel.layer_weights.weight_loader import Progress, WeightLoader
from lightllm.common.basemodel.model_config import ConfigError, ModelConfig
from lightllm.distributed.parallel_state import ParallelState


class BaseModel:
    # What a checkpoint calls the tensors of each slot; those of layer i stand behind layer_prefix.
    layer_prefix = "model.layers.{}."
    outer_names = {"embed": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"}
    norm_names = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    qkv_names: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")  # or one of all three
    head_norm_names = ("self_attn.q_norm", "self_attn.k_norm")
    o_name = "self_attn.o_proj"
    ffn_names: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")  # or two: up and down without a gate
    # How q, k and v lie in their tensors, see qkv_parts.
    grouped = False
    paired = False
    # Whether there are biases, or the word of config.json that says so.
    qkv_bias: str | bool = "attention_bias"
    o_bias: str | bool = "attention_bias"
    ffn_bias: str | bool = "mlp_bias"
    head_bias = False
    head_norms: str | bool = False  # likewise, whether each head of q and k is normalised before positions enter
    # Axes without numbers of their own.
    norm_type: type[RMSNorm | UnitOffsetRMSNorm | LayerNorm] = RMSNorm
    residual_type: type[Residual] = PreNorm
    attention_type: type[Attention] = Attention

    most_graph_keys = math.inf  # that the tokens of a step have before them, each for itself, to be in a CUDA graph

    def __init__(self, config: ModelConfig, parallel: ParallelState, device: torch.device) -> None:
        """Choose the axes; `load` makes models. ConfigError if heads or ffn cannot be cut into parallel.size."""
        config.check_tensor_parallel(parallel.size)
        self.config, self.parallel, self.device = config, parallel, device
        self.kv_copies = math.lcm(config.num_key_value_heads, parallel.size) // config.num_key_value_heads
        self.heads = parallel.share(config.num_attention_heads)
        self.kv_heads = parallel.share(config.num_key_value_heads * self.kv_copies)
        self.head_dim, self.num_layers = config.head_dim, config.num_hidden_layers
        self.vocab_size = config.vocab_size
        self.position = self.make_position()
        self.pre = self.pre_layer()
        self.layers = [
            TransformerLayerInfer(self.norm(), self.residual(), self.attention(i), self.feed_forward(i))
            for i in range(self.num_layers)
        ]
        self.post = self.post_layer()
        self.outer_weights: Weights = {}
        self.layer_weights: list[Weights] = []

    # ---- weights: what the checkpoint calls them

    def tensor_name(self, stored: str) -> str:
        """The name under which slots look for a tensor of the checkpoint."""
        return stored

    def ignores(self, name: str) -> bool:
        """Whether a tensor of the checkpoint is of no use: buffers that old checkpoints carry."""
        return name.endswith("rotary_emb.inv_freq")

    def outer_slots(self) -> dict[str, Slot]:
        c, names = self.config, self.outer_names
        return {
            "embed": vocabulary(names["embed"], c.vocab_size, c.hidden_size),
            "final_norm": self.norm_slot(names["final_norm"]),
            "head": vocabulary(names["head"], c.vocab_size, c.hidden_size, bias=self.head_bias),
        }

    def layer_slots(self, i: int) -> Mapping[str, Slot | ExpertSlot]:
        return {**self.norm_slots(i), **self.attention_slots(i), **self.feed_forward_slots(i)}

    def norm_slots(self, i: int) -> dict[str, Slot]:
        return {slot: self.norm_slot(name) for slot, name in self.norm_names.items()}

    def norm_slot(self, name: str) -> Slot:
        return whole(name, self.config.hidden_size, bias=self.norm().bias)

    def attention_slots(self, i: int) -> dict[str, Slot]:
        c, heads, (kv_heads, copies, head_dim) = self.config, self.config.num_attention_heads, self.heads_of(i)
        paired = c.rotary_dim if self.paired else 0
        parts = qkv_parts(self.qkv_names, heads, kv_heads, head_dim, copies, self.grouped, paired)
        norm = self.head_norm()
        return (self.head_norm_slots(i, norm) if norm else {}) | {
            "qkv": column(*parts, inputs=c.hidden_size, bias=self.says(self.qkv_bias)),
            "o": row(self.o_name, c.hidden_size, heads * head_dim, bias=self.says(self.o_bias)),
        }

    def head_norm_slots(self, i: int, norm: Norm) -> dict[str, Slot]:
        """Of `head_norm`: a vector for all heads of q, another for those of k."""
        q, k = (whole(name, self.heads_of(i)[2], bias=norm.bias) for name in self.head_norm_names)
        return {"q_norm": q, "k_norm": k}

    def feed_forward_slots(self, i: int) -> Mapping[str, Slot | ExpertSlot]:
        return self.ffn_slots(self.ffn_names, self.config.intermediate_size)

    def ffn_slots(self, names: Sequence[str], size: int, prefix: str = "") -> dict[str, Slot]:
        """Feed-forward of `size`: gate, up and down, gate and up perhaps in one tensor, gate first; or up and down.
        `prefix` begins the slots' names."""
        hidden, bias = self.config.hidden_size, self.says(self.ffn_bias)
        *inner, down = names
        parts = [Part(name, size) for name in inner]
        if len(set(inner)) < len(inner):
            parts = [Part(inner[0], size, slice(first, first + size), 2 * size) for first in (0, size)]
        return {
            f"{prefix}{'gate_up' if len(inner) > 1 else 'up'}": column(*parts, inputs=hidden, bias=bias),
            f"{prefix}down": row(down, hidden, size, bias=bias),
        }

    def says(self, word: str | bool) -> bool:
        """What the family says, or its word of config.json."""
        return word if isinstance(word, bool) else self.config.raw.flag(word)

    def heads_of(self, i: int) -> tuple[int, int, int]:
        """(KV heads of the model, ranks that hold a copy of each, head_dim) of layer i."""
        return self.config.num_key_value_heads, self.kv_copies, self.head_dim

    @property
    def slot_shapes(self) -> list[tuple[int, ...]]:
        """What each layer keeps of a token."""
        return [self.slot_shape(i) for i in range(self.num_layers)]

    def slot_shape(self, i: int) -> tuple[int, ...]:
        """K and V of each KV head side by side, K first."""
        kv_heads, copies, head_dim = self.heads_of(i)
        return self.parallel.share(kv_heads * copies), 2, head_dim

    # ---- axes

    def norm(self) -> Norm:
        return self.norm_type(self.config.rms_norm_eps)

    def head_norm(self) -> Norm | None:
        """What normalises each head of q and k before positions enter."""
        return self.norm() if self.says(self.head_norms) else None

    def residual(self) -> Residual:
        return self.residual_type()

    def alibi(self) -> bool:
        """Whether positions are in the scores (ALiBi) instead of in q and k."""
        return False

    def make_position(self) -> Position:
        c = self.config
        return NoRope() if self.alibi() else make_rope(c.rope, c.rotary_dim, c.max_position_embeddings, self.device)

    def position_of(self, i: int) -> Position:
        """The position object of layer i, for families whose layers differ; equal ones give angles once a step."""
        return self.position

    def attention_spec(self, i: int) -> AttentionSpec:
        slopes = None
        if self.alibi():
            of_heads = alibi_slopes(self.config.num_attention_heads)
            slopes = of_heads[self.parallel.rank * self.heads :][: self.heads].to(self.device)
        return AttentionSpec(self.head_dim**-0.5, self.config.windows[i], slopes=slopes)

    def attention(self, i: int) -> AttentionBlock:
        kv_heads, copies, head_dim = self.heads_of(i)
        heads = self.heads, self.parallel.share(kv_heads * copies)
        spec = self.attention_spec(i)
        return self.attention_type(i, *heads, head_dim, self.position_of(i), spec, self.head_norm())

    def feed_forward(self, i: int) -> FeedForward:
        return (PlainFeedForward if len(self.ffn_names) == 2 else GatedFeedForward)(self.config.hidden_act)

    def pre_layer(self) -> PreLayerInfer:
        return PreLayerInfer()

    def post_layer(self) -> PostLayerInfer:
        return PostLayerInfer(self.norm())

    # ---- the code that runs, the same for all

    @classmethod
    def load(
        cls,
        model_dir: str | Path,
        config: ModelConfig,
        parallel: ParallelState,
        dtype: torch.dtype,
        device: torch.device,
        load_format: str = "auto",
        progress: Progress = lambda *_: None,
    ) -> BaseModel:
        """This rank's part of the model on `device`. load_format "auto" reads the weights in model_dir, "random" draws
        them. `progress` hears (bytes done, bytes in all, what). Errors of config or weights are ConfigErrors."""
        model = cls(config, parallel, torch.device(device))
        loader = WeightLoader(parallel, dtype, model.device)
        checkpoint = None
        if load_format != "random":
            checkpoint = Checkpoint.open(model_dir).unpacked(packing_of(config)).renamed(model.tensor_name)
        outer = model._tied(model.outer_slots(), checkpoint)
        model.outer_weights = loader.declare(outer)
        model.layer_weights = [
            loader.declare(model.layer_slots(i), cls.layer_prefix.format(i)) for i in range(model.num_layers)
        ]
        if parallel.ep_moe and not any(isinstance(w, ExpertsWeight) for ws in model.layer_weights for w in ws.values()):
            raise ConfigError(f"--enable_ep_moe: {config.model_type} has no experts")
        if checkpoint is None:
            loader.randomize(progress)
        else:
            loader.fill(checkpoint, model.ignores, progress)
        model._share_head()
        model.prepare()
        return model

    def prepare(self) -> None:
        """Called once when all weights are there."""

    def _tied(self, slots: dict[str, Slot], checkpoint: Checkpoint | None) -> dict[str, Slot]:
        """Without the slot of a tied weight that the checkpoint lacks: a tied model has embedding, head or both."""
        if not self.config.tie_word_embeddings:
            return slots
        embed, head = (s.parts[0].name + ".weight" for s in (slots["embed"], slots["head"]))
        names: Mapping[str, object] = checkpoint.tensors if checkpoint else {embed: None}
        absent = "head" if head not in names else "embed" if embed not in names else None
        return {name: slot for name, slot in slots.items() if name != absent}

    def _share_head(self) -> None:
        """One tensor for tied weights. Two different ones are used as they are, as transformers does."""
        if not self.config.tie_word_embeddings:
            return
        outer = self.outer_weights
        embed, head = outer.get("embed") or outer["head"], outer.get("head") or outer["embed"]
        if torch.equal(embed.weight, head.weight):
            outer["embed"] = outer["head"] = embed

    def forward(self, ids: Tensor, state: InferStateInfo, index: Tensor | None = None) -> Tensor:
        """ids int64 [T] -> logits [S, vocab_size] of the tokens index int64 [S], None for all; K and V of all T tokens
        are written to their slots. Call it under torch.inference_mode."""
        return self.logits(self.attended(ids, state), index)

    def attended(self, ids: Tensor, state: InferStateInfo) -> Attended:
        """ids int64 [T] -> the last layer behind its attention. Nothing reads more of tokens whose logits are not
        wanted."""
        angles = self.angles(state)
        stream = self.pre.forward(ids, self.outer_weights, state)
        for layer, weights in zip(self.layers[:-1], self.layer_weights):
            stream = layer.forward(stream, weights, angles, state)
        return self.layers[-1].attend(stream, self.layer_weights[-1], angles, state)

    def angles(self, state: InferStateInfo) -> dict[Position, Angles]:
        """Of each position object that a layer has."""
        return {p: p.angles(state) for p in {layer.attention.position for layer in self.layers}}

    def logits(self, attended: Attended, index: Tensor | None) -> Tensor:
        """Logits [S, vocab_size] of the tokens index int64 [S], None for all; apart from `attended` so that those of a
        whole prompt need not exist at once."""
        chosen = attended if index is None else attended.index_select(index)
        return self.post.forward(self.layers[-1].feed(chosen, self.layer_weights[-1]), self.outer_weights)
