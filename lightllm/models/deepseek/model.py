"""DeepSeek V2, V2-Lite, V3 and R1: latent attention, experts behind the first dense layers, MTP blocks left aside."""

from lightllm.models.deepseek.latent import LatentModel
from lightllm.models.deepseek.moe import BiasedMixture, DeepseekMixture


class DeepseekV2(DeepseekMixture, LatentModel):
    pass


class DeepseekV3(BiasedMixture, LatentModel):
    pass
