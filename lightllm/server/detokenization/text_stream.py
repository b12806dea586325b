"""Ids to text one by one: whole characters come out at once, half a character waits for its other bytes."""

import codecs
from collections.abc import Callable, Sequence

from lightllm.server.tokenizer import Pieces, Tokenizer

REPLACEMENT = "\ufffd"
LONGEST_CHARACTER = 4  # bytes of a UTF-8 character, so also the tokens that it can be spread over


def open_stream(
    tokenizer: Tokenizer, prompt_tail: list[int], hidden: frozenset[int], spaces_between_special_tokens: bool
) -> "PieceStream | WindowStream":
    """A stream that goes on where the prompt ended: whether a leading space shows depends on what precedes it.

    prompt_tail: the last ids of the prompt, without the `hidden` ones.
    hidden: ids that the caller will not feed.
    """
    context = [id for id in prompt_tail if id not in hidden]
    if tokenizer.pieces is not None:
        return PieceStream(tokenizer.pieces, tokenizer.strips_space, context)
    return WindowStream(
        lambda ids: tokenizer.decode(ids, spaces_between_special_tokens=spaces_between_special_tokens), context
    )


class PieceStream:
    """For tokenizers whose text is the joined pieces of its ids: UTF-8 decoding of their bytes.

    Bytes that can never become a character show as U+FFFD at once: one for each broken sequence in byte-level
    tokenizers, one for each byte where bytes are tokens, as tokenizers' decoders do. (Where a run of byte tokens holds
    both whole and broken characters, tokenizers' ByteFallback shows none of them; here the whole ones stay.)
    """

    def __init__(self, pieces: Pieces, strips_space: bool, context: list[int]):
        self._pieces = pieces
        self._errors = "replace" if pieces.byte_level else "replace_each_byte"
        self._pending = b""
        self._at_start = strips_space
        self._shown_before = ""
        for id in context:
            self.feed(id)
        self._shown_before = self._broken(self._pending)

    def feed(self, id: int) -> str:
        """The text that this id completes; "" while it only begins a character."""
        piece = self._pieces[id]
        if self._pending or isinstance(piece, bytes):
            data = self._pending + (piece if isinstance(piece, bytes) else piece.encode())
            piece, used = codecs.utf_8_decode(data, self._errors, False)
            self._pending = data[used:]
        return self._released(piece) if self._at_start or self._shown_before else piece

    def feed_all(self, ids: Sequence[int]) -> str:
        """What `feed` gives for one after the other."""
        if not (self._pending or self._at_start or self._shown_before):
            pieces = [self._pieces[id] for id in ids]
            whole = [piece for piece in pieces if isinstance(piece, str)]
            if len(whole) == len(pieces):
                return "".join(whole)
        return "".join(map(self.feed, ids))

    def flush(self) -> str:
        """What is still held, as the tokenizer shows half a character. The stream is over afterwards."""
        return self._released(self._broken(self._pending))

    def _broken(self, data: bytes) -> str:
        return codecs.utf_8_decode(data, self._errors, True)[0]

    def _released(self, text: str) -> str:
        """The first text, without the space that starts a text and the half character that the prompt shows."""
        if text and self._at_start:
            text = text.removeprefix(" ")
            self._at_start = False
        if text and self._shown_before:
            text = text.removeprefix(self._shown_before)
            self._shown_before = ""
        return text


class WindowStream:
    """For any other tokenizer: decodes the last few ids again with each new one and shows what was added."""

    def __init__(self, decode: Callable[[list[int]], str], context: list[int]):
        self._decode = decode
        self._ids = context
        self._held = 0
        self._shown = decode(context)

    def feed(self, id: int) -> str:
        self._ids.append(id)
        self._held += 1
        text = self._decode(self._ids)
        added = text[len(self._shown) :]
        whole = added.rstrip(REPLACEMENT)
        if whole and whole != added:
            self._shown += whole
            self._held = 1  # the end of this token may begin a character
            return whole
        if self._held < LONGEST_CHARACTER and (not added or added.endswith(REPLACEMENT)):
            return ""
        if added:
            # what was just shown is the context of the next ids: it is not empty, so no leading space is lost
            self._ids = self._ids[-self._held :]
            self._shown = self._decode(self._ids)
            self._held = 0
        else:
            del self._ids[-self._held]  # too old to begin a character that is still to come
            self._held -= 1
        return added

    def feed_all(self, ids: Sequence[int]) -> str:
        return "".join(map(self.feed, ids))

    def flush(self) -> str:
        return self._decode(self._ids)[len(self._shown) :]


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return REPLACEMENT * (error.end - error.start), error.end


codecs.register_error("replace_each_byte", _replace_each_byte)
