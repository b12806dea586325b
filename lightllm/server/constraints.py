"""Constraints on the form of an output: what a request asks for, as the form that the worker enforces."""

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from lightllm.common.grammar.backend import checked
from lightllm.common.grammar.forms import Form, GrammarRefused, Json, Lark, Regex, choice_form, json_form
from lightllm.server.core.sampling_params import CONSTRAINTS, InvalidParameter, SamplingParams

FORMS: dict[str, Callable[[Any], Json | Regex | Lark]] = {
    "guided_json": json_form,
    "guided_regex": Regex,
    "guided_grammar": lambda grammar: Json({}) if grammar == "json" else Lark(grammar),
    "guided_choice": choice_form,
}
assert FORMS.keys() == set(CONSTRAINTS)


class Constraint(NamedTuple):
    """field: of the request that asks for the form."""

    field: str
    form: Form


def constraint_of(sampling: SamplingParams) -> Constraint | None:
    """What the parameters ask for; None if they leave the form open. Raises InvalidParameter."""
    names = [name for name in CONSTRAINTS if getattr(sampling, name) is not None]
    if not names:
        return None
    if len(names) > 1:
        raise InvalidParameter(names[1], f"and {names[0]} exclude each other")
    try:
        return Constraint(names[0], FORMS[names[0]](getattr(sampling, names[0])))
    except GrammarRefused as error:
        raise InvalidParameter(names[0], str(error)) from None


def with_grammar(resolved: SamplingParams, constraint: Constraint | None, backend: str) -> SamplingParams:
    """A copy in which `guided_grammar` alone constrains: the form, checked, as it travels to the worker.

    May take a second the first time. Raises InvalidParameter naming the field.
    """
    if constraint is None:
        return resolved
    try:
        grammar = checked(constraint.form, backend)
    except GrammarRefused as error:
        raise InvalidParameter(constraint.field, str(error)) from None
    return msgspec.structs.replace(resolved, **dict.fromkeys(CONSTRAINTS, None) | {"guided_grammar": grammar})
