"""Where this platform keeps what can be made again."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """Ours, by https://specifications.freedesktop.org/basedir-spec; it need not exist."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(home) if os.path.isabs(home) else Path.home() / ".cache") / "lightllm"
