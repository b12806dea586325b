"""Deltas against brute force on the whole text: stops, ends, special tokens, every cut."""

import copy
import random

import pytest

from lightllm.server.core.messages import Finish
from lightllm.server.detokenization.incremental import IncrementalDetokenizer
from lightllm.server.detokenization.text_stream import REPLACEMENT
from lightllm.server.transformers_tokenizer import from_transformers

F1_TEXT = "🫠 xyz龜W"


class Run:
    """All deltas of a sequence that the router ends with `finish` after the last id."""

    def __init__(self, tokenizer, params, ids, finish=Finish.LENGTH, prompt="A", **given):
        prompt_ids = tokenizer.encode(prompt, add_special_tokens=False) if isinstance(prompt, str) else prompt
        detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids, params(**given))
        self.deltas: list[str] = []
        self.finish = Finish.NONE
        for index, id in enumerate(ids):
            delta, self.finish = detokenizer.push(id, finish if index == len(ids) - 1 else Finish.NONE)
            self.deltas.append(delta)
            if self.finish:
                break
        self.text = "".join(self.deltas)
        self.kept = detokenizer.num_tokens


@pytest.fixture
def f1_ids(byte_level):
    return [*byte_level.encode(F1_TEXT, add_special_tokens=False), byte_level.hf.eos_token_id]


def eos(tokenizer):
    return {"stop_token_ids": [tokenizer.hf.eos_token_id]}


def test_case_1_a_character_split_over_tokens(byte_level, params, f1_ids):
    run = Run(byte_level, params, f1_ids, Finish.STOP, **eos(byte_level))
    assert run.deltas == ["", "", "", "🫠", " ", "x", "y", "z", "", "", "龜", "W", ""]
    assert (run.text, run.finish, run.kept) == (F1_TEXT, Finish.STOP, 13)


def test_case_2_a_cut_in_the_middle_of_a_character(tokenizer, params):
    ids = tokenizer.encode(F1_TEXT, add_special_tokens=False)
    prompt = tokenizer.encode("A", add_special_tokens=False)
    for cut in range(1, len(ids) + 1):
        run = Run(tokenizer, params, ids[:cut])
        whole = tokenizer.hf.decode(prompt + ids[:cut])[len(tokenizer.hf.decode(prompt)) :]
        assert (run.text, run.finish, run.kept) == (whole, Finish.LENGTH, cut)


def test_case_4_the_first_token_keeps_its_space(sentencepiece, params):
    ids = sentencepiece.hf.convert_tokens_to_ids(["▁Hello", "▁world", "!"])
    bos = sentencepiece.hf.bos_token_id
    assert Run(sentencepiece, params, ids).deltas == [" Hello", " world", "!"]
    assert Run(sentencepiece, params, ids, prompt=[bos]).text == sentencepiece.hf.decode([bos, *ids], True)
    spaced = sentencepiece.hf.convert_tokens_to_ids(["▁", "▁Hello", "</s>", "▁world"])
    assert Run(sentencepiece, params, spaced, prompt=[bos]).text == " Hello world"


def test_case_6_a_stop_string_over_several_tokens(byte_level, params, f1_ids):
    run = Run(byte_level, params, f1_ids, Finish.STOP, stop_sequences=[" xy"], **eos(byte_level))
    assert run.deltas == ["", "", "", "🫠", "", "", ""]
    assert (run.finish, run.kept) == (Finish.STOP, 7)


def test_case_8_held_text_comes_out(byte_level, params, f1_ids):
    for stop in ("xyQ", "W!!"):
        run = Run(byte_level, params, f1_ids, Finish.STOP, stop_sequences=[stop], **eos(byte_level))
        assert (run.text, run.kept) == (F1_TEXT, 13)
    run = Run(byte_level, params, f1_ids[:7], stop_sequences=["xyQ"])
    assert (run.deltas, run.finish) == (["", "", "", "🫠", " ", "", "xy"], Finish.LENGTH)


@pytest.mark.parametrize("stops", ["", [""], ["", "zzz"], [[]]])
def test_case_9_an_empty_stop_string_is_none(byte_level, params, f1_ids, stops):
    assert Run(byte_level, params, f1_ids, Finish.STOP, stop_sequences=stops, **eos(byte_level)).text == F1_TEXT


def test_case_10_a_special_stop_token_leaves_the_text_whole(byte_level, params):
    ids = [*byte_level.encode("xy", False), 258]
    run = Run(byte_level, params, ids, Finish.STOP, stop_token_ids=[256, 258])
    assert (run.text, run.finish) == ("xy", Finish.STOP)


@pytest.mark.parametrize("skip", [True, False])
def test_case_12_the_end_of_sequence_shows_only_if_asked_for(byte_level, params, f1_ids, skip):
    def text(**given):
        given = eos(byte_level) | {"skip_special_tokens": skip} | given
        return Run(byte_level, params, f1_ids, Finish.STOP, **given).text

    assert text() == F1_TEXT
    assert text(print_eos_token=True) == F1_TEXT + "<|eos|>"
    assert text(include_stop_str_in_output=True) == F1_TEXT + ("" if skip else "<|eos|>")
    # not the end of the sequence (ignore_eos): as any other special token
    assert text(stop_token_ids=[]) == F1_TEXT + ("" if skip else "<|eos|>")


