"""GrammarMask on its own: what it allows follows the text, also after a resume, on a reused row, and past the end."""

import dataclasses
import queue
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from support.checkpoints import EOS, IM_END, IM_START, VOCABULARY, byte_tokenizer, token_ids
from tokenizers import AddedToken, Tokenizer

from lightllm.common.grammar import grammar_mask
from lightllm.common.grammar.backend import backend_named, checked
from lightllm.common.grammar.forms import (
    Calls,
    CallTag,
    Form,
    GrammarRefused,
    Lark,
    Regex,
    TagToken,
    Thoughts,
    choice_form,
    encode,
    json_form,
)
from lightllm.common.grammar.grammar_mask import GrammarMask
from lightllm.common.sampling.logits_processor import Line
from lightllm.common.sampling.sampling_batch import RowSampling, RowStart

PLAIN = RowSampling(
    temperature=1.0, top_k=-1, top_p=1.0, min_p=0.0, seed=0, sample_index=0, repetition=1.0, presence=0.0,
    frequency=0.0, input_penalty=False, bias_ids=np.zeros(0, np.int64), bias_values=np.zeros(0, np.float32),
    allowed_ids=np.zeros(0, np.int64), stop_ids=np.array([EOS]), min_new_tokens=1, length_decay=(1, 1.0),
    top_logprobs=0,
)  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer_json(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer().save_pretrained(folder)
    return folder / "tokenizer.json"


@pytest.fixture(params=["llguidance", "xgrammar"])
def mask(request, tokenizer_json) -> GrammarMask:
    return GrammarMask(backend_named(request.param), tokenizer_json, VOCABULARY, [EOS])


def start(mask: GrammarMask, row: int, form: str | Form | None, output: str = "", prompt: str = "xyz") -> None:
    """form: text is a regular expression."""
    form = Regex(form) if isinstance(form, str) else form
    sampling = dataclasses.replace(PLAIN, grammar=encode(form) if form else "")
    ids = np.array(token_ids(prompt) + token_ids(output), np.int32)
    mask.start([RowStart(row, ids, len(prompt), sampling)])


def step(mask: GrammarMask, texts: dict[int, str], grammars: set[int]) -> dict[int, str]:
    """What each row may sample, as characters (. is the end); then it samples its character of `texts`."""
    sampling = dataclasses.replace(PLAIN, grammar="any")
    lines = [Line(i, row, 0, sampling) for i, row in enumerate(texts) if row in grammars]
    logits = torch.zeros(len(texts), VOCABULARY)
    if lines:
        mask(logits, lines)
    letters = {token_ids(c)[0]: c for c in "abcdxyz"} | {EOS: "."}
    allowed = {}
    for i, row in enumerate(texts):
        finite = logits[i].isfinite().nonzero().flatten().tolist()
        allowed[row] = "all" if len(finite) == VOCABULARY else "".join(sorted(letters[id] for id in finite))
    drawn = [EOS if text == "." else token_ids(text)[0] for text in texts.values()]
    if lines:
        mask.observe(torch.tensor(drawn), lines)
    return allowed


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
def test_tokens_that_the_model_lacks(backend: str, tokenizer_json: Path, tmp_path: Path) -> None:
    """A tokenizer may have more of them than the model: for padding, for images. They can never be sampled."""
    tokenizer = Tokenizer.from_file(str(tokenizer_json))
    tokenizer.add_tokens([f"<image_{i}>" for i in range(VOCABULARY)] + ["ab"])
    tokenizer.add_special_tokens([AddedToken("<pad>", special=True)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    mask = GrammarMask(backend_named(backend), tmp_path / "tokenizer.json", VOCABULARY, [EOS])
    start(mask, 3, "ab|ac+d")
    assert step(mask, {3: "a"}, {3}) == {3: "a"}
    assert step(mask, {3: "b"}, {3}) == {3: "bc"}
    assert step(mask, {3: "."}, {3}) == {3: "."}
    assert mask.take_failures() == {}


def test_the_mask_follows_the_text(mask) -> None:
    start(mask, 3, "ab|ac+d")
    start(mask, 5, "x*")
    start(mask, 6, None)
    grammars = {3, 5}
    assert step(mask, {3: "a", 6: "q", 5: "x"}, grammars) == {3: "a", 5: ".x", 6: "all"}
    assert step(mask, {5: ".", 3: "c"}, grammars) == {3: "bc", 5: ".x"}
    assert step(mask, {3: "c"}, grammars) == {3: "cd"}
    assert step(mask, {3: "d"}, grammars) == {3: "cd"}
    assert step(mask, {3: "."}, grammars) == {3: "."}
    assert step(mask, {3: "."}, grammars) == {3: "."}, "past its end a text can only end again"
    assert mask.take_failures() == {}


def test_escapes_of_two_digits_end_with_them(mask) -> None:
    for pattern, text in ((r"\x41a", "Aa"), (r"[\x41-\x43]\x42b", "CBb"), (r"\\x41a", r"\x41a")):
        assert follow(mask, Regex(pattern), text) == f"{text}."


@pytest.mark.parametrize("choice", ["a ::= b", "\x7f\t\x00", '"\\n', "größe"])
def test_any_text_may_be_a_choice(mask, choice: str) -> None:
    assert follow(mask, choice_form([choice, "other"]), choice) == f"{choice}."


def test_a_resumed_row_goes_on(mask) -> None:
    start(mask, 1, "abc+d", output="abcc")
    assert step(mask, {1: "d"}, {1}) == {1: "cd"}


def test_a_row_that_starts_anew_forgets_what_was_sampled_last(mask) -> None:
    start(mask, 1, "ab")
    step(mask, {1: "a"}, {1})
    start(mask, 1, "cd")
    assert step(mask, {1: "c"}, {1}) == {1: "c"}
    start(mask, 1, None)
    assert step(mask, {1: "z"}, set()) == {1: "all"}


def test_an_allowed_token_that_others_forbid_stays_possible(mask) -> None:
    start(mask, 0, "a")
    logits = torch.full((1, VOCABULARY), -torch.inf)
    logits[0, token_ids("b")[0]] = 5
    mask(logits, [Line(0, 0, 0, dataclasses.replace(PLAIN, grammar="any"))])
    assert logits[0].isfinite().nonzero().flatten().tolist() == [token_ids("a")[0]]


def test_a_grammar_that_cannot_go_on_is_told(mask) -> None:
    start(mask, 2, "ab", output="b")  # no text of this grammar
    step(mask, {2: "x"}, {2})
    failures = mask.take_failures()
    assert set(failures) == {2} and "grammar" in failures[2]
    assert mask.take_failures() == {}


def test_a_grammar_that_is_too_much_is_told_in_one_line(llguidance_mask) -> None:
    start(llguidance_mask, 2, "(a{1,900}){1,900}")
    failures: dict[int, str] = {}
    while not failures:
        step(llguidance_mask, {2: "a"}, {2})
        failures = llguidance_mask.take_failures()
    assert failures[2].startswith("the grammar cannot go on: lexer error: too many")
    assert "\n" not in failures[2] and "<" not in failures[2]


def test_a_grammar_that_holds_up_the_others_fails_its_row(mask, monkeypatch) -> None:
    start(mask, 2, "ab*")
    start(mask, 3, "x*")
    assert step(mask, {2: "a", 3: "x"}, {2, 3}) == {2: "a", 3: ".x"}
    assert mask.take_failures() == {}
    monkeypatch.setattr(grammar_mask, "PATIENCE", -1.0)
    assert step(mask, {2: "b"}, {2}) == {2: ".b"}, "what it allows is still told"
    failures = mask.take_failures()
    assert set(failures) == {2} and "too ambiguous" in failures[2]


def test_a_grammar_is_compiled_before_its_row_starts(mask, monkeypatch) -> None:
    told: queue.Queue[str] = queue.Queue()
    mask.compile(1, encode(Regex("ab")), told.put)
    assert told.get(timeout=60) == ""
    monkeypatch.setattr(mask, "_first_matcher", None)  # nothing more is compiled
    mask.compile(2, encode(Regex("ab")), told.put)
    start(mask, 2, "ab")
    assert told.get(timeout=60) == "" and step(mask, {2: "a"}, {2}) == {2: "a"}


def test_a_grammar_is_kept_until_it_is_forgotten(llguidance_mask, monkeypatch) -> None:
    told: queue.Queue[str] = queue.Queue()
    compiled = []
    first = llguidance_mask._first_matcher
    monkeypatch.setattr(llguidance_mask, "_first_matcher", lambda *args: compiled.append(args[0]) or first(*args))
    kept = encode(Regex("ab"))
    llguidance_mask.compile(0, kept, told.put)
    for key in range(1, 300):
        llguidance_mask.compile(key, encode(Lark(f"start: nowhere{key}")), told.put)
    assert sum(bool(told.get(timeout=60)) for _ in range(300)) == 299
    start(llguidance_mask, 2, "ab")
    assert step(llguidance_mask, {2: "a"}, {2}) == {2: "a"} and compiled.count(kept) == 1
    llguidance_mask.forget(0)
    start(llguidance_mask, 2, "ab")
    assert step(llguidance_mask, {2: "a"}, {2}) == {2: "a"} and compiled.count(kept) == 1, "the row had it"
    start(llguidance_mask, 2, None)
    assert llguidance_mask._compiled.get(kept) is None


def test_a_grammar_that_takes_too_long_is_told(mask, monkeypatch) -> None:
    told: queue.Queue[str] = queue.Queue()
    go_on = threading.Event()
    monkeypatch.setattr(grammar_mask, "COMPILE_PATIENCE", 0.05)
    monkeypatch.setattr(grammar_mask, "on_deep_stack", lambda work: go_on.wait(60) and work())
    mask.compile(1, encode(Regex("ab")), told.put)
    assert told.get(timeout=60) == "the grammar takes longer than 0.05 s to compile"
    mask.forget(1)
    mask.compile(2, encode(Regex("ab")), told.put)  # still at it
    assert told.get(timeout=60) == "the grammar takes longer than 0.05 s to compile"
    go_on.set()
    assert [told.get(timeout=60) for _ in range(2)] == ["", ""]


def test_the_time_of_other_grammars_is_not_its_own(mask, monkeypatch) -> None:
    told: queue.Queue[str] = queue.Queue()
    begun: queue.Queue[threading.Timer] = queue.Queue()
    go_on = threading.Event()
    monkeypatch.setattr(threading.Timer, "start", lambda timer: begun.put(timer))
    monkeypatch.setattr(grammar_mask, "on_deep_stack", lambda work: go_on.wait(60) and work())
    for key in range(3):  # two threads compile
        mask.compile(key, encode(Regex("ab" * (key + 1))), told.put)
    for _ in range(2):
        begun.get(timeout=60)
    assert begun.empty()
    go_on.set()
    begun.get(timeout=60)
    assert [told.get(timeout=60) for _ in range(3)] == [""] * 3


def test_what_is_forgotten_before_it_begins_is_not_compiled(mask, monkeypatch) -> None:
    told: queue.Queue[tuple[int, str]] = queue.Queue()
    go_on = threading.Event()
    compiled = []
    monkeypatch.setattr(
        grammar_mask, "on_deep_stack", lambda work: compiled.append(work) or (go_on.wait(60) and work())
    )
    for key in range(5):  # two threads compile
        grammar = encode(Regex("ab" * (3 if key > 2 else key + 1)))
        mask.compile(key, grammar, lambda problem, key=key: told.put((key, problem)))
        if 1 < key < 4:
            mask.forget(key)
    go_on.set()
    assert {told.get(timeout=60) for _ in range(3)} == {(0, ""), (1, ""), (4, "")}
    assert told.empty() and len(compiled) == 3


@pytest.mark.parametrize(("grammar", "word"), [("start: nowhere", "nowhere"), ("start: start", "no token may")])
def test_a_grammar_that_cannot_be_used_is_told(mask, grammar: str, word: str) -> None:
    told: queue.Queue[str] = queue.Queue()
    mask.compile(1, encode(Lark(grammar)), told.put)
    assert word in told.get(timeout=60)


def test_a_row_whose_grammar_allows_no_token_fails(mask, monkeypatch) -> None:
    start(mask, 2, "abc")
    start(mask, 3, "x*")
    assert step(mask, {2: "a", 3: "x"}, {2, 3}) == {2: "a", 3: ".x"}
    fill = mask._backend.result().fill
    monkeypatch.setattr(mask._backend.result(), "fill", lambda m, bits: m is mask._matchers[3] and fill(m, bits))
    assert step(mask, {2: "b", 3: "x"}, {2, 3}) == {2: "all", 3: ".x"}
    assert mask.take_failures() == {2: "the grammar cannot go on: no token may come next"}


def test_a_failure_is_not_that_of_the_next_on_its_row(mask, monkeypatch) -> None:
    start(mask, 2, "ab*")
    step(mask, {2: "a"}, {2})
    monkeypatch.setattr(grammar_mask, "PATIENCE", -1.0)
    start(mask, 3, "x")
    start(mask, 2, "b")
    monkeypatch.undo()
    assert step(mask, {2: "b", 3: "x"}, {2, 3}) == {2: "b", 3: "x"}
    assert mask.take_failures() == {}


def test_without_a_tokenizer_file_a_grammar_fails_its_row(tmp_path) -> None:
    mask = GrammarMask(backend_named("llguidance"), tmp_path / "tokenizer.json", VOCABULARY, [EOS])
    start(mask, 0, "a")
    assert step(mask, {0: "x"}, {0}) == {0: "all"}
    assert "tokenizer.json" in mask.take_failures()[0]


def test_a_panic_of_the_library_fails_the_row_alone(tokenizer_json, tmp_path) -> None:
    """llguidance's trie has no room for tokens of thousands of bytes."""
    tokenizer = Tokenizer.from_file(str(tokenizer_json))
    tokenizer.add_tokens(["a" * 5000])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    mask = GrammarMask(backend_named("llguidance"), tmp_path / "tokenizer.json", VOCABULARY, [EOS])
    start(mask, 0, "a")
    assert step(mask, {0: "x"}, {0}) == {0: "all"}
    assert "panic" in mask.take_failures()[0].lower()


@pytest.fixture
def llguidance_mask(tokenizer_json) -> GrammarMask:
    return GrammarMask(backend_named("llguidance"), tokenizer_json, VOCABULARY, [EOS])


def test_objects_of_a_thousand_properties(llguidance_mask) -> None:
    properties = {f"p{i}": {"type": "integer"} for i in range(1000)}
    form = json_form({"type": "object", "properties": properties, "additionalProperties": False})
    for text in ('{"p0":1,"p7":2,"p999":3}', "{}", '{"p500":0}'):
        assert follow(llguidance_mask, form, text) == f"{text}."
    assert follow(llguidance_mask, form, '{"p1000":1}') == '{"p100'


def test_thousands_of_choices(llguidance_mask) -> None:
    form = choice_form([f"option {i}" for i in range(8000)])
    assert follow(llguidance_mask, form, "option 7999") == "option 7999."
    assert follow(llguidance_mask, form, "option 8000") == "option 800"


def follow_ids(mask: GrammarMask, form: Form, tokens: list[int]) -> int:
    """How many of the tokens the form lets an output have."""
    start(mask, 0, form)
    lines = [Line(0, 0, 0, dataclasses.replace(PLAIN, grammar="any"))]
    for place, token in enumerate(tokens):
        logits = torch.zeros(1, VOCABULARY)
        mask(logits, lines)
        assert mask.take_failures() == {}
        if not logits[0, token].isfinite():
            return place
        mask.observe(torch.tensor([token]), lines)
    return len(tokens)


def follow(mask: GrammarMask, form: Form, text: str) -> str:
    """How much of a text the form lets an output have; . behind it, if it may end there."""
    data = text.encode()
    count = follow_ids(mask, form, [*token_ids(text), EOS])
    return data[:count].decode(errors="replace") + "." * (count > len(data))


CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("begin", [None, "<think>"])
def test_thoughts_are_free_and_what_follows_is_not(mask, begin: str | None) -> None:
    form = Thoughts(begin, "</think>", json_form(CITY))
    opened = begin or ""
    whole = opened + 'hm, {"city": 7} </thin ü </think>\n\n{"city": "Bern"}'
    assert follow(mask, form, whole) == whole + "."
    assert follow(mask, form, opened + "hm</think>no") == opened + "hm</think>"
    assert follow(mask, form, opened + "hm</think>\n\n\n{") == opened + "hm</think>\n\n"
    assert follow(mask, form, opened + "hm") == opened + "hm", "it cannot end in its thoughts"
    if begin:
        assert follow(mask, form, '{"city": "Rome"}') == '{"city": "Rome"}.', "it need not think"
        assert follow(mask, form, "hm") == ""


def test_a_call_in_free_text_follows_its_schema(mask) -> None:
    def tag(name: str, schema: dict) -> CallTag:
        return CallTag([f'\n{{"name": "{name}", "arguments": '], schema, ["}\n</tool_call>"])

    form = Calls("<tool_call>", [tag("weather", CITY), tag("clock", {"type": "object"})])
    for text in ("", "plain", "a <tool_cal b", "<tool", "é</tool_call>"):
        assert follow(mask, form, text) == text + "."
    head = 'so <tool_call>\n{"name": "weather", "arguments": '
    whole = head + '{"city": "Rome"}}\n</tool_call>'
    assert follow(mask, form, whole) == whole + "."
    twice = whole + ' and <tool_call>\n{"name": "clock", "arguments": {"a": [1]}}\n</tool_call>.'
    assert follow(mask, form, twice) == twice + "."
    assert follow(mask, form, head + '{"city": "Oslo"}') == head + '{"city": "'
    assert follow(mask, form, "<tool_call>{}") == "<tool_call>"
    assert follow(mask, form, "<tool_call>") == "<tool_call>", "a call that began is finished"
    assert follow(mask, form, '<tool_call>\n{"name": "other') == '<tool_call>\n{"name": "'


@pytest.mark.parametrize("thinks", [False, True])
def test_calls_may_take_the_place_of_an_answer(mask, thinks: bool) -> None:
    tag = CallTag(["{"], CITY, ["}</tool_call>"])
    form: Form = Calls("<tool_call>", [tag], answer=Regex("yes|no"))
    before = "hm</think>" if thinks else ""
    form = Thoughts(None, "</think>", form) if thinks else form
    call = '<tool_call>{{"city": "Rome"}}</tool_call>'
    for text in ("yes", "no", call, f"{call}\n{call}"):
        assert follow(mask, form, before + text) == before + text + "."
    assert follow(mask, form, before + "so " + call) == before
    assert follow(mask, form, before + "yes" + call) == before + "yes"
    assert follow(mask, form, before + '<tool_call>{{"city": "Oslo"}}') == before + '<tool_call>{{"city": "'


@pytest.mark.parametrize("special", [IM_START, IM_END])
def test_special_tokens_are_told_by_their_ids(tokenizer_json, special: int) -> None:
    form = Thoughts(None, special, json_form(CITY))
    with pytest.raises(GrammarRefused, match="special tokens"):
        checked(form, "xgrammar")
    mask = GrammarMask(backend_named("llguidance"), tokenizer_json, VOCABULARY, [EOS])
    tokens = [*token_ids("hm"), special, *token_ids('{"city": "Bern"}'), EOS]
    assert follow_ids(mask, form, tokens) == len(tokens)


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
def test_tags_that_are_tokens_of_plain_text(tmp_path, backend: str) -> None:
    """As Qwen 3 has them: `</think>` and `<tool_call>` are one token each, and not special."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken(tag, special=False) for tag in ("</think>", "<tool_call>")])
    end, call = tokenizer.convert_tokens_to_ids(["</think>", "<tool_call>"])
    tokenizer.save_pretrained(tmp_path)
    mask = GrammarMask(backend_named(backend), tmp_path / "tokenizer.json", VOCABULARY, [EOS])
    tag = CallTag(["{"], CITY, ["}"])
    thoughts = Thoughts(None, TagToken("</think>", end), json_form(CITY))
    calls = Calls(TagToken("<tool_call>", call), [tag], [TagToken("</think>", end)])
    answer, arguments = [*token_ids('\n{"city": "Bern"}'), EOS], [*token_ids('{{"city": "Rome"}}'), EOS]
    for form, tokens in (
        (thoughts, [*token_ids("hm"), end, *answer]),
        (thoughts, [*token_ids("hm</think>"), *answer]),
        (calls, [*token_ids("so "), call, *arguments]),
        (calls, [*token_ids("so"), end, *token_ids(" <tool_call>"), *arguments]),
    ):
        assert follow_ids(mask, form, tokens) == len(tokens)
