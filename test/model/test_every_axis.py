"""The mutation run: every axis of every family is broken on purpose, and each break moves the golden test's logits."""

import pytest
from model.breaks import breaks
from model.harness import SIZES, Driver, load, make_reference, random_ids, reference_logits
from model.remote_code import BUILDERS
from model.test_golden import CONFIGS

TOLERANCE = 1e-4  # of the golden test
VISIBLE = 10 * TOLERANCE


def cases(name, path):
    if name in BUILDERS:
        return BUILDERS[name](path)
    model = make_reference(CONFIGS[name])
    model.save_pretrained(path)
    return lambda ids: reference_logits(model, ids)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CONFIGS, *BUILDERS])
def test_every_break_is_caught(tmp_path, name):
    reference = cases(name, tmp_path)
    ids = random_ids(45, seed=45, vocab=CONFIGS[name].vocab_size if name in CONFIGS else SIZES["vocab_size"])
    want = reference(ids)
    model = load(tmp_path)
    assert (Driver(model).prefill(ids)[1] - want).abs().max() < TOLERANCE
    whole = dict(vars(model))
    unseen, seen = [], 0
    for label, apply in breaks(model).items():
        vars(model).update(whole)
        apply(model)
        moved = (Driver(model).prefill(ids)[1] - want).abs().max()
        seen += 1
        if not moved > VISIBLE:
            unseen.append(f"{label}: {moved:.1e}")
    assert seen >= 8
    assert not unseen, f"{name}: {len(unseen)} of {seen} breaks are invisible: {unseen}"
    print(f"{name}: {seen} breaks caught")
