"""Attention of Gemma 4: values are normalised too, and the last layers read the cache of an earlier one."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from lightllm.common.basemodel.infer_struct import InferStateInfo
from lightllm.common.basemodel.layer_infer.template.attention import Attention
from lightllm.common.basemodel.layer_infer.template.norm import RMSNorm
from lightllm.common.basemodel.layer_infer.template.position import Angles
from lightllm.common.basemodel.layer_weights.base_layer_weight import Weight
from lightllm.common.basemodel.partial_sum import PartialSum
from lightllm.common.basemodel.triton_kernel.rotary_emb import rotary_emb


class NormedValues(Attention):
    def __call__(self, x: Tensor, w: dict[str, Weight], angles: Angles, state: InferStateInfo) -> PartialSum:
        assert isinstance(self.qk_norm, RMSNorm)
        qkv = w["qkv"].apply(x).view(len(x), -1, self.head_dim)
        q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), 1)
        q, k = self.qk_norm(q, w["q_norm"]), self.qk_norm(k, w["k_norm"])
        v = F.rms_norm(v, v.shape[-1:], eps=self.qk_norm.eps)
        layer_kv = state.kv.layer(self.layer)
        self.position.write(q, k, v, angles, layer_kv, state.slots)
        return w["o"].partial(state.backend.attend(q, layer_kv, self.spec, None, state).view(len(x), -1))


class ReusedCache(Attention):
    """`layer` is the one whose cache is read; its own has nothing to write."""

    def __call__(self, x: Tensor, w: dict[str, Weight], angles: Angles, state: InferStateInfo) -> PartialSum:
        assert self.qk_norm is not None and angles is not None
        q = self.qk_norm(w["qkv"].apply(x).view(len(x), -1, self.head_dim), w["q_norm"])
        rotary_emb(q, q[:, :0], *angles)
        layer_kv = state.kv.layer(self.layer)
        return w["o"].partial(state.backend.attend(q, layer_kv, self.spec, None, state).view(len(x), -1))
