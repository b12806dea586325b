"""How conversations become prompts: templates of several kinds, tools told to those that know none, visible tags."""

from pathlib import Path

import pytest

from lightllm.server.chat_format import Chat, ChatFormat
from lightllm.server.chat_template import TemplateFailed
from lightllm.server.core.sampling_params import InvalidParameter
from lightllm.server.output_parsers.harmony import HarmonyParser
from lightllm.server.output_parsers.listed import ConstrainedParser, MistralParser
from lightllm.server.output_parsers.tagged import DeepSeekV31Parser, HermesParser

ASK = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m['content'] + '' }}{% endfor %}"
PLAIN += "{% if add_generation_prompt %}[a]{% endif %}"
PARTS = "{% for m in messages %}[{{ m.role }}]{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"


def text_of(format: ChatFormat, chat: Chat) -> str:
    return format.tokenizer.decode(format.prompt(chat, 10**6).ids)


def test_parts_and_text(format_of) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]}]
    for template in (PLAIN, PARTS):
        assert text_of(format_of(template), Chat(parts)).startswith("[user]AB")
    assert text_of(format_of(PARTS), Chat([{"role": "user", "content": "AB"}])) == "[user]AB"


def test_a_template_without_tools_gets_them_told(format_of) -> None:
    format = format_of(PLAIN)
    messages = [
        *ASK,
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "content": "ok", "tool_call_id": "1"},
    ]
    text = text_of(format, Chat(messages, [TOOL]))
    assert text.startswith("[system]You may call functions.") and '"name": "f"' in text
    assert '[assistant]<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>' in text
    assert "[user]<tool_response>\nok\n</tool_response>" in text
    told = text_of(format, Chat([{"role": "developer", "content": "be brief"}, *ASK], [TOOL]))
    assert told.startswith("[system]be brief\n\nYou may call")
    assert "functions" not in text_of(format, Chat(ASK, [TOOL], tool_choice="none"))
    assert format.tool_parser(Chat(ASK, [TOOL])) is HermesParser
    assert format.tool_parser(Chat(ASK, [TOOL], tool_choice="required")) is ConstrainedParser
    assert format.tool_parser(Chat(ASK)) is None


