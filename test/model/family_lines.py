"""Lines that a reader of one family has to read: its model files without blank lines.

Gemma 4 is three families: one model_type stands for three kinds of published models. That of E2B and E4B is longer than
a dense one's page, with inputs for each layer and caches that layers share, which no other family has.
"""

from pathlib import Path

MODELS = Path(__file__).parents[2] / "lightllm" / "models"
MOST = {"dense": 60, "moe": 90, "deepseek": 200, "gemma4_e": 90}


def kind(family: str, text: str) -> str:
    if family in MOST:
        return family
    return "moe" if "Mixture" in text else "dense"


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
