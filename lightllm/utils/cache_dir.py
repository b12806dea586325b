"""Where this platform keeps what can be made again."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """Ours, by https://specifications.freedesktop.org/basedir-spec; it need not exist. Raises OSError if a user without
    a home has named none."""
    return _cache_home() / "lightllm"


def _cache_home() -> Path:
    named = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(named):
        return Path(named)
    try:
        return Path.home() / ".cache"
    except RuntimeError:
        raise OSError("this user has no home; XDG_CACHE_HOME may name a folder for the cache") from None


def temporary_caches(folder: str) -> dict[str, str]:
    """Environment of a process that compiles and tunes kernels: Triton's cache and ours are below `folder` where those
    in the home cannot be written, as in containers whose user has none."""
    found = {}
    named = "TRITON_CACHE_DIR" in os.environ or "TRITON_HOME" in os.environ
    if not named and not can_be_written(os.path.expanduser("~/.triton/cache")):
        found["TRITON_CACHE_DIR"] = os.path.join(folder, "triton")
    try:
        ours = str(cache_dir())
    except OSError:
        ours = ""
    if not can_be_written(ours):
        found["XDG_CACHE_HOME"] = os.path.join(folder, "cache")
    return found


def can_be_written(path: str) -> bool:
    """Whether a folder, whose path is absolute, can be or be made."""
    if not os.path.isabs(path):
        return False
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    return os.path.isdir(path) and os.access(path, os.W_OK | os.X_OK)
