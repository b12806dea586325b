"""MiniCPM3: latent attention with rotary pairs (i, i + half), and MiniCPM's scaled embeddings, branches and logits."""

from lightllm.models.deepseek.latent import LatentModel
from lightllm.models.minicpm.model import MiniCPM


class MiniCPM3(MiniCPM, LatentModel):
    paired = False
