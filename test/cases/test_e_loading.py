"""Cases e of the bug bank, as far as they need a server: what starts, what is refused, and which tokens come out.

Every spelling of a config: test/model/test_model_config.py; every fault of weight files: test/model/test_checkpoint.py.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.checkpoints import (
    EOS,
    IM_END,
    NO_TOKEN,
    SCRIPTED,
    Payload,
    byte_tokenizer,
    edit_json,
    random_prompt,
    reference,
    reference_model,
    script_rows,
    token_id,
)
from support.server import RunningServer, assert_greedy, failed_start, ids_of, start_server, text_of

slow_too = pytest.mark.slow  # more of a kind that the quick run already has
POOL = ("--max_total_token_num", "8192")


def assert_as_reference(server: RunningServer, length: int = 60, n: int = 40) -> None:
    assert_greedy(server, reference(Path(str(server.model_dir)), random_prompt(length), n))


YARN = dict(rope_type="yarn", factor=16.0, original_max_position_embeddings=64, rope_theta=10000.0)


def test_case_55_rope_theta_on_top(checkpoints, tmp_path) -> None:
    """500000 is used, and not the 10000 that other tokens would come from."""
    path = checkpoints.copy("llama", tmp_path / "v4")
    edit_json(path / "config.json", rope_theta=500000.0, rope_scaling=None, rope_parameters=None)
    prompt = random_prompt(200)
    assert reference(path, prompt, 40).tokens != reference(checkpoints("llama"), prompt, 40).tokens
    with start_server(path, *POOL) as server:
        assert_as_reference(server, 200)


@slow_too
def test_case_58_yarn_past_the_original_length(checkpoints) -> None:
    model = checkpoints("llama", max_position_embeddings=1024, rope_parameters=YARN)
    with start_server(model, *POOL, "--chunked_prefill_size", "50") as server:
        for length in (20, 100, 700):
            assert_as_reference(server, length)


def test_case_60_yarn_context_is_not_multiplied_twice(checkpoints) -> None:
    scaled = YARN | dict(original_max_position_embeddings=256)
    model = checkpoints("llama", max_position_embeddings=4096, rope_parameters=scaled)
    with start_server(model, *POOL) as server:
        assert server.get("/v1/models").json()["data"][0]["max_model_len"] == 4096
        assert server.generate(random_prompt(4090), do_sample=False, ignore_eos=True)["count_output_tokens"] == 6
        assert "4096" in server.refusal("a", max_new_tokens=4096)["message"]
        assert_as_reference(server, 4086, 10)


@slow_too
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_case_61_tied_without_a_head(checkpoints, family: str) -> None:
    with start_server(checkpoints(family, tie_word_embeddings=True), *POOL, "--tp", "2") as server:
        assert_as_reference(server)


def test_case_64_a_pickle_runs_nothing(checkpoints, tmp_path) -> None:
    path, touched = checkpoints.copy("llama", tmp_path / "bin"), tmp_path / "touched"
    tensors = load_file(path / "model.safetensors")
    torch.save(tensors | {"model.norm.weight": Payload(touched)}, path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()
    assert "pytorch_model.bin" in failed_start(path)
    assert not touched.exists()


@pytest.mark.parametrize(
    ("tp", "heads", "kv_heads"),
    [
        (2, 4, 1),
        (2, 6, 3),
        pytest.param(2, 4, 2, marks=slow_too),
        pytest.param(4, 4, 2, marks=slow_too),
        pytest.param(4, 4, 1, marks=slow_too),
        pytest.param(3, 6, 6, marks=slow_too),
    ],
)
def test_case_66_kv_heads_against_tp(checkpoints, tp: int, heads: int, kv_heads: int) -> None:
    """Cut or replicated: the tokens of one rank."""
    model = checkpoints("llama", hidden_size=96, num_attention_heads=heads, num_key_value_heads=kv_heads)
    with start_server(model, *POOL, "--tp", str(tp)) as server:
        assert {f"lightllm-tp{rank}" for rank in range(tp)} <= set(server.pids())
        for length in (1, 60):
            assert_as_reference(server, length)


@pytest.mark.parametrize(("tp", "heads"), [(4, 6), pytest.param(3, 4, marks=slow_too)])
def test_case_66_heads_that_do_not_divide(checkpoints, tp: int, heads: int) -> None:
    model = checkpoints("llama", hidden_size=96, num_attention_heads=heads, num_key_value_heads=2)
    cause = failed_start(model, *POOL, "--tp", str(tp))
    assert str(heads) in cause and str(tp) in cause


@pytest.mark.parametrize("vocabulary", [323, pytest.param(321, marks=slow_too)])
def test_case_67_a_vocabulary_that_does_not_divide(checkpoints, vocabulary: int) -> None:
    """The last id is generated and is a prompt; what pads the shards is never drawn."""
    last = vocabulary - 1
    rows = script_rows() | {token_id("Z"): last, last: token_id("Y")}
    with start_server(checkpoints("script", rows=rows, vocab_size=vocabulary), *POOL, "--tp", "2") as server:
        assert server.ids("Z", do_sample=False) == [last, token_id("Y"), EOS]
        assert server.ids([last], do_sample=False) == [token_id("Y"), EOS]
        assert server.text("A", do_sample=False) == SCRIPTED
        drawn = server.generate(
            "t", temperature=1e6, seed=5, n=8, max_new_tokens=100, ignore_eos=True, return_details=True
        )
        ids = {token["id"] for tokens in drawn["tokens"] for token in tokens}
        assert len(ids) > 200 and max(ids) < vocabulary
        assert "vocabulary" in server.refusal([vocabulary])["message"]
        tops = server.generate("t", max_new_tokens=1, ignore_eos=True, logprobs=20)["top_logprobs"][0]
        assert len(tops) == 20 and all(top["id"] < vocabulary for top in tops)


def test_case_67_sampling_is_as_on_one_rank(checkpoints) -> None:
    model = checkpoints("llama", vocab_size=323)
    asked = dict(temperature=1.0, seed=9, max_new_tokens=30, n=4, ignore_eos=True)
    texts = []
    for tp in ("1", "2"):
        with start_server(model, *POOL, "--tp", tp) as server:
            assert_as_reference(server)
            texts.append(server.generate("one seed", **asked)["generated_text"])
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    "switch",
    [
        dict(use_sliding_window=False, sliding_window=8),
        dict(use_sliding_window=True, sliding_window=8, max_window_layers=2, num_hidden_layers=4),
        pytest.param(dict(use_sliding_window=True, sliding_window=8, max_window_layers=3), marks=slow_too),
    ],
)
def test_case_71_qwen2_sliding_window_switch(checkpoints, switch: dict[str, Any]) -> None:
    with start_server(checkpoints("qwen2", **switch), *POOL, "--chunked_prefill_size", "16") as server:
        assert_as_reference(server)


@pytest.mark.parametrize(
    ("in_config", "in_generation_config", "ends_at_im_end"),
    [
        (256, [256, 258], True),
        (None, None, False),
        pytest.param([256, 258], 256, True, marks=slow_too),
        pytest.param(258, None, True, marks=slow_too),
        pytest.param(256, 257, False, marks=slow_too),
    ],
)
def test_case_72_eos_from_all_files(checkpoints, tmp_path, in_config, in_generation_config, ends_at_im_end) -> None:
    """The union of config, generation_config and tokenizer (256): any of them ends with stop."""
    path = checkpoints.copy("script", tmp_path / "eos")
    edit_json(path / "config.json", eos_token_id=in_config)
    edit_json(path / "generation_config.json", eos_token_id=in_generation_config)
    if in_generation_config is None:
        (path / "generation_config.json").unlink()
    with start_server(path, *POOL) as server:
        answer = server.generate("g", do_sample=False, max_new_tokens=20)
        assert (answer["generated_text"], answer["finish_reason"]) == (["hi"], "stop")
        assert answer["count_output_tokens"] == (3 if ends_at_im_end else 4)
        assert server.generate("A", do_sample=False, max_new_tokens=40)["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("text", "word"),
    [('{"eos_token_id":', "not readable"), ("[]", "no JSON object"), ('{"temperature": -3}', "temperature")],
)
def test_a_generation_config_that_cannot_be_followed_is_refused(checkpoints, tmp_path, text: str, word: str) -> None:
    path = checkpoints.copy("script", tmp_path / "odd")
    (path / "generation_config.json").write_text(text)
    said = failed_start(path, *POOL)
    assert "generation_config.json" in said and word in said


def test_case_72_eos_by_flag(checkpoints) -> None:
    with start_server(checkpoints("script"), *POOL, "--eos_id", str(token_id("z"))) as server:
        answer = server.generate("A", do_sample=False)
        assert (answer["count_output_tokens"], answer["finish_reason"]) == (8, "stop")
        assert server.text("A", do_sample=False, ignore_eos=True, max_new_tokens=12) == SCRIPTED


def test_case_75_ids_that_the_tokenizer_lacks(script: RunningServer) -> None:
    answer = script.generate("C", do_sample=False, return_details=True, logprobs=5)
    assert answer["generated_text"] == ["D"]
    assert [token["id"] for token in answer["tokens"]] == [NO_TOKEN, token_id("D"), EOS]
    events = script.stream("C", do_sample=False, logprobs=5)
    assert (text_of(events), ids_of(events)) == ("D", [NO_TOKEN, token_id("D"), EOS])
    assert script.text([NO_TOKEN], do_sample=False, prompt_logprobs=5) == "D"
    assert script.generate([NO_TOKEN, NO_TOKEN + 1], do_sample=False)["prompt_tokens"] == 2


def test_case_75_drawn_at_random(script: RunningServer) -> None:
    """Half of what is drawn the tokenizer does not know."""
    asked = dict(allowed_token_ids=[*range(190, 256), *range(259, 320)], temperature=1.0, max_new_tokens=60)
    for seed in range(5):
        events = script.stream("t", seed=seed, logprobs=20, **asked)
        ids = ids_of(events)
        assert sum(token >= 259 for token in ids) > 5
        assert script.text("t", seed=seed, **asked) == text_of(events)
        decoded = byte_tokenizer().decode([token for token in ids if token < 259])
        assert text_of(events).rstrip("\ufffd") == decoded.rstrip("\ufffd")


def test_case_77_a_quantized_checkpoint_is_refused(checkpoints, tmp_path) -> None:
    path = checkpoints.copy("script", tmp_path / "quantized")
    edit_json(path / "config.json", quantization_config=dict(quant_method="fp8", weight_block_size=[128, 128]))
    assert "fp8" in failed_start(path)  # no tensor has scales


def test_a_directory_is_only_read(checkpoints, tmp_path) -> None:
    path = checkpoints.copy("script", tmp_path / "read")
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    shutil.copystat(path, path)
    with start_server(path, *POOL) as server:
        assert server.text([65, IM_END, 32], do_sample=False) == SCRIPTED
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
    assert reference_model(path).config.vocab_size == 320
