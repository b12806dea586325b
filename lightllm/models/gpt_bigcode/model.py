"""GPT-BigCode (StarCoder, SantaCoder): learned positions, one KV head, LayerNorm, biases, gelu, tied weights."""

from torch import Tensor

from lightllm.common.basemodel.attention.backend import AttentionSpec
from lightllm.common.basemodel.basemodel import BaseModel
from lightllm.common.basemodel.infer_struct import InferStateInfo
from lightllm.common.basemodel.layer_infer.pre_layer_infer import PreLayerInfer
from lightllm.common.basemodel.layer_infer.template.norm import LayerNorm
from lightllm.common.basemodel.layer_infer.template.position import NoRope, Position
from lightllm.common.basemodel.layer_infer.template.residual import Stream
from lightllm.common.basemodel.layer_weights.base_layer_weight import Weights
from lightllm.common.basemodel.layer_weights.slot import Slot, whole


class LearnedPositions(PreLayerInfer):
    def forward(self, ids: Tensor, w: Weights, state: InferStateInfo) -> Stream:
        return w["embed"].lookup(ids) + w["positions"].lookup(state.positions), None


class GPTBigCode(BaseModel):
    layer_prefix = "transformer.h.{}."
    outer_names = {"embed": "transformer.wte", "final_norm": "transformer.ln_f", "head": "lm_head"}
    norm_names = {"attn_norm": "ln_1", "ffn_norm": "ln_2"}
    qkv_names = ("attn.c_attn",)
    grouped = True  # with one KV head that is no other order
    o_name = "attn.c_proj"
    ffn_names = ("mlp.c_fc", "mlp.c_proj")
    qkv_bias = o_bias = ffn_bias = True
    norm_type = LayerNorm

    def outer_slots(self) -> dict[str, Slot]:
        c = self.config
        positions = whole("transformer.wpe", c.max_position_embeddings, c.hidden_size)
        return super().outer_slots() | {"positions": positions}

    def ignores(self, name: str) -> bool:
        return name.endswith(("attn.bias", "attn.masked_bias"))  # causal masks of old checkpoints

    def make_position(self) -> Position:
        return NoRope()

    def attention_spec(self, i: int) -> AttentionSpec:
        scaled = self.config.raw.flag("scale_attn_weights", True)
        return AttentionSpec(self.head_dim**-0.5 if scaled else 1.0)

    def pre_layer(self) -> PreLayerInfer:
        return LearnedPositions()
