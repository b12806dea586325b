"""Cases a of the bug bank: streaming and detokenization. What a stream shows is what /generate returns."""

from typing import Any

import pytest
from support.checkpoints import IM_END, SCRIPTED, byte_tokenizer, spm_tokenizer, token_ids
from support.server import RunningServer, ids_of, text_of

GREEDY = dict(do_sample=False, max_new_tokens=40)
SCRIPTED_IDS = [*token_ids(SCRIPTED), 256]


def both_ways(server: RunningServer, inputs: Any, **parameters: Any) -> tuple[str, list[int], str]:
    """Text, ids and finish reason, which must be the same by /generate, /generate_stream and /."""
    events = server.stream(inputs, **parameters)
    whole = server.generate(inputs, return_details=True, **parameters)
    root = server.post("/", {"inputs": inputs, "parameters": parameters, "stream": False}).json()
    text, ids, reason = text_of(events), ids_of(events), events[-1]["finish_reason"]
    assert whole["generated_text"] == root["generated_text"] == [text]
    assert [token["id"] for token in whole["tokens"]] == ids
    assert whole["count_output_tokens"] == root["count_output_tokens"] == len(ids)
    assert whole["finish_reason"] == root["finish_reason"] == reason
    return text, ids, reason


def test_case_01_character_split_over_tokens(script: RunningServer) -> None:
    assert both_ways(script, "A", **GREEDY) == (SCRIPTED, SCRIPTED_IDS, "stop")
    texts = [event["token"]["text"] for event in script.stream("A", **GREEDY)]
    assert texts == ["", "", "", "\U0001fae0", " ", "x", "y", "z", "", "", "龜", "W", ""]


def test_case_01_by_the_root_path(script: RunningServer) -> None:
    with script.open_stream({"inputs": "A", "parameters": GREEDY, "stream": True}, "/") as stream:
        assert text_of(list(stream)) == SCRIPTED


def test_case_01_characters_of_two_and_three_tokens(script: RunningServer) -> None:
    text, _, reason = both_ways(script, "B", **GREEDY)
    assert (text, reason) == ("é中b", "stop")
    assert not any("\ufffd" in event["token"]["text"] for event in script.stream("B", **GREEDY))


def test_case_01_a_prompt_that_ends_inside_a_character(script: RunningServer) -> None:
    """How the rest of that character shows is open; what follows is exact."""
    prompt = [32, *SCRIPTED_IDS[:2]]
    text, ids, _ = both_ways(script, prompt, **GREEDY)
    assert ids == SCRIPTED_IDS[2:]
    assert text.endswith(SCRIPTED[1:])


@pytest.mark.parametrize("seed", range(6))
def test_case_01_bytes_that_make_no_text(rand: RunningServer, seed: int) -> None:
    """Random bytes at a high temperature: whatever the text is, both ways and the tokenizer agree about it."""
    asked = dict(temperature=1.5, seed=seed, max_new_tokens=40, allowed_token_ids=list(range(256)))
    events = rand.stream("bytes", **asked)
    text, ids = text_of(events), ids_of(events)
    assert rand.text("bytes", **asked) == text
    assert text.rstrip("\ufffd") == byte_tokenizer().decode(ids).rstrip("\ufffd")


@pytest.mark.parametrize("kept", range(1, 14))
def test_case_02_cut_anywhere(script: RunningServer, kept: int) -> None:
    text, ids, reason = both_ways(script, "A", do_sample=False, max_new_tokens=kept)
    assert ids == SCRIPTED_IDS[:kept]
    assert reason == ("stop" if kept == 13 else "length")
    decoded = byte_tokenizer().decode(ids, skip_special_tokens=True)
    assert text.rstrip("\ufffd") == decoded.rstrip("\ufffd")
    assert text.count("\ufffd") <= 1


