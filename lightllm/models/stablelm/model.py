"""StableLM: LayerNorm, rotary embeddings of a part of each head; by config a parallel residual and norms of heads."""

from lightllm.common.basemodel.basemodel import BaseModel
from lightllm.common.basemodel.layer_infer.template.norm import LayerNorm, Norm
from lightllm.common.basemodel.layer_infer.template.residual import ParallelResidual, Residual
from lightllm.common.basemodel.layer_weights.slot import Part, Slot


class StableLm(BaseModel):
    qkv_bias = "use_qkv_bias"
    o_bias = False
    norm_type = LayerNorm

    def norm_slots(self, i: int) -> dict[str, Slot]:
        slots = super().norm_slots(i)
        return {"attn_norm": slots["attn_norm"]} if self._parallel() else slots

    def head_norm_slots(self, i: int, norm: Norm) -> dict[str, Slot]:
        return {
            "q_norm": self._norms_of_heads("self_attn.q_layernorm.norms", self.config.num_attention_heads),
            "k_norm": self._norms_of_heads("self_attn.k_layernorm.norms", self.config.num_key_value_heads),
        }

    def _norms_of_heads(self, name: str, heads: int) -> Slot:
        return Slot(tuple(Part(f"{name}.{head}", self.head_dim) for head in range(heads)), None)

    def prepare(self) -> None:
        """Each head has a norm of its own; every rank has read all of them and keeps its heads'."""
        for w in self.layer_weights if self.head_norm() else ():
            for norm, heads, copies in ((w["q_norm"], self.heads, 1), (w["k_norm"], self.kv_heads, self.kv_copies)):
                lines = norm.weight.view(-1, self.head_dim).repeat_interleave(copies, 0)
                norm.weight = lines[self.parallel.rank * heads :][:heads]

    def residual(self) -> Residual:
        return ParallelResidual() if self._parallel() else super().residual()

    def head_norm(self) -> Norm | None:
        return LayerNorm(self.config.rms_norm_eps, bias=False) if self.config.raw.flag("qk_layernorm") else None

    def _parallel(self) -> bool:
        return self.config.raw.flag("use_parallel_residual")
