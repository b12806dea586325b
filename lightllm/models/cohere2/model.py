"""Cohere 2 (Command R7B): Cohere with a window in three of four layers, and no positions in the fourth."""

from lightllm.common.basemodel.layer_infer.template.position import NoRope, Position
from lightllm.models.cohere.model import Cohere


class Cohere2(Cohere):
    def position_of(self, i: int) -> Position:
        return NoRope() if self.config.windows[i] is None else self.position
