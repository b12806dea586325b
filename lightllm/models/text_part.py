"""The language model inside a checkpoint that also holds encoders of images or sound."""

from __future__ import annotations

_PREFIXES = {  # as stored by one version of transformers or another -> as in a checkpoint of text alone
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
OTHERS = ("vision_tower.", "vision_model.", "multi_modal_projector.", "embed_vision.", "audio_tower.", "embed_audio.")


def text_tensor_name(stored: str) -> str:
    for prefix, plain in _PREFIXES.items():
        if stored.startswith(prefix):
            return plain + stored.removeprefix(prefix)
    return stored


def is_other_modality(name: str) -> bool:
    """Whether a tensor belongs to another encoder or to its projection into the text's space."""
    return name.removeprefix("model.").startswith(OTHERS)
