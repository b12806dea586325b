"""JSON checked character by character, so that what was passed on is always the beginning of a valid value."""

import json
import re

SPACE = " \t\n\r"
CLOSER = {"{": "}", "[": "]"}
ESCAPES = '"\\/bfnrt'
WORDS = ("true", "false", "null")
NUMBER_BEGUN = re.compile(r"-?(?:0|[1-9]\d*)?(?:(?<=\d)\.\d*)?(?:(?<=\d)[eE][+-]?\d*)?", re.ASCII)
HEX = "0123456789abcdefABCDEF"


class JsonScanner:
    """Reads one object or array.

    done: it is complete. broken: why it can be no JSON any more; "" while it can.
    """

    def __init__(self) -> None:
        self.done = False
        self.broken = ""
        self._in_string = False
        self._open: list[str] = []
        self._expects = "value"
        self._is_key = False
        self._scalar = ""
        self._escape = 0  # characters of an escape that are still to come; -1: the one that says which

    def feed(self, text: str) -> tuple[str, str]:
        """What of the text belongs to the value, and what is left: behind its end, or from where it is no JSON.

        The value is given as valid JSON has it: a raw line break in a string becomes its escape.
        """
        if self.done or self.broken:
            return "", text
        taken: list[str] = []
        for place, character in enumerate(text):
            try:
                taken.append(self._take(character))
            except ValueError as error:
                self.broken = str(error)
                return "".join(taken), text[place:]
            if self.done:
                return "".join(taken), text[place + 1 :]
        return "".join(taken), ""

    def _take(self, character: str) -> str:
        """The character as valid JSON has it. Raises ValueError if no valid JSON has it here."""
        if self._in_string:
            return self._take_in_string(character)
        if self._scalar and (character in SPACE or character in ",}]"):
            json.loads(self._scalar)
            self._scalar = ""
            self._expects = "end"
        if self._scalar:
            self._take_scalar(character)
        elif character not in SPACE:
            self._take_sign(character)
        return character

    def _take_sign(self, character: str) -> None:
        expects = self._expects
        if character in "}]":
            if not self._open or self._open[-1] != character or expects not in ("end", "first"):
                raise ValueError(f"unexpected {character}")
            self._open.pop()
            self._expects = "end"
            self.done = not self._open
        elif character == "," and expects == "end":
            self._expects = "key" if self._open[-1] == "}" else "value"
        elif character == ":" and expects == "colon":
            self._expects = "value"
        elif character == '"' and (expects in ("key", "value") or expects == "first") and self._open:
            self._in_string = True
            self._is_key = expects == "key" or (expects == "first" and self._open[-1] == "}")
        elif character in CLOSER and self._takes_value():
            self._open.append(CLOSER[character])
            self._expects = "first"
        elif self._open and self._takes_value() and character not in ",:":
            self._take_scalar(character)
        else:
            raise ValueError(f"unexpected {character}")

    def _take_scalar(self, character: str) -> None:
        self._scalar += character
        if not NUMBER_BEGUN.fullmatch(self._scalar) and not any(word.startswith(self._scalar) for word in WORDS):
            raise ValueError(f"unexpected {character}")

    def _takes_value(self) -> bool:
        return self._expects == "value" or (self._expects == "first" and self._open[-1] == "]")

    def _take_in_string(self, character: str) -> str:
        if self._escape:
            if self._escape > 0 and character in HEX:
                self._escape -= 1
            elif self._escape < 0 and (character in ESCAPES or character == "u"):
                self._escape = 4 if character == "u" else 0
            else:
                raise ValueError("no such escape")
        elif character == "\\":
            self._escape = -1
        elif character == '"':
            self._in_string = False
            self._expects = "colon" if self._is_key else "end"
        elif character < " ":
            return json.dumps(character)[1:-1]
        return character
