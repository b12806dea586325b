"""SamplingParams: everything a request may ask for, in LightLLM's words, checked and resolved once at the front."""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Iterable, Sized
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Any

import msgspec

MAX_SAMPLES = 8
MAX_STOP_SEQUENCES = 10
MAX_STOP_LENGTH = 256  # characters of a stop string, ids of a stop token sequence
MAX_STOP_TOKEN_IDS = 64
MAX_ALLOWED_TOKEN_IDS = 256
MAX_LOGIT_BIAS = 300
MAX_LOGPROBS = 20
SEED_BITS = 63
MAX_SEED = 2**SEED_BITS - 1
MAX_START = 2**31 - 1  # output tokens; a message cannot carry any int
MAX_TEMPERATURE = 1e30  # beyond it -inf / temperature is no longer -inf in float32
GREEDY_TEMPERATURE = 1e-5
SMALLEST_TOP_P = 1e-6  # keeps the likeliest token alone in every vocabulary, and is not 0 in float32


Priority = Annotated[int, msgspec.Meta(ge=-1000, le=1000)]
TOO_LONG = "context_length_exceeded"  # OpenAI's code, by which clients know that a shorter prompt may be served
CONSTRAINTS = ("guided_json", "guided_regex", "guided_grammar", "guided_choice")


