"""The language model inside a checkpoint that also holds encoders of images or sound."""

from lightllm.common.basemodel.basemodel import BaseModel

_PREFIXES = {  # as stored by one version of transformers or another -> as in a checkpoint of text alone
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
OTHERS = ("vision_tower.", "vision_model.", "multi_modal_projector.", "embed_vision.", "audio_tower.", "embed_audio.")


class TextPart(BaseModel):
    """Takes the text's tensors and leaves the encoders, and their projections into the text's space, aside."""

    def tensor_name(self, stored: str) -> str:
        for prefix, plain in _PREFIXES.items():
            if stored.startswith(prefix):
                return plain + stored.removeprefix(prefix)
        return stored

    def ignores(self, name: str) -> bool:
        return super().ignores(name) or name.removeprefix("model.").startswith(OTHERS)