def test_an_ordinary_stop_token_is_hidden(byte_level, params):
    ids = byte_level.encode("ab", False)
    given = {"stop_token_ids": ids[1:]}
    assert Run(byte_level, params, ids, Finish.STOP, **given).text == "a"
    assert Run(byte_level, params, ids, Finish.STOP, include_stop_str_in_output=True, **given).text == "ab"
    assert Run(byte_level, params, ids, Finish.LENGTH, **given).text == "ab"


def test_case_75_ids_that_the_tokenizer_does_not_know(tokenizer, params):
    ids = [tokenizer.vocab_size + 50, *tokenizer.encode("B", False), 319_000, tokenizer.vocab_size]
    run = Run(tokenizer, params, ids, stop_sequences=["zz"])
    assert run.text == Run(tokenizer, params, tokenizer.encode("B", False)).text
    assert run.text.strip() == "B"
    assert [tokenizer.token_text(id) for id in (ids[0], 319_000)] == ["", ""]


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_may_be_a_hidden_special_token(byte_level, params, include):
    ids = [*byte_level.encode("ab", False), 257, *byte_level.encode("cd\n", False), 258, *byte_level.encode("e", False)]

    def run(*stops, **given):
        given = {"stop_sequences": list(stops), "include_stop_str_in_output": include} | given
        run = Run(byte_level, params, ids, **given)
        return run.text, run.kept, run.finish

    ending = (lambda stop: stop) if include else (lambda stop: "")
    assert run("<|im_end|>") == ("abcd\n" + ending("<|im_end|>"), 7, Finish.STOP)
    assert run("\n<|im_end|>") == ("abcd" + ending("\n<|im_end|>"), 7, Finish.STOP)
    assert run("<|im_end|>e") == ("abcd\n" + ending("<|im_end|>e"), 8, Finish.STOP)
    assert run("<|im_end|>x", "b<|im_start|>q") == ("abcd\ne", 8, Finish.LENGTH)
    assert run("<|im_start|>", min_new_tokens=4) == ("abcd\ne", 8, Finish.LENGTH)
    assert run("bc") == ("a" + ending("bc"), 4, Finish.STOP)
    visible = run("<|im_end|>", skip_special_tokens=False)
    assert visible == ("ab<|im_start|>cd\n" + ending("<|im_end|>"), 7, Finish.STOP)


def test_a_stop_string_matches_a_special_token_spelled_out(byte_level, params):
    spelled = [byte_level.encode(character, False)[0] for character in "a<|im_end|>b"]
    run = Run(byte_level, params, spelled, stop_sequences=["<|im_end|>"])
    assert (run.text, run.finish, run.kept) == ("a", Finish.STOP, 11)


@pytest.mark.parametrize("include", [False, True])
def test_a_token_sequence_is_held_back_and_cut(byte_level, params, include):
    sequence = byte_level.encode("xyz", False)
    given = {"stop_sequences": [sequence], "include_stop_str_in_output": include}
    run = Run(byte_level, params, byte_level.encode("axyxxyz", False), Finish.STOP, **given)
    assert run.text == "axyx" + ("xyz" if include else "")
    if not include:
        assert run.deltas == ["a", "", "", "xy", "x", "", ""]
    assert Run(byte_level, params, byte_level.encode("axy", False), **given).text == "axy"
    # a stop string that completes earlier wins, one in the same token wins if it begins earlier
    both = {**given, "stop_sequences": [sequence, "xy"]}
    assert Run(byte_level, params, byte_level.encode("axyz", False), Finish.STOP, **both).kept == 3
    both = {**given, "stop_sequences": [sequence, "axyz"]}
    assert Run(byte_level, params, byte_level.encode("axyz", False), Finish.STOP, **both).text == "axyz" * include


def test_token_sequences_that_overlap(byte_level, params):
    xyz, yz = (byte_level.encode(text, False) for text in ("xyz", "yz"))
    for stops in ([xyz, yz], [yz, xyz]):
        assert Run(byte_level, params, byte_level.encode("axyz", False), Finish.STOP, stop_sequences=stops).text == "a"
    # the router let one pass (min_new_tokens): what cannot be completed any more is not held
    assert Run(byte_level, params, byte_level.encode("ayzb", False), stop_sequences=[yz]).deltas == ["a", "", "yz", "b"]


def test_of_stops_at_one_place_the_shorter_wins(byte_level, params):
    for stops in (["é龜", "é"], ["é", "é龜"]):
        run = Run(byte_level, params, [260], stop_sequences=stops, include_stop_str_in_output=True)
        assert (run.text, run.finish) == ("é", Finish.STOP)


