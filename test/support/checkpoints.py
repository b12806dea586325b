"""Checkpoints built in seconds and saved as Hugging Face directories, and what transformers generates from them.

script: a LLaMA whose next-token logits depend only on the last token and are chosen here (one-hot embeddings, o_proj
and down_proj zero, lm_head column t the wanted logits / sqrt(hidden)), so that exact texts and distributions are known
without real weights. spm: the same with a SentencePiece-style tokenizer. llama, qwen2, qwen3, mistral: small random
checkpoints in which every parameter matters. slow: a random LLaMA that takes milliseconds a step.
"""

import itertools
import json
import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen3Config

VOCABULARY = 320
EOS, IM_START, IM_END = 256, 257, 258
SPECIALS = ("<|eos|>", "<|im_start|>", "<|im_end|>")
NO_TOKEN = 310  # in the models, not in the tokenizer
SURE = 12.0  # the logit of a scripted token, all others 0: probability 0.998
UNLIKELY = -20.0  # the logit of the tokens that a distribution does not name

# What the script answers to the prompt "A": a character of four tokens, ASCII, a character of three, then eos.
SCRIPTED = "\U0001fae0 xyz龜W"

# ChatML, in which the answer begins behind an "A": the scripted checkpoint answers every conversation with SCRIPTED.
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\nA{% endif %}"
)

Row = int | Mapping[int, float]  # the token that follows, or {token: logit}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE without merges: every UTF-8 byte is a token (0..255), then the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return _fast(backend)


def spm_tokenizer() -> PreTrainedTokenizerFast:
    """As LLaMA 2 has it: a byte is `<0xNN>` (0..255), pieces with a `▁` for the space, a space put before the text."""
    pieces = [f"<0x{byte:02X}>" for byte in range(256)] + list(SPECIALS)
    pieces += ["▁", "A", "▁Hello", "▁world", "!", "▁x"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _fast(backend)


def _fast(backend: Tokenizer) -> PreTrainedTokenizerFast:
    backend.add_special_tokens([AddedToken(special, special=True, normalized=False) for special in SPECIALS])
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=SPECIALS[0], clean_up_tokenization_spaces=False)
    fast.chat_template = CHAT_TEMPLATE
    return fast


@cache
def token_ids(text: str) -> tuple[int, ...]:
    """What the byte tokenizer makes of a text."""
    return tuple(byte_tokenizer().encode(text, add_special_tokens=False))


def token_id(character: str) -> int:
    (only,) = token_ids(character)
    return only


def script_rows() -> dict[int, Row]:
    """Which token follows which; a token that is not named is followed by eos.

    A: SCRIPTED. B: two characters of two and three tokens. p: a true distribution, q .665, r .245, s .090, each back to
    p. K: logits L 2, M 1, each back to K. G: itself, for ever. g: h, i, <|im_end|>. C: a token without text, then D.
    """
    rows: dict[int, Row] = {}
    for text in ("A" + SCRIPTED, "Bé中b"):
        ids = token_ids(text)
        rows |= dict(itertools.pairwise(ids))
    id = {character: token_id(character) for character in "pqrsKLMNGghiCD"}
    rows |= {id["p"]: {id["q"]: 10, id["r"]: 9, id["s"]: 8}} | dict.fromkeys((id["q"], id["r"], id["s"]), id["p"])
    rows |= {id["K"]: {id["L"]: 2, id["M"]: 1, id["N"]: 0}} | dict.fromkeys((id["L"], id["M"], id["N"]), id["K"])
    rows |= {id["G"]: id["G"], id["g"]: id["h"], id["h"]: id["i"], id["i"]: IM_END}
    return rows | {id["C"]: NO_TOKEN, NO_TOKEN: id["D"]}


def space_rows() -> dict[int, Row]:
    """Every token prefers a space, then a newline, then what JSON is written with, the end of sequence least of all."""
    liked = {token_id(" "): 10.0, token_id("\n"): 9.0}
    liked |= {token_id(character): 5 - i * 0.2 for i, character in enumerate('{":}0123456789abcdefxyz[],-.')}
    row = dict.fromkeys(range(VOCABULARY), 0.0) | liked | {EOS: -5.0}
    return dict.fromkeys(range(VOCABULARY), row)


def spm_rows() -> dict[int, Row]:
    """After A: `▁Hello ▁world !`, a character of four byte tokens, `▁x`."""
    ids = spm_tokenizer().convert_tokens_to_ids(
        ["A", "▁Hello", "▁world", "!", "<0xF0>", "<0x9F>", "<0xAB>", "<0xA0>", "▁x"]
    )
    return dict(itertools.pairwise(ids))


def _scripted(rows: Mapping[int, Row], config: dict[str, Any]) -> LlamaForCausalLM:
    vocabulary = config.setdefault("vocab_size", VOCABULARY)
    config = dict(
        hidden_size=VOCABULARY + 8, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=False, bos_token_id=None,
        pad_token_id=None, eos_token_id=EOS, rms_norm_eps=1e-6,
    ) | config  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**config))
    head = torch.zeros(vocabulary, config["hidden_size"])
    for token in range(vocabulary):
        row = rows.get(token, EOS)
        if isinstance(row, Mapping):
            head[:, token] = UNLIKELY
            for follower, logit in row.items():
                head[follower, token] = logit
        else:
            head[row, token] = SURE
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(vocabulary, config["hidden_size"]))
        model.lm_head.weight.copy_(head / math.sqrt(config["hidden_size"]))
    return model