@pytest.mark.parametrize("stop_at", [1, 2, 3, 9, 10])
def test_case_02_a_stop_id_inside_a_character(script: RunningServer, stop_at: int) -> None:
    text, ids, reason = both_ways(script, "A", stop_token_ids=[SCRIPTED_IDS[stop_at]], **GREEDY)
    assert (ids, reason) == (SCRIPTED_IDS[: stop_at + 1], "stop")
    assert SCRIPTED.startswith(text.rstrip("\ufffd"))


@pytest.mark.parametrize("kept", range(1, 10))
def test_case_04_leading_space_of_the_first_token(serve, kept: int) -> None:
    """The prompt precedes the output, so its first space stays, at every cut."""
    spm, tokenizer = serve("spm"), spm_tokenizer()
    prompt = tokenizer.encode("A")
    for inputs in ("A", prompt):
        text, ids, reason = both_ways(spm, inputs, do_sample=False, max_new_tokens=kept)
        visible = [token for token in ids if token != 256]
        decoded = tokenizer.decode(prompt + visible)[len(tokenizer.decode(prompt)) :]
        assert text.rstrip("\ufffd") == decoded.rstrip("\ufffd")
        assert reason == ("stop" if kept == 9 else "length")
    assert kept < 3 or text.startswith(" Hello world!")
    assert kept < 9 or text == " Hello world!\U0001fae0 x"


@pytest.mark.parametrize("stop", ["o w", "ld!", " world", "!\U0001fae0"])
def test_case_06_stop_string_inside_tokens(serve, stop: str) -> None:
    spm = serve("spm")
    text, _, reason = both_ways(spm, "A", stop_sequences=[stop], **GREEDY)
    assert (text, reason) == (" Hello world!\U0001fae0 x".partition(stop)[0], "stop")


@pytest.mark.parametrize(
    ("stops", "text", "tokens"),
    [
        ([" xy"], "\U0001fae0", 7),
        ([" "], "\U0001fae0", 5),
        (" xyz", "\U0001fae0", 8),
        (["\U0001fae0"], "", 4),
        (["龜"], "\U0001fae0 xyz", 11),
        (["z龜W"], "\U0001fae0 xy", 12),
        (["W"], "\U0001fae0 xyz龜", 12),
        (["xyz", "y"], "\U0001fae0 x", 7),  # the earliest token wins
        (["y", "xyz"], "\U0001fae0 x", 7),
        (["z", " xyQ", "zz"], "\U0001fae0 xy", 8),
        ([[87, 88]], "\U0001fae0 ", 7),
        ([[172, 253]], "", 2),
        (["zzz", [88, 89]], "\U0001fae0 x", 8),
    ],
)
def test_case_06_stop_string_over_several_tokens(script: RunningServer, stops: Any, text: str, tokens: int) -> None:
    got, ids, reason = both_ways(script, "A", stop_sequences=stops, **GREEDY)
    assert (got.rstrip("\ufffd"), ids, reason) == (text, SCRIPTED_IDS[:tokens], "stop")


def test_case_06_nothing_of_the_stop_string_is_streamed(script: RunningServer) -> None:
    with script.start_stream("A", stop_sequences=[" xy"], **GREEDY) as stream:
        for event in stream:
            assert event["token"]["text"] in ("", "\U0001fae0")


def test_case_06_stop_text_on_request(script: RunningServer) -> None:
    asked = dict(stop_sequences=[" xy"], include_stop_str_in_output=True)
    text, ids, reason = both_ways(script, "A", **asked, **GREEDY)
    assert (text, ids, reason) == ("\U0001fae0 xy", SCRIPTED_IDS[:7], "stop")


def test_case_06_a_stop_string_does_not_reach_into_the_prompt(script: RunningServer) -> None:
    text, _, _ = both_ways(script, "A", stop_sequences=["A\U0001fae0"], **GREEDY)
    assert text == SCRIPTED


