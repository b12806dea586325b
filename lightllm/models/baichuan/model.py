"""Baichuan 1 and 2: LLaMA with q, k and v in one tensor; ALiBi in the 13B models, a normalised head in Baichuan 2."""

import torch.nn.functional as F

from lightllm.common.basemodel.basemodel import BaseModel

VOCABULARY_OF_BAICHUAN_2 = 125696
HIDDEN_SIZE_OF_13B = 5120


class Baichuan(BaseModel):
    qkv_names = ("self_attn.W_pack",)

    def prepare(self) -> None:
        if self.vocab_size == VOCABULARY_OF_BAICHUAN_2:
            head = self.outer_weights["head"]
            head.weight = F.normalize(head.weight)

    def alibi(self) -> bool:
        """Only the configs of the 7B models, whose code has rotary embeddings, tell max_position_embeddings."""
        c = self.config
        return c.hidden_size == HIDDEN_SIZE_OF_13B or "max_position_embeddings" not in c.raw.values
