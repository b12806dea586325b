"""ChatFormat: how one model is told a conversation, and how its answers are to be read."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightllm.common.grammar.forms import Piece, TagToken
from lightllm.server.chat_template import ChatTemplate, TemplateFailed
from lightllm.server.control_tokens import CLOSE, OPEN, any_of, mark, split_marked
from lightllm.server.core.sampling_params import TOO_LONG, InvalidParameter
from lightllm.server.core.server_args import ServerArgs
from lightllm.server.output_parsers.base import ToolParser
from lightllm.server.output_parsers.listed import ConstrainedParser
from lightllm.server.output_parsers.reasoning import END_THINK, THINK, ReasoningParser
from lightllm.server.output_parsers.registry import AnswerParser, reasons, tool_parser
from lightllm.server.output_parsers.tagged import HermesParser
from lightllm.server.request_template import RequestTemplate
from lightllm.server.tokenizer import Tokenizer

Message = dict[str, Any]
CUT = "\U0010fff4"  # where the text of a last message that is to be continued ends in the prompt

# For templates that know no tools; the format is Hermes', which most small models have seen.
TOOL_INSTRUCTIONS = """You may call functions. Their signatures are within <tools></tools>:
<tools>
{tools}
</tools>
To call one, write a JSON object with its name and arguments within <tool_call></tool_call>:
<tool_call>
{{"name": <name>, "arguments": <arguments>}}
</tool_call>"""


@dataclass(frozen=True)
class Chat:
    """A conversation that asks for an answer, in the words of the OpenAI dialect.

    messages: role, content (text or text parts), tool_calls, tool_call_id, name, reasoning_content.
    tools: functions. tool_choice: none, auto, required, or the name of one of the tools after "name:".
    continues: the last message is the beginning of the answer. template: instead of the model's. strict_tools: names of
    the tools whose calls must follow their schemas. constrained: a grammar rules the answer from its first token on, so
    that the model cannot think before it.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)
    tool_choice: str = "auto"
    parallel_tool_calls: bool = True
    continues: bool = False
    variables: dict[str, Any] = field(default_factory=dict)
    template: str | None = None
    separate_reasoning: bool = True
    strict_tools: frozenset[str] = frozenset()
    constrained: bool = False

    @property
    def offers_tools(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def forces_call(self) -> bool:
        return self.tool_choice not in ("none", "auto")


@dataclass(frozen=True)
class Prompt:
    """token ids; opens_reasoning: the answer begins inside the model's thoughts; closes_reasoning: behind them."""

    ids: list[int]
    opens_reasoning: bool
    closes_reasoning: bool


class ChatFormat:
    """The chat templates of one model, and the parsers of its answers.

    A template of the checkpoint that cannot be read is told when it is needed; one given by flag raises TemplateFailed.
    """

    def __init__(self, tokenizer: Tokenizer, args: ServerArgs):
        self.tokenizer = tokenizer
        self._added = tokenizer.added_tokens()
        self._added_tokens = tuple(self._added)
        self._special = tuple(token for token, special in self._added.items() if special)
        self._plain = tuple(t for t, special in self._added.items() if not special and not t.isspace())
        self._literal_controls = not args.allow_special_tokens_in_prompt
        sources = dict(tokenizer.config.chat_templates)
        if args.chat_template is not None:
            sources = {"default": Path(args.chat_template).read_text(encoding="utf-8")}
        self._templates: dict[str, ChatTemplate] = {}
        self._broken = ""
        for name, source in sources.items():
            try:
                self._templates[name] = ChatTemplate(source)
            except TemplateFailed as error:
                if args.chat_template is not None:
                    raise
                self._broken = str(error)
        everything = "\n".join(sources.values())
        self._parser = tool_parser(args.tool_call_parser, everything)
        self._parser_is_given = args.tool_call_parser is not None
        self.reasons = reasons(args.reasoning_parser, everything)

    def prompt(self, chat: Chat, max_characters: int) -> Prompt:
        """Raises InvalidParameter if the template refuses the conversation or the prompt is hopelessly long."""
        template = self._template_for(chat)
        messages = [_for_template(message) for message in chat.messages]
        tools = chat.tools if chat.offers_tools else []
        if not template.knows_tools:
            messages = _without_tool_messages(messages)
            if tools:
                messages, tools = _with_instructions(messages, tools, template.takes_system), []
        if "developer" not in template.source:
            messages = [m | {"role": "system"} if m["role"] == "developer" else m for m in messages]
        if "message.thinking" in template.source:
            messages = [_with_thinking(message) for message in messages]
        if chat.continues:
            messages[-1] = messages[-1] | {"content": messages[-1]["content"] + CUT}
        variables = ({"enable_thinking": False} if chat.constrained else {}) | chat.variables
        if self._literal_controls:
            messages, tools, variables = self._marked(template.source, messages, tools, variables)
        try:
            names = self.tokenizer.config.special_tokens
            text = template.render(messages, tools or None, not chat.continues, names | variables)
        except TemplateFailed as error:
            raise InvalidParameter("messages" if chat.template is None else "chat_template", str(error)) from None
        if chat.continues:
            text = text[: text.rindex(CUT)] if CUT in text else text
        if len(text) > max_characters:
            raise InvalidParameter(
                "messages",
                f"the prompt is too long: {len(text)} characters; those longer than {max_characters} are not read",
                TOO_LONG,
            )
        if OPEN in text or CLOSE in text:
            ids = self.tokenizer.encode_pieces(split_marked(text, self._added_tokens))
        else:
            ids = self.tokenizer.encode(text, add_special_tokens=False)
        end = text.rstrip()
        opens = self.reasons and end.endswith(THINK)
        return Prompt(ids, opens, not opens and (chat.continues or end.endswith(END_THINK)))

    def parser(self, chat: Chat, prompt: Prompt) -> AnswerParser:
        """For one answer of this chat."""
        tools = self.tool_parser(chat)
        reasoning = ReasoningParser(prompt.opens_reasoning) if self.thinks(chat) else None
        offered = chat.tools if chat.offers_tools else []
        return AnswerParser(reasoning, tools(offered) if tools else None, chat.separate_reasoning)

    def thinks(self, chat: Chat) -> bool:
        """Whether an answer may begin with thoughts that are told apart from it."""
        return self.reasons and chat.separate_reasoning and not chat.constrained

    def tool_parser(self, chat: Chat) -> type[ToolParser] | None:
        if not chat.offers_tools:
            return self._parser if self._parser and self._parser.of_every_answer else None
        if chat.forces_call:
            return ConstrainedParser
        if self._parser_is_given or self._template_for(chat).knows_tools:
            return self._parser
        return HermesParser

    def pieces(self, text: str) -> list[Piece]:
        """What the model writes for a text, in which some tags may be tokens of their own."""
        pieces: list[Piece] = []
        for piece, is_token in split_marked(text, self._added_tokens):
            if is_token:
                id = self.tokenizer.token_to_id(piece)
                assert id is not None, "an added token has an id"
                pieces.append(id if self._added[piece] else TagToken(piece, id))
            elif piece:
                pieces.append(piece)
        return pieces

    def visible_tokens(self, chat: Chat) -> frozenset[str]:
        """Special tokens of the model that the parsers of this chat must see."""
        parser = self.tool_parser(chat)
        tags = (parser.tags if parser else ()) + (THINK, END_THINK) * self.reasons
        return frozenset(tag for tag in tags if self._added.get(tag))

    def _template_for(self, chat: Chat) -> ChatTemplate | RequestTemplate:
        if chat.template is not None:
            return RequestTemplate(chat.template)
        name = "tool_use" if chat.offers_tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            reason = self._broken or "this model has no chat template"
            raise InvalidParameter("messages", f"{reason}; --chat_template gives the server one")
        return self._templates[name]

    def _marked(self, source: str, messages: list[Message], tools: Any, variables: Any) -> tuple:
        """The model's own earlier answers may hold tokens like <think>; special ones nobody may write."""
        special = any_of(self._special)
        controls = any_of(self._special + tuple(token for token in self._plain if token in source))
        marked = [mark(m, special if m["role"] == "assistant" else controls) for m in messages]
        return marked, mark(tools, controls), mark(variables, controls)


def _for_template(message: Message) -> Message:
    """Without what is not given, text parts joined, arguments of calls as objects."""
    message = {name: value for name, value in message.items() if value is not None}
    content = message.get("content")
    if isinstance(content, list):
        message["content"] = "".join(part["text"] for part in content)
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [call | {"function": _with_object(call["function"])} for call in calls]
    message.setdefault("content", "")
    return message


def _with_thinking(message: Message) -> Message:
    """For gpt-oss, whose template tells the thoughts before a call, by this name, and takes none beside a text."""
    thoughts = message.get("reasoning_content")
    told = thoughts and message.get("tool_calls") and not message["content"]
    return message | {"thinking": thoughts} if told else message


def _with_object(function: dict[str, Any]) -> dict[str, Any]:
    try:
        return function | {"arguments": json.loads(function.get("arguments") or "{}")}
    except ValueError:
        return function


def _with_instructions(messages: list[Message], tools: list[dict[str, Any]], takes_system: bool) -> list[Message]:
    """The tools told in the system message; where a template takes none, before what the user says first."""
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    told = TOOL_INSTRUCTIONS.format(tools=listed)
    first, *others = messages
    if first["role"] in ("system", "developer"):
        return [first | {"content": f"{first['content']}\n\n{told}"}, *others]
    if not takes_system and first["role"] == "user":
        return [first | {"content": f"{told}\n\n{first['content']}"}, *others]
    return [{"role": "system", "content": told}, *messages]


def _without_tool_messages(messages: list[Message]) -> list[Message]:
    """Calls and their results as text, for templates that know no such messages.

    What follows a result is of the same turn of the user, as many templates want the roles to alternate.
    """
    shown: list[Message] = []
    after_result = False
    for message in messages:
        follows, after_result = after_result, message["role"] == "tool"
        if after_result:
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            message = {"role": "user", "content": text}
        elif calls := message.get("tool_calls"):
            texts = [
                json.dumps({key: call["function"].get(key) for key in ("name", "arguments")}, ensure_ascii=False)
                for call in calls
            ]
            written = [f"<tool_call>\n{text}\n</tool_call>" for text in texts]
            message = {"role": "assistant", "content": "\n".join(filter(None, [message["content"], *written]))}
        if follows and message["role"] == "user":
            message = message | {"content": f"{shown.pop()['content']}\n{message['content']}"}
        shown.append(message)
    return shown
