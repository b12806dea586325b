"""InternLM 2 and 2.5: LLaMA with other names, and q, k and v fused KV group by KV group."""

from lightllm.common.basemodel.basemodel import BaseModel


class InternLM2(BaseModel):
    outer_names = {"embed": "model.tok_embeddings", "final_norm": "model.norm", "head": "output"}
    norm_names = {"attn_norm": "attention_norm", "ffn_norm": "ffn_norm"}
    qkv_names = ("attention.wqkv",)
    grouped = True
    o_name = "attention.wo"
    ffn_names = ("feed_forward.w1", "feed_forward.w3", "feed_forward.w2")
