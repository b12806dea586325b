"""OLMo 2: norms behind attention and feed-forward instead of before them, and one norm over all heads of q and of k."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightllm.common.basemodel.basemodel import BaseModel
from lightllm.common.basemodel.layer_infer.template.norm import Norm, RMSNorm
from lightllm.common.basemodel.layer_infer.template.residual import Attended, Branch, Stream
from lightllm.common.basemodel.layer_weights.base_layer_weight import Weight, Weights
from lightllm.common.basemodel.layer_weights.slot import Part, Slot, column
from lightllm.common.basemodel.partial_sum import added
from lightllm.distributed.communication_op import all_reduce
from lightllm.distributed.parallel_state import ParallelState


@dataclass(frozen=True)
class AllHeadsRMSNorm(RMSNorm):
    """x [T, heads, head_dim] over all heads of all ranks; a KV head that ranks share counts once for each."""

    parallel: ParallelState

    def __call__(self, x: Tensor, w: Weight) -> Tensor:
        wide = x.flatten(1).float()
        squares = all_reduce(wide.square().sum(-1, keepdim=True), self.parallel)
        mean = squares / (wide.shape[1] * self.parallel.size)
        return ((wide * torch.rsqrt(mean + self.eps)) * w.weight.float()).to(x.dtype).view(x.shape)


class PostNorm:
    """x + norm(attention(x)), then x + norm(ffn(x))."""

    def attend(self, stream: Stream, w: Weights, norm: Norm, attention: Branch) -> Attended:
        summed = added(*stream)
        return Attended(attention(summed), summed)

    def feed(self, attended: Attended, w: Weights, norm: Norm, ffn: Branch) -> Stream:
        summed = added(norm(attended.answer.total(), w["attn_post_norm"]), attended.residual)
        return norm(ffn(summed).total(), w["ffn_post_norm"]), summed


class Olmo2(BaseModel):
    norm_names = {"attn_post_norm": "post_attention_layernorm", "ffn_post_norm": "post_feedforward_layernorm"}
    residual_type = PostNorm

    def head_norm_slots(self, i: int, norm: Norm) -> dict[str, Slot]:
        c = self.config
        q = Part("self_attn.q_norm", c.num_attention_heads * c.head_dim)
        k = Part("self_attn.k_norm", c.num_key_value_heads * c.head_dim, block=c.head_dim, copies=self.kv_copies)
        return {"q_norm": column(q, inputs=None), "k_norm": column(k, inputs=None)}

    def head_norm(self) -> Norm | None:
        return AllHeadsRMSNorm(self.config.rms_norm_eps, self.parallel)