def test_case_06_no_stop_before_min_new_tokens(script: RunningServer) -> None:
    text, ids, _ = both_ways(script, "G", do_sample=False, stop_sequences=["G"], min_new_tokens=5, max_new_tokens=9)
    assert (text, len(ids)) == ("GGGG", 5)
    text, ids, _ = both_ways(script, "G", do_sample=False, stop_sequences=[token_ids("GG")], min_new_tokens=5)
    assert (text, len(ids)) == ("GGG", 5)


@pytest.mark.parametrize("stops", [["xyQ"], ["W!!"], ["xyQ", "W!!", " xyz龜X"], ["\U0001fae0\U0001fae0"]])
def test_case_08_held_back_text_comes_out(script: RunningServer, stops: list[str]) -> None:
    assert both_ways(script, "A", stop_sequences=stops, **GREEDY) == (SCRIPTED, SCRIPTED_IDS, "stop")
    for kept in range(1, 13):
        text, _, reason = both_ways(script, "A", stop_sequences=stops, do_sample=False, max_new_tokens=kept)
        assert (text, reason) == (script.text("A", do_sample=False, max_new_tokens=kept), "length")


def test_case_08_only_what_may_be_a_stop_is_held(script: RunningServer) -> None:
    texts = [event["token"]["text"] for event in script.stream("A", stop_sequences=["xyQ"], **GREEDY)]
    assert texts[3:5] == ["\U0001fae0", " "] and texts[7] == "xyz" and texts[11] == "W"


@pytest.mark.parametrize("stops", ["", [""], ["", "zzz"], [[]], [[], "zzz"]])
def test_case_09_empty_stop_string(script: RunningServer, stops: Any) -> None:
    assert "stop_sequences" in script.refusal("A", stop_sequences=stops, **GREEDY)["message"]


def test_case_10_a_special_stop_token_eats_no_text(script: RunningServer) -> None:
    text, ids, reason = both_ways(script, "g", stop_token_ids=[IM_END], **GREEDY)
    assert (text, ids[-1], reason) == ("hi", IM_END, "stop")
    for sequences in (["<|im_end|>"], [[IM_END]]):
        assert both_ways(script, "g", stop_sequences=sequences, **GREEDY)[0] == "hi"


def test_case_10_an_ordinary_stop_token_keeps_what_came_before(script: RunningServer) -> None:
    text, _, reason = both_ways(script, "A", stop_token_ids=[token_ids("z")[0]], **GREEDY)
    assert text.removesuffix("z") == "\U0001fae0 xy" and reason == "stop"


@pytest.mark.parametrize("prompt", ["A", "B", "g", "no row for that", "<|im_start|>user\nA"])
def test_case_12_no_end_of_sequence_text(script: RunningServer, prompt: str) -> None:
    text, ids, reason = both_ways(script, prompt, **GREEDY)
    assert (ids[-1], reason) == (256, "stop")
    assert "<|" not in text


def test_case_12_special_tokens_on_request(script: RunningServer) -> None:
    text, _, _ = both_ways(script, "g", skip_special_tokens=False, **GREEDY)
    assert text.startswith("hi<|im_end|>")


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        (dict(max_new_tokens=40), "stop"),
        (dict(max_new_tokens=6), "length"),
        (dict(max_new_tokens=13), "stop"),
        (dict(stop_sequences=["xy"]), "stop"),
        (dict(stop_sequences=["xyz"], max_new_tokens=8), "stop"),
        (dict(stop_sequences=["xyz"], max_new_tokens=7), "length"),
        (dict(max_new_tokens=1), "length"),
    ],
)
def test_case_14_one_finish_reason_in_the_last_event(
    script: RunningServer, parameters: dict[str, Any], reason: str
) -> None:
    assert both_ways(script, "A", do_sample=False, **parameters)[2] == reason


def test_case_14_a_stream_holds_one_output(script: RunningServer) -> None:
    for name in ("n", "best_of"):
        answer = script.post("/generate_stream", {"inputs": "A", "parameters": {name: 2}})
        assert answer.status == 400 and answer.error()["param"] in ("n", "best_of")
