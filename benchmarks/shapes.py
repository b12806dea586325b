"""The shapes that are measured: exact sizes, random weights."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCAB = 128256
SHAPES = {
    "tiny": dict(hidden_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
                 intermediate_size=512, tie_word_embeddings=True),
    "1b": dict(hidden_size=2048, num_hidden_layers=16, intermediate_size=8192, head_dim=64, tie_word_embeddings=True),
    "3b": dict(
        hidden_size=3072, num_hidden_layers=28, num_attention_heads=24, intermediate_size=8192, tie_word_embeddings=True
    ),
    "8b": dict(hidden_size=4096, num_hidden_layers=32, intermediate_size=14336),
    "32b": dict(hidden_size=5120, num_hidden_layers=64, num_attention_heads=64, intermediate_size=25600),
    "gemma2-2b": dict(
        model_type="gemma2", vocab_size=256000, hidden_size=2304, num_hidden_layers=26, num_attention_heads=8,
        num_key_value_heads=4, head_dim=256, intermediate_size=9216, tie_word_embeddings=True,
    ),
    "qwen3-30b-a3b": dict(
        model_type="qwen3_moe", vocab_size=151936, hidden_size=2048, num_hidden_layers=48, num_key_value_heads=4,
        intermediate_size=6144, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True,
    ),
    "deepseek-v2-lite": dict(
        model_type="deepseek_v2", vocab_size=102400, hidden_size=2048, num_hidden_layers=27, num_attention_heads=16,
        num_key_value_heads=16, intermediate_size=10944, q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128,
        qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=64, num_experts_per_tok=6, moe_intermediate_size=1408,
        n_shared_experts=2, first_k_dense_replace=1, topk_method="greedy", norm_topk_prob=False,
    ),
}  # fmt: skip


def write_model(path: Path, shape: str, tokenizer_dir: str | None, layers: int | None) -> None:
    """A Hugging Face directory with config.json and a tokenizer, no weights.

    transformers, which takes long to import, is asked only for what a config of another family leaves open and for a
    tokenizer that is given.
    """
    sizes = dict(
        model_type="llama", vocab_size=VOCAB, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
        tie_word_embeddings=False, max_position_embeddings=131072, dtype="bfloat16",
    )  # fmt: skip
    sizes |= SHAPES[shape] | ({"num_hidden_layers": layers} if layers else {})
    if sizes["model_type"] == "llama":
        (path / "config.json").write_text(json.dumps(sizes | {"eos_token_id": 2}))
    else:
        from transformers import AutoConfig

        AutoConfig.for_model(**sizes).save_pretrained(path)
    if tokenizer_dir:
        from transformers import AutoTokenizer

        AutoTokenizer.from_pretrained(tokenizer_dir).save_pretrained(path)
    else:
        byte_tokenizer().save(str(path / "tokenizer.json"))


def byte_tokenizer() -> Tokenizer:
    """Byte-level BPE without merges: enough for ids as prompts."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
