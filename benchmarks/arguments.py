"""What scripts check of their arguments before they measure anything, minutes of which would be lost."""

import argparse
import math
import os
from pathlib import Path

from lightllm.server.bench_serving import file_can_be_written


def count(text: str) -> int:
    """At least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number


def rate(text: str) -> float:
    """Requests a second, 0 for all at once."""
    number = float(text)
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"must be 0 or more, not {text}")
    return number


def results_file(text: str) -> Path:
    """A file that can be written."""
    path = Path(text)
    if not file_can_be_written(path):
        raise argparse.ArgumentTypeError(f"{text} cannot be written")
    return path


def results_folder(text: str) -> Path:
    """A folder in which files can be written."""
    path = Path(text)
    if not (path.is_dir() and os.access(path, os.W_OK)):
        raise argparse.ArgumentTypeError(f"{path} cannot be written")
    return path


def need_gpu(parser: argparse.ArgumentParser) -> None:
    """Ends the process with a message where there is none."""
    import torch

    if not torch.cuda.is_available():
        parser.error("this is measured on a GPU, and torch finds none here")
