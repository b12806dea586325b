"""Gemma 3, its text part: Gemma 2 with normalised heads, and other rotary embeddings in the layers with a window."""

from lightllm.common.basemodel.layer_infer.template.position import Position, make_rope
from lightllm.common.basemodel.rope_config import RopeConfig, read_rope
from lightllm.models.gemma2.model import Gemma2
from lightllm.models.text_part import TextPart


class Gemma3(TextPart, Gemma2):
    head_norms = True

    def make_position(self) -> Position:
        c = self.config
        self.local_position = make_rope(self._local_rope(), c.rotary_dim, c.max_position_embeddings, self.device)
        return super().make_position()

    def _local_rope(self) -> RopeConfig:
        raw = self.config.raw
        if raw.get("rope_parameters") is not None:
            return read_rope(raw, "sliding_attention")
        context = self.config.max_position_embeddings
        return RopeConfig("default", raw.number("rope_local_base_freq"), context, context)

    def position_of(self, i: int) -> Position:
        return self.position if self.config.windows[i] is None else self.local_position
