"""Sampling parameters that a checkpoint recommends, for dialects whose users expect the model's own defaults."""

import json
from pathlib import Path
from typing import Any

NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
USUAL = {"temperature": 1.0}


def sampling_defaults(model_dir: str) -> dict[str, Any]:
    """From generation_config.json, which may be missing; a temperature of 1 where it says nothing."""
    try:
        config = json.loads((Path(model_dir) / "generation_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return dict(USUAL)
    found = {name: config[name] for name in NAMES if isinstance(config.get(name), (int, float))}
    return USUAL | found
