"""The tokenizer read straight from tokenizer.json against transformers' AutoTokenizer: ids, texts, templates."""

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from detokenization.conftest import BUILDERS
from support.server import REPOSITORY
from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from lightllm.models.model_dir import embedded_model_dir
from lightllm.server.chat_template import ChatTemplate, TemplateFailed
from lightllm.server.tokenizer import FastTokenizer, load_tokenizer

PIECES = [
    "", " ", "  ", "\n", "\t", "Hello world!", "naïve café", "龜兔賽跑", "🫠👩‍👩‍👧", "0123456789",
    "a b  c   d", "don't ,. ?", "<|eos|>", "<|im_start|>user\n", "<|im_end|>", "<s>", "</s>", "<unk>",
    " added word", "[EXTRA]", "<think>", "é龜", "\u0000",
]  # fmt: skip

CHAT = """{%- for message in messages -%}
{%- if loop.index > 3 %}{% break %}{% endif -%}
<|im_start|>{{ message.role }}
{% generation %}{{ message['content'] | trim }}{% endgeneration %}<|im_end|>
{% endfor -%}
{{ tools | tojson(indent=2) if tools else '' }}{{ eos_token }}{{ bos_token if bos_token is defined }}{{ extra }}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def plain(builder: str) -> Callable[[Path], None]:
    return lambda folder: BUILDERS[builder]().save_pretrained(folder) and None


def with_bos(folder: Path) -> None:
    """The post-processor of tokenizer.json prepends BOS and appends EOS, and normalizes."""
    hf = BUILDERS["sentencepiece"]()
    hf.backend_tokenizer.normalizer = normalizers.Sequence([normalizers.NFC()])
    hf.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A $B", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    hf.chat_template = CHAT
    hf.save_pretrained(folder)


def with_flags(folder: Path) -> None:
    """add_bos_token and the like do not overrule tokenizer.json; tokens named only in the configuration are added."""
    plain("merges")(folder)
    change(folder, add_bos_token=True, add_eos_token=True, bos_token="<s>", image_token="<image>", chat_template=CHAT)
    change(folder, clean_up_tokenization_spaces=True, extra_special_tokens=["[EXTRA]", "Hello"])


def with_decoder(folder: Path) -> None:
    """As older transformers saved it: added_tokens_decoder, AddedToken objects, named templates in a list."""
    plain("bytes")(folder)
    token = dict(lstrip=False, rstrip=True, normalized=False, single_word=False)
    change(
        folder,
        added_tokens_decoder={
            "256": token | {"content": "<|eos|>", "special": True},
            "257": token | {"content": "<|im_start|>", "special": True, "rstrip": False},
            "261": token | {"content": "<think>", "special": False},
        },
        eos_token=token | {"content": "<|eos|>", "__type": "AddedToken"},
        additional_special_tokens=["<|im_end|>"],
        chat_template=[{"name": "default", "template": CHAT}, {"name": "tool_use", "template": "tools" + CHAT}],
    )


def with_map(folder: Path) -> None:
    """special_tokens_map.json beside a tokenizer_config.json that names no tokens; the template in a file."""
    plain("bytes")(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    names = {"eos_token": {"content": "<|eos|>", "lstrip": True, "rstrip": False, "normalized": False}}
    names |= {"bos_token": "<|im_start|>", "additional_special_tokens": ["<|im_end|>", "[EXTRA]"]}
    (folder / "special_tokens_map.json").write_text(json.dumps(names))
    (folder / "chat_template.jinja").write_text(CHAT)


def with_words(folder: Path) -> None:
    """WordPiece: a decoder that is no joining of pieces."""
    words = ["[UNK]", "[CLS]", "[SEP]", "hello", "world", "##s", "!", "a", "b", "##b", "0", "##1"]
    backend = Backend(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    PreTrainedTokenizerFast(tokenizer_object=backend, cls_token="[CLS]", sep_token="[SEP]").save_pretrained(folder)


def change(folder: Path, **fields: object) -> None:
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


KINDS: dict[str, Callable[[Path], None]] = {
    **{name: plain(name) for name in BUILDERS},
    "bos": with_bos,
    "flags": with_flags,
    "decoder": with_decoder,
    "map": with_map,
    "words": with_words,
}


@pytest.fixture(scope="module", params=[*KINDS, "smollm2"])
def both(request, tmp_path_factory) -> tuple[FastTokenizer, PreTrainedTokenizerFast]:
    if request.param == "smollm2":
        folder = embedded_model_dir()
    else:
        folder = tmp_path_factory.mktemp(request.param)
        KINDS[request.param](folder)
    ours = load_tokenizer(str(folder))
    assert isinstance(ours, FastTokenizer)
    return ours, AutoTokenizer.from_pretrained(folder)


def test_ids_and_texts(both) -> None:
    ours, reference = both
    rng = random.Random(0)
    texts = [*PIECES, *("".join(rng.choices(PIECES, k=rng.randint(2, 8))) for _ in range(400))]
    for text in texts:
        for special in (True, False):
            ids = reference.encode(text, add_special_tokens=special)
            got = ours.encode(text, add_special_tokens=special)
            if special and ids[:2] == [reference.bos_token_id] * 2:
                ids = ids[1:]  # the one thing that we do otherwise
            assert got == ids, text
        assert ours.decode(got) == reference.decode(got, clean_up_tokenization_spaces=False), text


def test_decoding_of_random_ids(both) -> None:
    ours, reference = both
    rng = random.Random(1)
    for _ in range(300):
        ids = [rng.randrange(len(reference)) for _ in range(rng.randint(1, 12))]
        assert ours.decode(ids) == reference.decode(ids, clean_up_tokenization_spaces=False)
        visible = [id for id in ids if id not in ours.special_ids]
        skipped = reference.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert ours.decode(visible) == skipped


def test_special_tokens(both) -> None:
    ours, reference = both
    assert ours.vocab_size == len(reference)
    assert ours.config.special_tokens == reference.special_tokens_map
    assert set(reference.all_special_ids) <= ours.special_ids
    added = reference.added_tokens_decoder
    assert ours.special_ids == {id for id, token in added.items() if token.special}
    assert ours.bos_token_id == reference.bos_token_id
    assert reference.eos_token_id in (None, ours.token_to_id(ours.config.special_tokens.get("eos_token", "")))


def test_chat_templates(both) -> None:
    ours, reference = both
    theirs = reference.chat_template or {}
    assert ours.config.chat_templates == (theirs if isinstance(theirs, dict) else {"default": theirs})
    if "default" not in ours.config.chat_templates:
        return
    template = ChatTemplate(ours.config.chat_templates["default"])
    tools = [{"type": "function", "function": {"name": "f", "description": 'é <b> "x"', "parameters": {}}}]
    messages = [
        {"role": "system", "content": " be brief \n"},
        {"role": "user", "content": "<i>hé</i>"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "more"},
    ]
    for given in (None, tools):
        for add in (True, False):
            expected = reference.apply_chat_template(
                messages,
                tools=given,
                add_generation_prompt=add,
                tokenize=False,
                extra="x",
                chat_template=template.source,
            )
            assert template.render(messages, given, add, ours.config.special_tokens | {"extra": "x"}) == expected


def test_a_directory_without_tokenizer_json_is_read_by_transformers(tmp_path) -> None:
    """vocab.json and merges.txt, as GPT-2 had them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: i for i, character in enumerate([*alphabet, "ab", "<|endoftext|>"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    ours = load_tokenizer(str(tmp_path))
    assert ours.encode("ab") == [vocab["ab"]]
    assert ours.decode([vocab["ab"], vocab["<|endoftext|>"]]) == "ab<|endoftext|>"
    assert vocab["<|endoftext|>"] in ours.special_ids and not ours.serves_grammars


def test_code_of_the_checkpoint_runs_only_when_it_may(tmp_path) -> None:
    plain("bytes")(tmp_path)
    change(tmp_path, auto_map={"AutoTokenizer": ["own.Own", None]}, tokenizer_class="Own")
    (tmp_path / "own.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w')\nfrom transformers import PreTrainedTokenizerFast as Own\n"
    )
    assert load_tokenizer(str(tmp_path)).encode("<|eos|>") == [256]
    assert not (tmp_path / "ran").exists()
    program = "import sys, lightllm.server.tokenizer as t; t.load_tokenizer(sys.argv[1], trust_remote_code=True)"
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=REPOSITORY, check=True)
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{% for %}", "not valid"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ cycler.__init__.__globals__.os.popen('touch /tmp/x') }}", "unsafe"),
        ("{{ raise_exception('no system here') }}", "no system here"),
        ("{{ messages[7].content.text }}", "undefined|no element"),
        ("{{ range(10 ** 9) | list }}", "[Rr]ange"),
    ],
)
def test_templates_that_fail(source: str, reason: str) -> None:
    with pytest.raises(TemplateFailed, match=reason):
        ChatTemplate(source).render([{"role": "user", "content": "x"}])