def test_a_special_token_inside_the_name_of_another(byte_level, params):
    hf = copy.deepcopy(byte_level.hf)
    hf.add_special_tokens({"additional_special_tokens": ["[A]", "<[A]>"]})
    tokenizer = from_transformers(hf)
    outer = hf.convert_tokens_to_ids("<[A]>")
    run = Run(tokenizer, params, [*tokenizer.encode("ab"), outer], stop_sequences=["b<[A]>"])
    assert (run.text, run.finish) == ("a", Finish.STOP)


def test_a_stop_string_in_the_last_token_wins_over_the_length(byte_level, params):
    run = Run(byte_level, params, byte_level.encode("abc", False), stop_sequences=["bc"])
    assert (run.text, run.finish, run.kept) == ("a", Finish.STOP, 3)


def brute_force(released: list[str], stops: list[str], min_new_tokens: int, include: bool):
    """(text, kept, finish) from the text that each token completes: earliest token, then place, then shortest stop."""
    text = ""
    for count, piece in enumerate(released, 1):
        before, text = len(text), text + piece
        found = [
            (start, len(stop))
            for stop in stops
            for start in range(len(text))
            if text.startswith(stop, start) and start + len(stop) > before
        ]
        if count >= min_new_tokens and found:
            start, length = min(found)
            return text[: start + length * include], count, Finish.STOP
    return text, len(released), Finish.LENGTH


def test_stop_strings_against_brute_force(tokenizer, params):
    rng = random.Random(5)
    stopped = 0
    for round in range(3000):
        alphabet = "ab" if round % 2 else "ab é龜🫠"
        ids = tokenizer.encode("".join(rng.choices(alphabet, k=rng.randint(1, 20))), False)
        ids = [id for id in ids for id in ([id, tokenizer.hf.eos_token_id] if rng.random() < 0.1 else [id])]
        stops = ["".join(rng.choices(alphabet, k=rng.randint(1, 5))) for _ in range(rng.randint(1, 3))]
        given = {"min_new_tokens": rng.randint(1, 6), "include_stop_str_in_output": rng.random() < 0.5}
        plain = Run(tokenizer, params, ids)
        text, kept, finish = brute_force(plain.deltas, stops, *given.values())
        run = Run(tokenizer, params, ids, stop_sequences=stops, **given)
        assert (run.text, run.kept, run.finish) == (text, kept, finish), (ids, stops, given)
        stopped += finish == Finish.STOP
        shown = raw = ""
        for delta, piece in zip(run.deltas[: kept - 1], plain.deltas):
            shown, raw = shown + delta, raw + piece
            beginnings = (stop[:length] for stop in stops for length in range(1, len(stop)))
            held = max((len(b) for b in beginnings if raw.endswith(b)), default=0)
            assert len(raw) - len(shown) == held  # a real beginning of a stop, and no more
    assert 1000 < stopped < 2900


def test_every_cut_of_random_ids_with_stops_releases_everything(tokenizer, params):
    rng = random.Random(6)
    for _ in range(300):
        ids = [rng.randrange(tokenizer.vocab_size + 3) for _ in range(12)]
        cut = rng.randint(1, len(ids))
        for skip in (True, False):
            plain = Run(tokenizer, params, ids[:cut], skip_special_tokens=skip)
            watched = Run(
                tokenizer, params, ids[:cut], skip_special_tokens=skip,
                stop_sequences=[plain.text[-2:] + "\0\0", "<|eos|>\0", [*ids[:2], 1, 1, 1]],
            )  # fmt: skip
            assert watched.text == plain.text
            assert watched.finish == Finish.LENGTH


@pytest.mark.parametrize("with_stops", [True, False])
def test_tokens_in_runs_give_what_they_give_one_by_one(tokenizer, params, with_stops):
    rng = random.Random(8)
    for _ in range(300):
        ids = [rng.randrange(tokenizer.vocab_size + 3) for _ in range(20)]
        finish = rng.choice([Finish.LENGTH, Finish.STOP])
        given = {"stop_token_ids": [ids[-1]]}
        if with_stops:
            given["stop_sequences"] = [Run(tokenizer, params, ids[: rng.randint(4, 16)]).text[-2:] or "x", ids[6:8]]
        single = Run(tokenizer, params, ids, finish, **given)
        detokenizer = IncrementalDetokenizer(tokenizer, tokenizer.encode("A", False), params(**given))
        text, ended, rest = "", Finish.NONE, ids
        while not ended:
            run, rest = rest[: (size := rng.randint(1, 7))], rest[size:]
            added, ended = detokenizer.extend(run, Finish.NONE if rest else finish)
            text += added
        assert (text, ended, detokenizer.num_tokens) == (single.text, single.finish, single.kept)


def test_joined_deltas_are_valid_utf8_without_replacement_characters(tokenizer, params):
    rng = random.Random(7)
    for _ in range(100):
        text = "".join(rng.choices("aé龜🫠 ", k=10))
        run = Run(tokenizer, params, tokenizer.encode(text, False), stop_sequences=["🫠龜🫠", "é a é"])
        assert REPLACEMENT not in run.text
        run.text.encode()
