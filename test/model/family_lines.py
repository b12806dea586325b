"""Lines that a reader of one family has to read: its model files without blank lines.

Gemma 4 is more than a page: one model_type stands for three kinds of models (heads of two sizes and shared caches;
inputs of layers; experts beside a dense block with norms of their own), and no other family has any of it.
"""

from __future__ import annotations

from pathlib import Path

MODELS = Path(__file__).parents[2] / "lightllm" / "models"
MOST = {"dense": 60, "moe": 90, "deepseek": 200, "gemma4": 200}


def kind(family: str, text: str) -> str:
    if family in MOST:
        return family
    return "moe" if "ExpertSlot" in text else "dense"


def family_lines() -> dict[str, tuple[str, int]]:
    """family -> (kind, lines)."""
    found = {}
    for folder in sorted(path for path in MODELS.iterdir() if (path / "model.py").is_file()):
        text = "\n".join(path.read_text() for path in sorted(folder.glob("*.py")))
        found[folder.name] = kind(folder.name, text), sum(bool(line.strip()) for line in text.splitlines())
    return found


if __name__ == "__main__":
    for family, (sort, lines) in family_lines().items():
        print(f"{family:14} {sort:9} {lines:4} of {MOST[sort]}")
