"""Token batches in, text batches out: columns, fronts, stops, ends, failures."""

import numpy as np
import pytest

from lightllm.server.core.messages import (
    FRONT_SHIFT,
    Ended,
    Finish,
    NewSequence,
    PromptLogprobs,
    Started,
    StopRequest,
    TokenBatch,
    TopLogprobs,
    pack,
    unpack,
)
from lightllm.server.detokenization.manager import DetokenizationManager

A, B, C = 8, 16, (1 << FRONT_SHIFT) | 8  # two sequences of front 0, one of front 1


@pytest.fixture
def manager(byte_level):
    return DetokenizationManager(byte_level)


@pytest.fixture
def new(byte_level, params):
    def build(sequence_id, **given):
        return NewSequence(sequence_id, pack(byte_level.encode("A"), np.int32), params(**given))

    return build


def token_batch(rows=(), new=(), ended=(), top=(), prompt=(), started=()):
    """rows: (sequence, token, finish)."""
    ids, tokens, finishes = zip(*rows) if rows else ((), (), ())
    return TokenBatch(
        sequence_ids=pack(ids, np.int64),
        tokens=pack(tokens, np.int32),
        logprobs=pack([-float(token) for token in tokens], np.float32),
        finishes=pack(finishes, np.uint8),
        top=list(top),
        prompt=list(prompt),
        new=list(new),
        started=list(started),
        ended=list(ended),
        at=0.0,
    )


def rows_of(batch):
    columns = (batch.sequence_ids, np.int64), (batch.tokens, np.int32), (batch.logprobs, np.float32)
    lists = [unpack(*column).tolist() for column in columns]
    return list(zip(*lists, batch.finishes, batch.texts, strict=True))


def ids_of(byte_level, text):
    return byte_level.encode(text, add_special_tokens=False)


def test_rows_go_to_their_fronts_with_their_logprobs(manager, new, byte_level):
    x, y, z = ids_of(byte_level, "xyz")
    top = [TopLogprobs(i, pack([i], np.int32), pack([-0.5], np.float32)) for i in (0, 1, 2)]
    prompt = [PromptLogprobs(C, 1, pack([-1.0], np.float32), b"", b"")]
    batch = token_batch([(C, x, 0), (A, y, 2), (B, z, 0)], [new(A), new(B), new(C)], top=top, prompt=prompt)
    texts, stops = manager.process(batch)
    assert rows_of(texts[0]) == [(A, y, -y, Finish.LENGTH, "y"), (B, z, -z, Finish.NONE, "z")]
    assert rows_of(texts[1]) == [(C, x, -x, Finish.NONE, "x")]
    assert [(t.index, unpack(t.ids, np.int32)[0]) for t in texts[0].top] == [(0, 1), (1, 2)]
    assert [(t.index, unpack(t.ids, np.int32)[0]) for t in texts[1].top] == [(0, 0)]
    assert (texts[0].prompt, texts[1].prompt, stops) == ([], prompt, [])
    # A has ended: whatever still comes is not shown
    texts, stops = manager.process(token_batch([(A, x, 0), (B, x, 0)]))
    assert [row[0] for row in rows_of(texts[0])] == [B]


def test_what_the_cache_knew_is_told_before_there_is_a_token(manager, new):
    """The router tells it as soon as the prompt is planned."""
    texts, stops = manager.process(token_batch(new=[new(C)], started=[Started(C, 5, 2.5)]))
    assert {front: text.started for front, text in texts.items()} == {1: [Started(C, 5, 2.5)]}
    assert not texts[1].texts and not stops


def test_a_stop_string_ends_the_sequence_once(manager, new, byte_level):
    x, y, z = ids_of(byte_level, "xyz")
    texts, stops = manager.process(token_batch([(A, x, 0)], [new(A, stop_sequences=["yz"])]))
    assert stops == []
    texts, stops = manager.process(token_batch([(A, y, 0)]))
    assert rows_of(texts[0]) == [(A, y, -y, Finish.NONE, "")]
    texts, stops = manager.process(token_batch([(A, z, 0)]))
    assert rows_of(texts[0]) == [(A, z, -z, Finish.STOP, "")]
    assert stops == [StopRequest(A, 3)]
    failed = Ended(A, Finish.ERROR, 500, "too late")
    late = token_batch([(A, x, 0)], ended=[failed], prompt=[PromptLogprobs(A, 0, b"", b"", b"")])
    assert manager.process(late) == ({}, [])


def test_a_stop_string_in_the_router_s_last_token_needs_no_stop_request(manager, new, byte_level):
    x, y = ids_of(byte_level, "xy")
    rows = [(A, x, 0), (A, y, Finish.LENGTH)]
    texts, stops = manager.process(token_batch(rows, [new(A, stop_sequences=["xy"])]))
    assert [row[3:] for row in rows_of(texts[0])] == [(Finish.NONE, ""), (Finish.STOP, "")]
    assert stops == []


def test_ends_without_a_token(manager, new, byte_level):
    refused = Ended(C, Finish.ERROR, 429, "the queue is full")
    failed = Ended(A, Finish.ERROR, 500, "device")
    aborted = Ended(B, Finish.ABORT, 0, "")
    (x,) = ids_of(byte_level, "x")
    manager.process(token_batch([(A, x, 0), (B, x, 0)], [new(A), new(B)]))
    texts, stops = manager.process(token_batch(ended=[refused, failed, aborted]))
    assert {front: batch.ended for front, batch in texts.items()} == {0: [failed], 1: [refused]}
    assert stops == []
    assert manager.process(token_batch([(A, x, 0), (B, x, 0)])) == ({}, [])


def test_a_failure_ends_its_sequence_only(manager, new, byte_level):
    (x,) = ids_of(byte_level, "x")
    manager.process(token_batch([(A, x, 0), (B, x, 0)], [new(A), new(B)]))
    texts, stops = manager.process(token_batch([(A, -1, 0), (B, x, 0)]))  # no tokenizer takes a negative id
    assert [(row[0], row[4]) for row in rows_of(texts[0])] == [(B, "x")]
    assert [(end.sequence_id, end.finish, end.status) for end in texts[0].ended] == [(A, Finish.ERROR, 500)]
    assert stops == [StopRequest(A, 1)]
    texts, stops = manager.process(token_batch([(A, x, 0), (B, x, Finish.STOP)]))
    assert [row[0] for row in rows_of(texts[0])] == [B]


def test_a_sequence_that_cannot_start_ends_alone(manager, new, byte_level, params):
    (x,) = ids_of(byte_level, "x")
    broken = NewSequence(A, b"\0", params())
    texts, stops = manager.process(token_batch([(A, x, 0), (B, x, 0)], [broken, new(B)]))
    assert [row[0] for row in rows_of(texts[0])] == [B]
    assert [(end.sequence_id, end.status) for end in texts[0].ended] == [(A, 500)]
    assert stops == [StopRequest(A, 0)]