def _random(kind: type[transformers.PretrainedConfig], config: dict[str, Any], seed: int) -> Any:
    """Random weights with clear preferences; no bias is zero and no norm is one."""
    sizes = dict(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=192, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.2, tie_word_embeddings=False,
        bos_token_id=None, pad_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(kind(**sizes | config), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * (0.2 if name.endswith("bias") else 0.05))
    return model


FAMILIES: dict[str, tuple[type[transformers.PretrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "qwen2": (Qwen2Config, dict(tie_word_embeddings=True, use_sliding_window=False)),
    "qwen3": (Qwen3Config, dict(head_dim=48)),
    "mistral": (MistralConfig, dict(sliding_window=24)),
    "slow": (
        LlamaConfig,
        dict(
            hidden_size=512,
            intermediate_size=1376,
            num_hidden_layers=8,
            num_attention_heads=8,
            max_position_embeddings=8192,
        ),
    ),
}


def build(name: str, path: Path, rows: Mapping[int, Row] | None = None, seed: int = 0, **config: Any) -> Path:
    """Saves checkpoint `name` in `path`.

    rows: instead of the scripted ones. config: fields of its config that differ.
    """
    if name in FAMILIES:
        kind, fields = FAMILIES[name]
        model = _random(kind, fields | config, seed)
        tokenizer = byte_tokenizer()
    else:
        scripts: dict[str, tuple[Callable[[], dict[int, Row]], Callable[[], PreTrainedTokenizerFast]]] = {
            "script": (script_rows, byte_tokenizer),
            "spm": (spm_rows, spm_tokenizer),
            "space": (space_rows, byte_tokenizer),
        }
        make_rows, make_tokenizer = scripts[name]
        model = _scripted(make_rows() if rows is None else rows, config)
        tokenizer = make_tokenizer()
    model.generation_config.eos_token_id = model.config.eos_token_id
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def edit_json(path: Path, **fields: Any) -> None:
    """Sets fields of a JSON file; None removes one."""
    content = (json.loads(path.read_text()) if path.exists() else {}) | fields
    removed = {name for name, value in fields.items() if value is None}
    path.write_text(json.dumps({name: value for name, value in content.items() if name not in removed}))


class Checkpoints:
    """Builds each checkpoint once."""

    def __init__(self, root: Path):
        self._root = root
        self._built: dict[str, Path] = {}

    def __call__(self, name: str, **overrides: Any) -> Path:
        """The directory of a checkpoint, shared: do not change it."""
        key = f"{name} {sorted(overrides.items())}"
        if key not in self._built:
            self._built[key] = build(name, self._root / f"{name}{len(self._built)}", **overrides)
        return self._built[key]

    def copy(self, name: str, path: Path, **overrides: Any) -> Path:
        """A copy in `path`, to be changed."""
        shutil.copytree(self(name, **overrides), path, dirs_exist_ok=True)
        return path


@dataclass(frozen=True)
class Greedy:
    """What transformers generates from a prompt, and how close the decision was at each token."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    gaps: tuple[float, ...]  # of the best two logits


@cache
def reference_model(path: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        path, attn_implementation="eager", dtype=torch.float32
    ).eval()


@cache
def reference(path: Path, prompt: tuple[int, ...], n: int) -> Greedy:
    """n greedy tokens of transformers generate; no token ends it."""
    model = reference_model(path)
    if model.config.rope_parameters["rope_type"] == "dynamic":  # it remembers the longest sequence it has seen
        model = reference_model.__wrapped__(path)
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), max_new_tokens=n,
            do_sample=False, output_logits=True, return_dict_in_generate=True, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
    best = torch.cat(out.logits).topk(2).values
    gaps = (best[:, 0] - best[:, 1]).tolist()
    return Greedy(prompt, tuple(out.sequences[0, len(prompt) :].tolist()), tuple(gaps))


def random_prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    """Ids of bytes."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return tuple(torch.randint(0, 256, (length,), generator=generator).tolist())


def clear_reference(path: Path, length: int, n: int, gap: float = 1e-2) -> Greedy:
    """The first random prompt of a length on whose whole path the best logit leads by more than `gap`."""
    for seed in range(100):
        greedy = reference(path, random_prompt(length, seed), n)
        if min(greedy.gaps) > gap:
            return greedy
    raise AssertionError(f"100 prompts of {length} tokens and no clear path of {n}")


def assert_same_tokens(greedy: Greedy, tokens: Sequence[int], allowed_gap: float = 1e-4) -> None:
    """Equal to the reference, up to a place where its best two logits differ by less than `allowed_gap`, printed."""
    assert len(tokens) == len(greedy.tokens), f"{len(tokens)} tokens instead of {len(greedy.tokens)}"
    for i, (expected, got, gap) in enumerate(zip(greedy.tokens, tokens, greedy.gaps)):
        if expected != got:
            place = f"prompt of {len(greedy.prompt)}: token {i} is {got}, transformers has {expected}, gap {gap:.2g}"
            assert gap < allowed_gap, place
            print(place)
            return


class Payload:
    """A pickle that makes a folder when it is read."""

    def __init__(self, path: Path):
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._path),)
