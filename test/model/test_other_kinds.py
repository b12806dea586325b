"""What is no decoder of text is refused by name; the text part of a model with images is served."""

import json

import pytest
import torch
import transformers as T
from model.harness import SIZES, Driver, load, random_ids

from lightllm.common.basemodel.model_config import ConfigError, ModelConfig

IDS = random_ids(20)


@pytest.mark.parametrize(
    "name",
    ["LlamaForSequenceClassification", "InternLM2ForRewardModel", "Qwen2ForRewardModel", "Qwen2ForTokenClassification",
     "Qwen2ForProcessRewardModel", "GemmaForSequenceClassification", "LlamaForRewardModelWithGating", "LlamaForScore",
     "LlamaModelForScore", "LlamaRewardModel", "MistralForQuestionAnswering", "Gemma2ForRanking", "Qwen2ForEmbedding",
     "LlamaModel", "Gemma3TextModel", "LlamaBidirectionalModel", "Qwen2ForMultipleChoice", "LlamaForMaskedLM",
     "LlamaForCausalLMEagle", "InternLM2ForSequenceClassification", "BloomForTokenClassification"],
)  # fmt: skip
def test_reward_and_score_heads_are_refused_by_name(tmp_path, name):
    config = T.LlamaConfig(**SIZES).to_dict() | dict(architectures=[name])
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=name):
        ModelConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "name", ["LlamaForCausalLM", "ChatGLMModel", "ChatGLMForConditionalGeneration", "BloomModel", "AquilaModel",
             "GPTBigCodeLMHeadModel", "BaiChuanForCausalLM", "Gemma3ForConditionalGeneration"],
)  # fmt: skip
def test_what_has_a_head_is_not(tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps(T.LlamaConfig(**SIZES).to_dict() | dict(architectures=[name])))
    assert ModelConfig.from_pretrained(tmp_path).model_type == "llama"


@pytest.mark.parametrize(
    "config", [T.BertConfig, T.RobertaConfig, T.ModernBertConfig, T.DebertaV2Config, T.XLMRobertaConfig]
)
def test_encoders_are_refused_by_name(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config().to_dict()))
    with pytest.raises(ConfigError, match=f"'{config.model_type}' is an encoder"):
        ModelConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize("config", [T.T5Config, T.BartConfig])
def test_encoder_decoders_are_refused_by_name(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config().to_dict()))
    with pytest.raises(ConfigError, match=f"'{config.model_type}' is an encoder-decoder"):
        ModelConfig.from_pretrained(tmp_path)


VISION = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
VISION |= dict(image_size=28, patch_size=14)
LLAMA4 = dict(attention_chunk_size=8, num_local_experts=2, intermediate_size_mlp=80)


def gemma3() -> tuple[T.PreTrainedModel, T.PreTrainedModel]:
    text = T.Gemma3TextConfig(**SIZES, head_dim=16, sliding_window=5)
    model = T.Gemma3ForConditionalGeneration(T.Gemma3Config(text_config=text.to_dict(), vision_config=VISION))
    return model, model


def llama4() -> tuple[T.PreTrainedModel, T.PreTrainedModel]:
    """The whole cannot be asked: transformers 5.24 fails where there is no image."""
    text = T.Llama4TextConfig(**SIZES, **LLAMA4, head_dim=16)
    vision = VISION | dict(vision_output_dim=16, projector_input_dim=16, projector_output_dim=16)
    model = T.Llama4ForConditionalGeneration(T.Llama4Config(text_config=text.to_dict(), vision_config=vision))
    return model, model.language_model


def gemma4() -> tuple[T.PreTrainedModel, T.PreTrainedModel]:
    sizes = SIZES | dict(pad_token_id=0, head_dim=16, global_head_dim=32, hidden_size_per_layer_input=0)
    text = T.Gemma4TextConfig(**sizes, sliding_window=5)
    vision = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, head_dim=8)
    model = T.Gemma4ForConditionalGeneration(T.Gemma4Config(text_config=text.to_dict(), vision_config=vision))
    return model, model


@pytest.mark.parametrize("make", [gemma3, gemma4, llama4])
def test_the_text_part_of_a_model_with_images(tmp_path, make):
    torch.manual_seed(0)
    model, text = make()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2)
        model.eval().save_pretrained(tmp_path)
        want = text(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(Driver(load(tmp_path)).prefill(IDS)[1], want, rtol=0, atol=1e-4)


def test_the_config_of_gemma_3_4b_as_published(tmp_path):
    """It leaves out most sizes of the text part; the context counts the linear scaling already."""
    text = dict(hidden_size=2560, intermediate_size=10240, model_type="gemma3_text", num_hidden_layers=34)
    text |= dict(sliding_window=1024, rope_scaling=dict(factor=8.0, rope_type="linear"))
    values = dict(
        architectures=["Gemma3ForConditionalGeneration"], model_type="gemma3", eos_token_id=[1, 106],
        text_config=text, vision_config={}, torch_dtype="bfloat16",
    )  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = ModelConfig.from_pretrained(tmp_path)
    assert (config.vocab_size, config.num_attention_heads, config.num_key_value_heads) == (262208, 8, 4)
    assert (config.head_dim, config.max_position_embeddings, config.rope.theta) == (256, 131072, 1e6)
    assert config.windows[:6] == (1024,) * 5 + (None,) and config.tie_word_embeddings
    assert config.eos_token_ids == (1, 106) and config.dtype == "bfloat16"


def test_the_config_of_llama_4_as_published(tmp_path):
    """An empty list of layers without positions means every fourth one, and the tuning's switch is a number."""
    text = SIZES | dict(attention_chunk_size=8, num_local_experts=2, intermediate_size_mlp=80, head_dim=16)
    text |= dict(no_rope_layers=[], attn_temperature_tuning=4, num_hidden_layers=4, model_type="llama4_text")
    (tmp_path / "config.json").write_text(json.dumps(dict(model_type="llama4", text_config=text, vision_config={})))
    model = load(tmp_path, load_format="random")
    assert [layer.attention.spec.chunk for layer in model.layers] == [8, 8, 8, None]
