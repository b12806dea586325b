"""docs/AddNewModel.md adds a family from nothing: its code blocks are walked here."""

import re
import sys
import types
from pathlib import Path

import pytest
import transformers as T
from model.harness import SIZES, load, make_reference

from lightllm.common.basemodel.config_words import DEFAULTS
from lightllm.models.registry import MODEL_REGISTRY

PAGE = Path(__file__).parents[2] / "docs" / "AddNewModel.md"
MODULE = "lightllm.models.granite.model"


@pytest.fixture
def granite(monkeypatch):
    """The blocks of the page in their order: words, (an example of slots), the class, the registry, the golden line."""
    words, _, family, registry, golden = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert "granite" not in DEFAULTS and "granite" not in MODEL_REGISTRY
    monkeypatch.setitem(DEFAULTS, "granite", {})
    monkeypatch.setitem(MODEL_REGISTRY, "granite", "")
    exec(words, {"DEFAULTS": DEFAULTS})
    module = types.ModuleType(MODULE)
    exec(compile(family, str(PAGE), "exec"), vars(module))
    monkeypatch.setitem(sys.modules, MODULE, module)
    exec(registry, {"MODEL_REGISTRY": MODEL_REGISTRY})
    configs: dict[str, T.PretrainedConfig] = {}
    exec(golden, {"CONFIGS": configs, "T": T, "SIZES": SIZES})
    return configs["granite"]


def test_the_walk_ends_at_transformers_logits(granite, tmp_path):
    from model import test_golden

    test_golden.CONFIGS["granite"] = granite
    try:
        golden = test_golden.Golden("granite", tmp_path)
    finally:
        del test_golden.CONFIGS["granite"]
    for chunk in (10**6, 1):
        test_golden.test_prefill_logits(golden, chunk)
    test_golden.test_batch_of_all_prompts_decodes_as_transformers_does(golden, 7)
    test_golden.test_prefix_hit(golden, 16)


@pytest.mark.parametrize("hook", ["residual", "attention_spec", "pre_layer", "post_layer"])
def test_each_hook_of_the_walk_matters(granite, tmp_path, hook):
    model = make_reference(granite)
    model.save_pretrained(tmp_path)
    found = load(tmp_path)
    cls = type(found)
    assert hook in vars(cls), "the page states it"
    delattr(cls, hook)
    without = load(tmp_path)
    from model.harness import Driver, random_ids

    ids = random_ids(20)
    assert (Driver(without).prefill(ids)[1] - Driver(found).prefill(ids)[1]).abs().max() > 1e-2