def test_a_template_for_tools(format_of) -> None:
    named = [{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": "{{ tools | length }}" + PLAIN}]
    format = format_of(named)
    assert text_of(format, Chat(ASK, [TOOL])) == "1[user]hi[a]"
    assert text_of(format, Chat(ASK)) == "[user]hi[a]"


@pytest.mark.parametrize(
    "shown",
    [
        "{{ m.content + (m.tool_calls[0].function.arguments | tojson) }}",
        "{{ m.content + m.tool_calls[0].function.arguments }}",
        "{{ m.content }}{{ m.tool_calls[0].function.arguments }}",
    ],
    ids=["an object", "text that is joined", "text that is printed"],
)
def test_calls_are_told_in_the_form_that_the_template_takes(format_of, shown: str) -> None:
    name = "{{ m.tool_calls[0].function.name }}"
    template = "{% for m in messages %}[{{ m.role }}]{% if m.tool_calls is defined %}" + name + shown
    format = format_of(template + "{% else %}{{ m.content }}{% endif %}{% endfor %}{{ tools }}")
    called = [*ASK, {"role": "assistant", "tool_calls": [CALL]}]
    assert text_of(format, Chat(called)) == '[user]hi[assistant]f{"a": 1}None'


def test_tools_of_messages_are_not_the_tools_that_a_request_offers(format_of) -> None:
    """Phi-4-mini's template looks for them in the system message, where nobody puts them."""
    format = format_of("{% for m in messages %}{{ m.content }}{{ m.tools or '' }}{% endfor %}")
    assert '"name": "f"' in text_of(format, Chat(ASK, [TOOL]))
    assert format.tool_parser(Chat(ASK, [TOOL])) is HermesParser


def test_calls_are_read_as_they_were_asked_for(format_of) -> None:
    """DeepSeek's own templates show calls in the model's format and tell no tools."""
    template = PLAIN + "{# <｜tool▁call▁begin｜> #}"
    assert format_of(template).tool_parser(Chat(ASK, [TOOL])) is HermesParser
    assert format_of(template + "{{ tools }}").tool_parser(Chat(ASK, [TOOL])) is DeepSeekV31Parser
    assert format_of(template, tool_call_parser="mistral").tool_parser(Chat(ASK, [TOOL])) is MistralParser
    assert format_of(template, tool_call_parser="none").tool_parser(Chat(ASK, [TOOL])) is None


def test_turns_alternate_where_a_template_wants_it(format_of) -> None:
    """As Gemma's: no system message, and results of tools are of one turn with what the user says behind them."""
    turns = "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    format = format_of(turns + "{{ raise_exception('turns must alternate') }}{% endif %}{{ m.content }}\n{% endfor %}")
    results = [{"role": "tool", "content": f"result {i}", "tool_call_id": str(i)} for i in range(2)]
    thanks = {"role": "user", "content": "thanks"}
    text = text_of(format, Chat([*ASK, {"role": "assistant", "tool_calls": [CALL]}, *results, thanks], [TOOL]))
    assert text.startswith("You may call functions.") and "</tool_call>\n\nhi\n<tool_call>\n" in text
    assert text.endswith("result 0\n</tool_response>\n<tool_response>\nresult 1\n</tool_response>\nthanks\n")


def test_special_tags_are_seen_by_the_parser_only(format_of) -> None:
    format = format_of(PLAIN + "{{ tools }}{# [TOOL_CALLS] #}", "[TOOL_CALLS]")
    assert format.tool_parser(Chat(ASK, [TOOL])) is MistralParser
    assert format.visible_tokens(Chat(ASK, [TOOL])) == {"[TOOL_CALLS]"}
    assert format.visible_tokens(Chat(ASK)) == frozenset()


def test_thoughts(format_of) -> None:
    format = format_of(PLAIN + "{% if enable_thinking is not defined %}<think>\n{% endif %}{# </think> #}")
    assert format.prompt(Chat(ASK), 1000).opens_reasoning
    constrained = Chat(ASK, constrained=True)
    assert not format.prompt(constrained, 1000).opens_reasoning and not format.thinks(constrained)
    assert not format_of(PLAIN).thinks(Chat(ASK)) and format_of(PLAIN, reasoning_parser="qwen3").thinks(Chat(ASK))


def test_continued_message(format_of) -> None:
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}</s>{% endfor %}"
    chat = Chat([*ASK, {"role": "assistant", "content": "I am"}], continues=True)
    assert text_of(format_of(template), chat) == "[user]hi</s>[assistant]I am"


def test_a_message_continued_where_content_is_parts(format_of) -> None:
    chat = Chat([*ASK, {"role": "assistant", "content": "I am"}], continues=True)
    assert text_of(format_of(PARTS + "<end>"), chat) == "[user]hi[assistant]I am"


@pytest.mark.parametrize(
    ("template", "reason"),
    [("{{ raise_exception('no systems') }}", "no systems"), ("{{ ''.__class__.__mro__ }}", "unsafe")],
)
def test_a_template_that_refuses(format_of, template: str, reason: str) -> None:
    with pytest.raises(InvalidParameter, match=reason):
        format_of(template).prompt(Chat(ASK), 1000)


def test_a_template_that_cannot_be_read(format_of, tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match="not valid"):
        format_of("{% for %}").prompt(Chat(ASK), 1000)
    own = tmp_path / "own.jinja"
    own.write_text("{% for %}")
    with pytest.raises(TemplateFailed):
        format_of(PLAIN, chat_template=str(own))


def test_limits_and_missing_templates(format_of, tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match="characters"):
        format_of(PLAIN).prompt(Chat([{"role": "user", "content": "x" * 50}]), 40)
    with pytest.raises(InvalidParameter, match="--chat_template"):
        format_of([]).prompt(Chat(ASK), 1000)
    own = tmp_path / "own.jinja"
    own.write_text("own {{ messages | length }}")
    assert text_of(format_of(PLAIN, chat_template=str(own)), Chat(ASK)) == "own 1"


def test_channels_are_read_in_every_answer(format_of) -> None:
    """Those of gpt-oss, which has no answer without them; a forced call is one of the grammar."""
    format = format_of("{{ tools }}{{ messages[0].content }}<|channel|>", "<|channel|>", "<|message|>", "<|end|>")
    for chat in (Chat(ASK), Chat(ASK, [TOOL]), Chat(ASK, [TOOL], tool_choice="none")):
        assert format.tool_parser(chat) is HarmonyParser
        assert format.visible_tokens(chat) == {"<|channel|>", "<|message|>", "<|end|>"}
    assert format.tool_parser(Chat(ASK, [TOOL], tool_choice="required")) is ConstrainedParser


def test_thoughts_before_a_call_in_the_words_of_gpt_oss(format_of) -> None:
    """Its template takes none beside a text, and drops others."""
    format = format_of(
        "{% if tools %}{% endif %}{% for message in messages %}{{ message.content }}{{ message.thinking }};{% endfor %}"
    )
    call = {"role": "assistant", "reasoning_content": "hm", "tool_calls": [{"function": {"name": "f"}}]}
    asked = Chat(
        [*ASK, call, call | {"content": "so"}, {"role": "assistant", "content": "x", "reasoning_content": "y"}]
    )
    assert format.tokenizer.decode(format.prompt(asked, 1000).ids) == "hi;hm;so;x;"
