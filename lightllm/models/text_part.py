"""The language model inside a checkpoint that also holds an image encoder."""

from __future__ import annotations

_PREFIXES = {  # as stored by one version of transformers or another -> as in a checkpoint of text alone
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}


def text_tensor_name(stored: str) -> str:
    for prefix, plain in _PREFIXES.items():
        if stored.startswith(prefix):
            return plain + stored.removeprefix(prefix)
    return stored


def is_image_tensor(name: str) -> bool:
    """Whether a tensor belongs to the image encoder or to its projection into the text's space."""
    return name.removeprefix("model.").startswith(("vision_tower.", "vision_model.", "multi_modal_projector."))