class InvalidParameter(ValueError):
    """A request parameter that cannot be served; the message names the field and the limit (HTTP 400).

    code: a word for programs that some dialects pass on.
    """

    def __init__(self, field: str, reason: str, code: str | None = None):
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason
        self.code = code

    @classmethod
    def of(cls, error: msgspec.ValidationError) -> InvalidParameter:
        """What msgspec found while converting a request: a wrong type, an unknown or a missing field."""
        reason, _, path = str(error).partition(" - at ")
        if unnamed := re.fullmatch(r"Object (contains unknown|missing required) field `(.*)`", reason, re.DOTALL):
            return cls(unnamed[2], "unknown" if unnamed[1] == "contains unknown" else "is required")
        field = re.search(r"\$\.(?:parameters\.)?(\w+)", path)
        return cls(field[1] if field else "body", reason[0].lower() + reason[1:].replace(" | null", ""))


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

    `resolve` gives a copy in which every field the engine reads is concrete: temperature 0 is greedy, `top_k` -1 is
    off, `stop_token_ids` holds the end-of-sequence ids too unless `ignore_eos`, and `max_new_tokens` is the bound. What
    constrains the form of the output is then checked and put into `guided_grammar` (server/constraints.py).
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
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    guided_choice: list[str] | None = None

    def resolve(self, limits: RequestLimits, prompt_len: int) -> SamplingParams:
        """A checked copy for a prompt of `prompt_len` tokens in which nothing is left open (see the class).

        Raises InvalidParameter with the field and its limit; no value is ever clamped.

        Greedy: `do_sample` false, whatever else is given; without `do_sample`, when none of temperature, top_p, top_k
        and min_p is given; and any temperature below 1e-5. `allowed_token_ids` combines with everything, as a mask
        after bias and penalties, as long as a token is left to sample: with `min_new_tokens` above 1 one of the allowed
        ids must not be a stop id.
        """
        asked = self._typed()
        n = asked._samples()
        stop_token_ids = asked._stop_token_ids(limits)
        max_new_tokens = asked._max_new_tokens(limits, prompt_len)
        asked._check_penalties()
        asked._check_token_choice(limits)
        _between("min_new_tokens", asked.min_new_tokens, 0, max_new_tokens, "with this max_new_tokens must be")
        if asked.min_new_tokens > 1 and asked.allowed_token_ids and set(asked.allowed_token_ids) <= set(stop_token_ids):
            raise InvalidParameter(
                "allowed_token_ids",
                f"holds only stop ids, none of which may come before min_new_tokens {asked.min_new_tokens}",
            )
        _between("logprobs", asked.logprobs, 0, MAX_LOGPROBS)
        _between("prompt_logprobs", asked.prompt_logprobs, -1, MAX_LOGPROBS)
        _between("seed", asked.seed, -MAX_SEED - 1, MAX_SEED)
        return msgspec.structs.replace(
            asked,
            n=n,
            best_of=n,
            **asked._draw(limits),
            max_new_tokens=max_new_tokens,
            min_new_tokens=max(asked.min_new_tokens, 1),
            stop_sequences=asked._stop_sequences(limits),
            stop_token_ids=stop_token_ids,
            seed=secrets.randbits(SEED_BITS) if asked.seed in (None, -1) else asked.seed & MAX_SEED,
            logprobs=asked.logprobs or 0,
            prompt_logprobs=None if asked.prompt_logprobs == -1 else asked.prompt_logprobs,
        )

    def _typed(self) -> SamplingParams:
        """A copy whose values have the declared types; token ids that are keys of a JSON object become ints."""
        try:
            return msgspec.convert(msgspec.structs.asdict(self), SamplingParams, str_keys=True)
        except msgspec.ValidationError as error:
            raise InvalidParameter.of(error) from None

    def _samples(self) -> int:
        _between("n", self.n, 1, MAX_SAMPLES)
        _between("best_of", self.best_of, 1, MAX_SAMPLES)
        if self.n is not None and self.best_of is not None and self.n != self.best_of:
            raise InvalidParameter("best_of", f"must equal n ({self.n}), got {self.best_of}")
        return self.n or self.best_of or 1

    def _draw(self, limits: RequestLimits) -> dict[str, float | int | bool]:
        """do_sample, temperature, top_k, top_p and min_p, concrete."""
        _between("temperature", self.temperature, 0, MAX_TEMPERATURE)
        _between("min_p", self.min_p, 0, 1)
        _between("top_p", self.top_p, 0, 1)
        if self.top_p == 0:
            raise InvalidParameter("top_p", "must be greater than 0")
        if self.top_k is not None and self.top_k < -1:
            raise InvalidParameter("top_k", f"must be -1 or 0 (off) or at least 1, got {self.top_k}")
        given = (self.temperature, self.top_p, self.top_k, self.min_p)
        random = any(value is not None for value in given) if self.do_sample is None else self.do_sample
        temperature = 1.0 if self.temperature is None else self.temperature
        if not random or temperature < GREEDY_TEMPERATURE:
            return dict(do_sample=False, temperature=0.0, top_k=-1, top_p=1.0, min_p=0.0)
        top_k = self.top_k if self.top_k and self.top_k < limits.vocab_size else -1
        top_p = 1.0 if self.top_p is None else max(self.top_p, SMALLEST_TOP_P)
        return dict(do_sample=True, temperature=temperature, top_k=top_k, top_p=top_p, min_p=self.min_p or 0.0)

    def _check_penalties(self) -> None:
        _between("presence_penalty", self.presence_penalty, -2, 2)
        _between("frequency_penalty", self.frequency_penalty, -2, 2)
        _between("repetition_penalty", self.repetition_penalty, 1e-6, 1e6)  # logits stay finite in float32
        start, factor = self.exponential_decay_length_penalty
        if not 0 <= start <= MAX_START or not 1 <= factor < math.inf:
            raise InvalidParameter(
                "exponential_decay_length_penalty",
                f"must be [start 0 to {MAX_START}, finite factor >= 1], got [{start}, {factor}]",
            )

    def _check_token_choice(self, limits: RequestLimits) -> None:
        _at_most("logit_bias", self.logit_bias, MAX_LOGIT_BIAS, "entries")
        _in_vocabulary("logit_bias", self.logit_bias, limits)
        for token_id, bias in self.logit_bias.items():
            _between("logit_bias", bias, -100, 100, f"the bias of id {token_id} must be")
        _at_most("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_TOKEN_IDS, "ids")
        _in_vocabulary("allowed_token_ids", self.allowed_token_ids, limits)

    def _max_new_tokens(self, limits: RequestLimits, prompt_len: int) -> int:
        if prompt_len < 1:
            raise InvalidParameter("inputs", "the prompt is empty")
        room = limits.max_total_tokens - prompt_len
        if room < 1:
            raise InvalidParameter(
                "inputs",
                f"the prompt is too long: {prompt_len} tokens; the maximum context length, prompt and output together, "
                f"is {limits.max_total_tokens} tokens",
                TOO_LONG,
            )
        if self.max_new_tokens is None:
            return room
        if self.max_new_tokens < 1:
            raise InvalidParameter("max_new_tokens", f"must be at least 1, got {self.max_new_tokens}")
        if self.max_new_tokens > room:
            raise InvalidParameter(
                "max_new_tokens",
                f"input length and `max_new_tokens` exceed context limit: {prompt_len} + {self.max_new_tokens} > "
                f"{limits.max_total_tokens}; at most {room} fit",
                TOO_LONG if self.max_new_tokens < limits.max_total_tokens else None,
            )
        return self.max_new_tokens

    def _stop_token_ids(self, limits: RequestLimits) -> list[int]:
        _at_most("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS, "ids")
        _in_vocabulary("stop_token_ids", self.stop_token_ids, limits)
        eos = [] if self.ignore_eos else [token_id for token_id in limits.eos_token_ids if token_id < limits.vocab_size]
        return list(dict.fromkeys(chain(self.stop_token_ids, eos)))

    def _stop_sequences(self, limits: RequestLimits) -> list[str | list[int]]:
        sequences = [self.stop_sequences] if isinstance(self.stop_sequences, str) else self.stop_sequences
        _at_most("stop_sequences", sequences, MAX_STOP_SEQUENCES, "sequences")
        for sequence in sequences:
            unit = "characters" if isinstance(sequence, str) else "ids"
            if not sequence:
                raise InvalidParameter("stop_sequences", "an empty stop sequence would match everywhere")
            _at_most("stop_sequences", sequence, MAX_STOP_LENGTH, unit)
            if not isinstance(sequence, str):
                _in_vocabulary("stop_sequences", sequence, limits)
        return list(sequences)


def _between(field: str, value: float | None, low: float, high: float, what: str = "") -> None:
    """`what` says more precisely what `value` is. NaN is between nothing; None is not given."""
    if value is not None and not low <= value <= high:
        raise InvalidParameter(field, f"{what or 'must be'} between {low} and {high}, got {value}")


def _at_most(field: str, values: Sized, limit: int, unit: str) -> None:
    if len(values) > limit:
        raise InvalidParameter(field, f"{len(values)} {unit}; at most {limit}")


def _in_vocabulary(field: str, token_ids: Iterable[int], limits: RequestLimits) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < limits.vocab_size:
            raise InvalidParameter(
                field, f"token id {token_id} is not in the vocabulary of ids 0..{limits.vocab_size - 1}"
            )
