"""Checkpoints that generate no text are refused by name: encoders, encoder-decoders, reward and score heads."""

import re
from typing import Any

from lightllm.common.basemodel.config_reader import ConfigError

_LANGUAGE_MODELS = re.compile(
    r"\w+(ForCausalLM|LMHeadModel|ForConditionalGeneration)$|(Aquila|Bloom|ChatGLM)Model$"  # the last three have a head
)
_ENCODERS = re.compile(
    r"(albert|bert|camembert|convbert|deberta(-v2)?|distilbert|electra|ernie|esm|eurobert|modernbert|mpnet|nomic_bert"
    r"|roberta|rembert|xlm-roberta(-xl)?|xlnet)$"
)


def refuse_other_kinds(values: dict[str, Any]) -> None:
    """ConfigError if config.json describes a model of another kind than a decoder that predicts the next token."""
    for architecture in values.get("architectures") or []:
        if not _LANGUAGE_MODELS.match(str(architecture)):
            raise ConfigError(f"{architecture} (config.json) has no head of a language model: not supported")
    model_type = str(values.get("model_type"))
    if _ENCODERS.match(model_type):
        raise ConfigError(f"model_type {model_type!r} is an encoder, which generates no text: not supported")
    if values.get("is_encoder_decoder"):
        raise ConfigError(f"model_type {model_type!r} is an encoder-decoder: not supported")
