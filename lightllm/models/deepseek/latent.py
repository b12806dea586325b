"""What models with multi-head latent attention share: its slots, its positions, its scale."""

import torch
from torch import Tensor

from lightllm.common.basemodel.attention.backend import AttentionSpec
from lightllm.common.basemodel.basemodel import BaseModel
from lightllm.common.basemodel.layer_infer.template.attention import AttentionBlock
from lightllm.common.basemodel.layer_infer.template.latent_attention import LatentAttention
from lightllm.common.basemodel.layer_infer.template.norm import RMSNorm
from lightllm.common.basemodel.layer_infer.template.position import Position, make_rope
from lightllm.common.basemodel.layer_infer.template.rope_scaling import yarn_mscale
from lightllm.common.basemodel.layer_weights.qkv_rows import paired_rows
from lightllm.common.basemodel.layer_weights.slot import Part, Slot, column, row, whole
from lightllm.common.basemodel.model_config import ModelConfig
from lightllm.distributed.parallel_state import ParallelState

LATENT_NORM_EPS = 1e-6  # whatever rms_norm_eps says


class LatentModel(BaseModel):
    most_graph_keys = 1 << 20  # beyond them it is faster to decompress, as many latents as there are, outside of graphs
    paired = True

    def __init__(self, config: ModelConfig, parallel: ParallelState, device: torch.device) -> None:
        words = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")
        self.nope, self.rope, self.value, self.rank = (config.raw.size(word) for word in words)
        self.paired = config.raw.flag("rope_interleave", self.paired)
        super().__init__(config, parallel, device)

    def slot_shape(self, i: int) -> tuple[int, ...]:
        return (self.rope + self.rank,)

    def attention_slots(self, i: int) -> dict[str, Slot]:
        c, name = self.config, "self_attn"
        heads, hidden, bias = c.num_attention_heads, c.hidden_size, self.says(self.qkv_bias)
        queries, outputs = heads * (self.nope + self.rope), heads * (self.nope + self.value)
        width, on_every_rank = self.rank + self.rope, self.parallel.size
        latent = f"{name}.kv_a_proj_with_mqa", width, self._rope_first(1, self.rank), width
        kv_a = Part(*latent, block=width, copies=on_every_rank)
        q_rows = self._rope_first(heads, self.nope)
        slots = {
            "kv_a_norm": whole(f"{name}.kv_a_layernorm", self.rank),
            "kv_b": column(Part(f"{name}.kv_b_proj", outputs), inputs=self.rank),
            "o": row(f"{name}.o_proj", hidden, heads * self.value, bias=bias),
        }
        if c.raw.get("q_lora_rank") is None:
            q = Part(f"{name}.q_proj", queries, q_rows, queries, bare=True)
            return slots | {"q_kv_a": column(q, kv_a, inputs=hidden, bias=bias)}
        rank = c.raw.size("q_lora_rank")
        q_a = Part(f"{name}.q_a_proj", rank, block=rank, copies=on_every_rank)
        return slots | {
            "q_kv_a": column(q_a, kv_a, inputs=hidden, bias=bias),
            "q_a_norm": whole(f"{name}.q_a_layernorm", rank),
            "q_b": column(Part(f"{name}.q_b_proj", queries, q_rows, queries), inputs=rank),
        }

    def _rope_first(self, heads: int, others: int) -> Tensor:
        """Output features of heads that end with their rotary part, in the order in which they begin with it."""
        rows = torch.arange(heads * (others + self.rope)).view(heads, -1)
        turned, rest = rows[:, others:], rows[:, :others]
        if self.paired:
            turned = paired_rows(turned, self.rope, self.rope).view(heads, -1)
        return torch.cat((turned, rest), 1).flatten()

    def make_position(self) -> Position:
        c = self.config
        return make_rope(c.rope, self.rope, c.max_position_embeddings, self.device)

    def attention_spec(self, i: int) -> AttentionSpec:
        rope, scale = self.config.rope, (self.nope + self.rope) ** -0.5
        if rope.rope_type != "default" and rope.get("mscale_all_dim"):
            scale *= yarn_mscale(rope.parameters["factor"], rope.parameters["mscale_all_dim"]) ** 2
        return AttentionSpec(scale)

    def attention(self, i: int) -> AttentionBlock:
        dims = self.nope, self.rope, self.value
        return LatentAttention(i, self.heads, *dims, self.position, self.attention_spec(i), RMSNorm(LATENT_NORM_EPS))
