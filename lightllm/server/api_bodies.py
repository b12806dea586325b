"""Bodies of the dialects whose clients send more than we know: null is not given, unknown fields are named."""

import re
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, ClassVar, TypeVar

import msgspec
from starlette.requests import Request

from lightllm.server.api_connection import read_object
from lightllm.server.core.sampling_params import InvalidParameter, SamplingParams
from lightllm.server.core.server_args import ServerArgs

IGNORED_HEADER = "x-ignored-fields"
MAX_TOLD = 1000  # characters of their names


class DialectBody(msgspec.Struct):
    """idle: fields that are known and change nothing. refused: those that are known, cannot be served and must not be
    ignored, and why. words: what we call a field -> what the dialect calls it, where it has no such field."""

    idle: ClassVar[tuple[str, ...]] = ()
    refused: ClassVar[dict[str, str]] = {}
    words: ClassVar[dict[str, str]] = {}

    def names(self) -> dict[str, str]:
        """What we call a field -> what the dialect calls it."""
        return words_of(type(self)) | self.words

    @classmethod
    def servable(cls, fields: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """A body's fields without what may be ignored although it is known, and the places of that."""
        return fields, []


Body = TypeVar("Body", bound=DialectBody)


async def read_as(
    request: Request, kind: type[Body], args: ServerArgs, token_limit: int
) -> tuple[Body, dict[str, str]]:
    """The body as `kind`, and the headers of its answer, which name the fields that were ignored.

    Fields that are refused raise InvalidParameter unless they ask for nothing. Unknown ones of nested objects are named
    by their place; with --strict_fields they raise InvalidParameter too.
    """
    fields = without_nulls(await read_object(request, args.max_body_size, token_limit))
    for name, reason in kind.refused.items():
        if fields.pop(name, None):
            raise InvalidParameter(name, reason)
    fields, passed_over = kind.servable(fields)
    unknown = sorted({*passed_over, *_unknown({k: v for k, v in fields.items() if k not in kind.idle}, (kind,), "")})
    if unknown and args.strict_fields:
        raise InvalidParameter(unknown[0], "unknown")
    try:
        body = msgspec.convert(fields, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise _with_place(error) from None
    told = ", ".join(unknown)[:MAX_TOLD].encode("unicode_escape").decode()  # as a header may hold it
    return body, {IGNORED_HEADER: told} if unknown else {}


def without_nulls(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _unknown(value: Any, kinds: tuple[type[msgspec.Struct], ...], place: str) -> Iterator[str]:
    """Places of the fields in a JSON value that none of the structs `kinds` has; null is not given."""
    if not kinds:  # a prompt may be a long list
        return
    if isinstance(value, list):
        for item in value:
            yield from _unknown(item, kinds, place + "[]")
    elif isinstance(value, dict):
        known = _fields_of(kinds)
        for name, item in value.items():
            inner = f"{place}.{name}" if place else name
            if name in known:
                yield from _unknown(item, known[name], inner)
            elif item is not None:
                yield inner


@cache
def _fields_of(kinds: tuple[type[msgspec.Struct], ...]) -> dict[str, tuple[type[msgspec.Struct], ...]]:
    """Names of the structs' fields, and the structs that stand in each."""
    known: dict[str, tuple[type[msgspec.Struct], ...]] = {}
    for kind in kinds:
        if tag := kind.__struct_config__.tag_field:
            known[tag] = ()
        for field in msgspec.structs.fields(kind):
            known[field.encode_name] = known.get(field.encode_name, ()) + tuple(_structs_in(field.type))
    return known


def _structs_in(kind: Any) -> Iterator[type[msgspec.Struct]]:
    """Of `list[A | B] | None` A and B."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        yield kind
    elif typing.get_origin(kind) is not dict:
        for part in typing.get_args(kind):
            yield from _structs_in(part)


def _with_place(error: msgspec.ValidationError) -> InvalidParameter:
    """Names the field, and where in it the fault lies if it is not the field itself."""
    problem = InvalidParameter.of(error)
    place = re.search(r" - at `\$\.(\w+)([.\[].*)`", str(error))
    if place is None:
        return problem
    return InvalidParameter(place[1], f"{problem.reason} at {place[1]}{place[2].replace('[...]', '[]')}")


def sampling_of(body: msgspec.Struct, defaults: dict[str, Any] | None = None, **more: Any) -> SamplingParams:
    """What a body asks for by the fields that bear our names in Python. None is not given.

    defaults: of the model. more: what the dialect says in other ways.
    """
    same = {name: getattr(body, name, None) for name in SamplingParams.__struct_fields__}
    given = {name: value for fields in (same, more) for name, value in fields.items() if value is not None}
    return SamplingParams(**(defaults or {}) | given)


def check_stream_options(body: Any) -> None:
    """Raises InvalidParameter if a body has them and asks for no stream."""
    if body.stream_options is not None and not body.stream:
        raise InvalidParameter("stream_options", "is only allowed when stream is true")


@cache
def words_of(kind: type[msgspec.Struct]) -> dict[str, str]:
    """What we call a field -> what the dialect calls it, of those that `sampling_of` takes from a body."""
    fields = msgspec.structs.fields(kind)
    return {field.name: field.encode_name for field in fields if field.name in SamplingParams.__struct_fields__}


@contextmanager
def in_words_of(names: dict[str, str]) -> Iterator[None]:
    """Errors name a field as the dialect does. names: what we call it -> what the dialect calls it."""
    try:
        yield
    except InvalidParameter as error:
        name = names.get(error.field, error.field)
        reason = error.reason
        for ours, theirs in names.items():
            reason = re.sub(rf"\b{ours}\b", theirs, reason)
        raise InvalidParameter(name, reason, error.code) from None
