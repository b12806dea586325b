"""SamplingParams: everything a request may ask for, in LightLLM's words, checked and resolved once at the front."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import msgspec

MAX_SAMPLES = 8
MAX_STOP_SEQUENCES = 10
MAX_STOP_LENGTH = 256  # characters of a stop string, ids of a stop token sequence
MAX_STOP_TOKEN_IDS = 64
MAX_ALLOWED_TOKEN_IDS = 256
MAX_LOGIT_BIAS = 300
MAX_LOGPROBS = 20


class InvalidParameter(ValueError):
    """A request parameter that cannot be served; the message names the field and the limit (HTTP 400)."""

    def __init__(self, field: str, reason: str):
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


@dataclass(frozen=True)
class RequestLimits:
    """What the engine can serve; from the worker's `EngineInfo`.

    max_total_tokens: prompt + output tokens of one request, from the context and the KV pool together.
    vocab_size: ids 0..vocab_size-1 exist in the model.
    eos_token_ids: union of config, generation_config and tokenizer.
    """

    max_total_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()


class SamplingParams(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Parameters of one request (meanings: docs/api.md). `None` means not given.

    `resolve` gives a copy in which every field the engine reads is concrete: temperature 0 is greedy, `top_k` -1 is off,
    `stop_token_ids` holds the end-of-sequence ids too unless `ignore_eos`, and `max_new_tokens` is the request's bound.
    """

    n: int | None = None
    best_of: int | None = None
    do_sample: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    input_penalty: bool = False
    exponential_decay_length_penalty: tuple[int, float] = (1, 1.0)
    max_new_tokens: int | None = None
    min_new_tokens: int = 1
    ignore_eos: bool = False
    stop_sequences: str | list[str | list[int]] = []
    stop_token_ids: list[int] = []
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    add_special_tokens: bool = True
    add_spaces_between_special_tokens: bool = True
    print_eos_token: bool = False
    allowed_token_ids: list[int] = []
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    disable_prompt_cache: bool = False
