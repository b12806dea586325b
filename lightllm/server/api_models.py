"""Bodies and answers of the LightLLM dialect; the OpenAPI description is made of these structs."""

from typing import Any

import msgspec

from lightllm.server.core.messages import Load
from lightllm.server.core.sampling_params import Priority, SamplingParams


class Parameters(SamplingParams, kw_only=True, forbid_unknown_fields=True):
    """Sampling parameters, and what the answer shall hold. null means not given.

    return_details: `tokens` with id, text, logprob and special of each. priority: larger ones go first. user: who
    asks, for fair sharing between users. regular_constraint: LightLLM's older word for guided_regex.
    """

    return_details: bool = False
    priority: Priority = 0
    user: str = ""
    regular_constraint: str | None = None


class MultimodalParams(msgspec.Struct, forbid_unknown_fields=True):
    images: list[Any] | None = None
    audios: list[Any] | None = None


class GenerateBody(msgspec.Struct, forbid_unknown_fields=True):
    """inputs: text or token ids."""

    inputs: str | list[int]
    parameters: Parameters
    multimodal_params: MultimodalParams | None = None


class RootBody(GenerateBody, forbid_unknown_fields=True):
    """stream: answer as /generate_stream does, instead of as /generate."""

    stream: bool | None = None


class TokensBody(msgspec.Struct, forbid_unknown_fields=True):
    """parameters: only `add_special_tokens` matters here."""

    text: str
    parameters: Parameters | None = None


class TopToken(msgspec.Struct):
    """One of the likeliest tokens at a place."""

    id: int
    text: str
    logprob: float


class TokenDetail(TopToken):
    """text is "" while characters or a possible stop string are held back; logprob is that of the raw logits.

    cached_tokens: of the prompt, those found in the prefix cache. logprobs: the `logprobs` likeliest tokens, if asked
    for.
    """

    special: bool
    count_output_tokens: int
    prompt_tokens: int
    cached_tokens: int
    logprobs: list[TopToken] | None = None


class GenerateAnswer(msgspec.Struct, omit_defaults=True):
    """With n > 1 all fields but generated_text, prompt_tokens and those of the prompt are lists, an entry per output.

    logprobs: of each output token. top_logprobs: with parameter logprobs > 0, the likeliest tokens of each place.
    tokens: with return_details. prompt_token_ids and prompt_logprobs: with parameter prompt_logprobs; an entry is
    {token id: logprob} of the prompt's token and the likeliest ones, null for the first token.
    """

    generated_text: list[str]
    count_output_tokens: int | list[int]
    finish_reason: str | list[str]
    prompt_tokens: int
    cached_tokens: int
    logprobs: list[float | list[float]]
    top_logprobs: list[list[TopToken | list[TopToken]]] | None = None
    tokens: list[TokenDetail | list[TokenDetail]] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[int, float] | None] | None = None


class StreamEvent(msgspec.Struct):
    """One token. The last event alone has finished true and a finish_reason; generated_text and details stay null."""

    token: TokenDetail
    generated_text: str | None = None
    finished: bool = False
    finish_reason: str | None = None
    details: None = None


class TokensAnswer(msgspec.Struct):
    ntokens: int


class TokenLoad(Load, frozen=True, array_like=False, kw_only=True):
    """current_load: used KV tokens / capacity, max_total_token_num. logical_max_load, dynamic_max_load: the predicted
    peak / capacity. The rest are the numbers behind them.
    """

    current_load: float
    logical_max_load: float
    dynamic_max_load: float
    max_total_token_num: int


class Status(msgspec.Struct):
    status: str


class Health(msgspec.Struct):
    message: str


class ModelName(msgspec.Struct):
    model_name: str


class ModelCard(msgspec.Struct):
    """In the words of both dialects: Anthropic's are those from created_at on."""

    id: str
    created: int
    max_model_len: int
    created_at: str
    display_name: str
    object: str = "model"
    owned_by: str = "lightllm"
    type: str = "model"


class ModelList(msgspec.Struct):
    """first_id, last_id, has_more: Anthropic's, of a page."""

    data: list[ModelCard]
    first_id: str
    last_id: str
    has_more: bool = False
    object: str = "list"


class ErrorDetail(msgspec.Struct):
    """param: the field at fault. code: the HTTP status."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorAnswer(msgspec.Struct):
    error: ErrorDetail
