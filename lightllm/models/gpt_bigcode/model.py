"""GPT-BigCode (StarCoder, SantaCoder): learned positions, one KV head, LayerNorm, biases, gelu, tied weights."""

from torch import Tensor

from lightllm.common.basemodel.attention.backend import AttentionSpec
from lightllm.common.basemodel.basemodel import BaseModel
from lightllm.common.basemodel.infer_struct import InferStateInfo
from lightllm.common.basemodel.layer_infer.pre_layer_infer import PreLayerInfer, lookup
from lightllm.common.basemodel.layer_infer.template.feed_forward import FeedForward, PlainFeedForward
from lightllm.common.basemodel.layer_infer.template.norm import LayerNorm, Norm
from lightllm.common.basemodel.layer_infer.template.position import NoRope, Position
from lightllm.common.basemodel.layer_infer.template.residual import Stream
from lightllm.common.basemodel.layer_weights.base_layer_weight import Weight
from lightllm.common.basemodel.layer_weights.slot import Part, Slot, row, vocabulary


class LearnedPositions(PreLayerInfer):
    def forward(self, ids: Tensor, w: dict[str, Weight], state: InferStateInfo) -> Stream:
        return lookup(ids, w) + w["positions"].weight.index_select(0, state.positions), None


class GPTBigCode(BaseModel):
    layer_prefix = "transformer.h.{}."

    def outer_slots(self) -> dict[str, Slot]:
        c = self.config
        return {
            "embed": vocabulary("transformer.wte", c.vocab_size, c.hidden_size),
            "positions": Slot((Part("transformer.wpe", c.max_position_embeddings),), c.hidden_size),
            "final_norm": self.norm_slot("transformer.ln_f"),
            "head": vocabulary("lm_head", c.vocab_size, c.hidden_size),
        }

    def norm_slots(self, i: int) -> dict[str, Slot]:
        return {"attn_norm": self.norm_slot("ln_1"), "ffn_norm": self.norm_slot("ln_2")}

    def attention_slots(self, i: int) -> dict[str, Slot]:
        c = self.config
        return {
            "qkv": self.qkv_slot("attn.c_attn", bias=True, grouped=not c.raw.flag("multi_query")),
            "o": row("attn.c_proj", c.hidden_size, c.hidden_size, bias=True),
        }

    def feed_forward_slots(self, i: int) -> dict[str, Slot]:
        return self.plain_slots("mlp.c_fc", "mlp.c_proj")

    def ignores(self, name: str) -> bool:
        return name.endswith(("attn.bias", "attn.masked_bias"))  # causal masks of old checkpoints

    def norm(self) -> Norm:
        return LayerNorm(self.config.rms_norm_eps)

    def make_position(self) -> Position:
        return NoRope()

    def attention_spec(self, i: int) -> AttentionSpec:
        scaled = self.config.raw.flag("scale_attn_weights", True)
        return AttentionSpec(self.head_dim**-0.5 if scaled else 1.0)

    def feed_forward(self, i: int) -> FeedForward:
        return PlainFeedForward(self.config.hidden_act)

    def pre_layer(self) -> PreLayerInfer:
        return LearnedPositions()
