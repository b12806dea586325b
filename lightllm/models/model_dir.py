"""What `--model_dir` means: a Hugging Face directory, a GGUF file, or nothing for the embedded model."""

import os
from pathlib import Path

from lightllm.models.embedded import EMBEDDED_MODEL, converted_gguf_dir, embedded_model_dir
from lightllm.utils.log_utils import init_logger

logger = init_logger(__name__)


def resolve_model_dir(model_dir: str | None) -> Path:
    """The Hugging Face directory to serve; converts a GGUF file on first use.

    Raises ValueError, or ModelNotFound for the embedded model, if there is none.
    """
    if model_dir is None:
        logger.info("no --model_dir given: serving the embedded model %s", EMBEDDED_MODEL)
        return embedded_model_dir()
    path = Path(model_dir)
    if path.suffix == ".gguf" and path.is_file():
        return converted_gguf_dir(path)
    if not (path / "config.json").is_file():
        what = "has no config.json" if path.is_dir() else "does not exist"
        raise ValueError(f"--model_dir {model_dir} {what}")
    return Path(os.path.abspath(path))


def usual_model_name(model_dir: str | None) -> str:
    """What clients call the model, unless they are told another name: the last part of the path as it was given."""
    if model_dir is None:
        return EMBEDDED_MODEL
    path = Path(os.path.abspath(model_dir))
    return path.stem if path.suffix == ".gguf" else path.name
