"""Bodies of the dialects whose clients send more than we know: null is not given, unknown fields are named."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import msgspec
from starlette.requests import Request

from lightllm.server.api_connection import read_object
from lightllm.server.core.sampling_params import InvalidParameter
from lightllm.server.core.server_args import ServerArgs

IGNORED_HEADER = "x-ignored-fields"
Body = TypeVar("Body", bound=msgspec.Struct)


async def read_as(
    request: Request, kind: type[Body], args: ServerArgs, token_limit: int, idle: Iterable[str] = ()
) -> tuple[Body, dict[str, str]]:
    """The body as `kind`, and the headers of its answer, which name the fields that were ignored.

    idle: fields that are known and change nothing. With --strict_fields an unknown field raises InvalidParameter.
    """
    given = await read_object(request, args.max_body_size, token_limit)
    fields = {name: value for name, value in given.items() if value is not None}
    unknown = sorted(fields.keys() - set(kind.__struct_fields__) - set(idle))
    if unknown and args.strict_fields:
        raise InvalidParameter(unknown[0], "unknown")
    try:
        body = msgspec.convert(fields, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise _with_place(error) from None
    return body, {IGNORED_HEADER: _ascii(", ".join(unknown))} if unknown else {}


def _with_place(error: msgspec.ValidationError) -> InvalidParameter:
    """Names the field, and where in it the fault lies if it is not the field itself."""
    problem = InvalidParameter.of(error)
    place = re.search(r" - at `\$\.(\w+)([.\[].*)`", str(error))
    if place is None:
        return problem
    return InvalidParameter(place[1], f"{problem.reason} at {place[1]}{place[2].replace('[...]', '[]')}")


def _ascii(text: str) -> str:
    return text[:1000].encode("ascii", "backslashreplace").decode().replace("\r", " ").replace("\n", " ")


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
        raise InvalidParameter(name, reason) from None
