"""The dtype in which a checkpoint holds its weights. Torch-free."""

import json
import struct
from collections import Counter
from pathlib import Path

_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def stored_dtype(model_dir: Path) -> str:
    """The dtype of most bytes of the first *.safetensors file; float32 if there is none that can be read."""
    sizes: Counter[str] = Counter()
    for path in sorted(model_dir.glob("*.safetensors"))[:1]:
        for tensor in _header(path).values():
            if isinstance(tensor, dict) and tensor.get("dtype") in _NAMES:
                begin, end = tensor["data_offsets"]
                sizes[_NAMES[tensor["dtype"]]] += end - begin
    return sizes.most_common(1)[0][0] if sizes else "float32"


def _header(path: Path) -> dict:
    """The file's header: its length in 8 bytes, then JSON (https://huggingface.co/docs/safetensors)."""
    try:
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(min(length, path.stat().st_size)))
    except (OSError, ValueError, struct.error):
        return {}  # whoever loads the file reports its faults
    return header if isinstance(header, dict) else {}
