"""Qwen3-MoE: Qwen3 with experts in every layer that the config does not except."""

from lightllm.common.basemodel.layer_infer.template.moe import TopKRouter
from lightllm.models.mixture import Mixture
from lightllm.models.qwen3.model import Qwen3


class QwenMixture(Mixture):
    """What the mixtures of Qwen 1.5, 2 and 3 have in common."""

    def is_sparse(self, i: int) -> bool:
        raw = self.config.raw
        return i not in raw.layers("mlp_only_layers") and (i + 1) % raw.size("decoder_sparse_step", 1) == 0

    def router(self) -> TopKRouter:
        return TopKRouter(self.top_k, renormalize=self.config.raw.flag("norm_topk_prob"))


class Qwen3Moe(QwenMixture, Qwen3):
    pass
