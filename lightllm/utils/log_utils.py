"""Logging: one human line per record on stderr."""

import logging
import sys

ROOT = "lightllm"


def init_logger(name: str) -> logging.Logger:
    """The logger of a module, below `lightllm`; the first call attaches the stderr handler to `lightllm`."""
    root = logging.getLogger(ROOT)
    if not root.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(
            logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%Y-%m-%d %H:%M:%S")
        )
        root.addHandler(handler)
        root.setLevel(logging.INFO)
        root.propagate = False
    return logging.getLogger(name if name == ROOT or name.startswith(ROOT + ".") else f"{ROOT}.{name}")


def set_log_level(level: str) -> None:
    """Sets the level ("debug", "info", "warning", "error") of every logger of this process."""
    logging.getLogger(ROOT).setLevel(level.upper())
