"""GLM-4.5 and 4.6: LLaMA with rotary embeddings of half of each head, biased sigmoid routing and a shared expert."""

from lightllm.common.basemodel.layer_infer.template.norm import Norm
from lightllm.models.deepseek.moe import BiasedMixture


class Glm4Moe(BiasedMixture):
    o_bias = False

    def head_norm(self) -> Norm | None:
        return self.norm() if self.config.raw.flag("use_qk_norm") else None
