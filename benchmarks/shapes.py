"""The shapes that are measured: exact sizes, random weights."""

from __future__ import annotations

from pathlib import Path

VOCAB = 128256
SHAPES = {
    "1b": dict(hidden_size=2048, num_hidden_layers=16, intermediate_size=8192, head_dim=64, tie_word_embeddings=True),
    "3b": dict(
        hidden_size=3072, num_hidden_layers=28, num_attention_heads=24, intermediate_size=8192, tie_word_embeddings=True
    ),
    "8b": dict(hidden_size=4096, num_hidden_layers=32, intermediate_size=14336),
    "32b": dict(hidden_size=5120, num_hidden_layers=64, num_attention_heads=64, intermediate_size=25600),
}


def write_model(path: Path, shape: str, tokenizer_dir: str | None, layers: int | None) -> None:
    """A Hugging Face directory with config.json and a tokenizer, no weights."""
    from transformers import AutoTokenizer, LlamaConfig

    defaults = dict(num_attention_heads=32, num_key_value_heads=8, head_dim=128, tie_word_embeddings=False)
    sizes = defaults | SHAPES[shape] | ({"num_hidden_layers": layers} if layers else {})
    config = LlamaConfig(
        **sizes, vocab_size=VOCAB, max_position_embeddings=131072, dtype="bfloat16", architectures=["LlamaForCausalLM"]
    )
    config.save_pretrained(path)
    if tokenizer_dir:
        AutoTokenizer.from_pretrained(tokenizer_dir).save_pretrained(path)
    else:
        byte_tokenizer().save_pretrained(path)


def byte_tokenizer():
    """Byte-level BPE without merges: enough for ids as prompts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)
