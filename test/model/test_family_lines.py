"""A reader understands a family from one page: dense, mixture, DeepSeek with its latent attention."""

import pytest
from model.family_lines import MOST, family_lines

from lightllm.models.registry import MODEL_REGISTRY


@pytest.mark.parametrize("family", family_lines())
def test_a_family_is_a_page(family):
    kind, lines = family_lines()[family]
    assert lines <= MOST[kind]


def test_every_family_is_counted():
    assert {path.split(".")[2] for path in MODEL_REGISTRY.values()} == set(family_lines())
