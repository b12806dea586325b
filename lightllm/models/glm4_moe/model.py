"""GLM-4.5 and 4.6: LLaMA with rotary embeddings of half of each head, biased sigmoid routing and a shared expert."""

from lightllm.models.deepseek.moe import BiasedMixture


class Glm4Moe(BiasedMixture):
    o_bias = False
    head_norms = "use_qk_norm"
