"""Request: one sequence as the router sees it, from its arrival to its end."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from lightllm.server.core.messages import GenerateRequest
from lightllm.server.core.sampling_params import SamplingParams

WAITING = -1  # the row of a request that has none yet


@dataclass(slots=True, eq=False)
class Request:
    """Touched at admission and end only; what changes each step lives in the scheduler's columns."""

    sequence_id: int
    prompt_ids: bytes  # int32
    prompt_len: int
    sampling: SamplingParams
    row: int = WAITING
    stops: list[list[int]] = field(default_factory=list)  # token sequences that end the output
    tail: deque[int] = field(default_factory=deque)  # the last output ids, as many as the longest stop needs

    @staticmethod
    def sequences_of(request: GenerateRequest) -> list[Request]:
        """The n sequences that a client's request asks for."""
        stops = [stop for stop in request.sampling.stop_sequences if not isinstance(stop, str)]
        return [
            Request(
                sequence_id=request.id | sample,
                prompt_ids=request.prompt_ids,
                prompt_len=len(request.prompt_ids) // 4,
                sampling=request.sampling,
                stops=stops,
                tail=deque(maxlen=max(map(len, stops), default=0)),
            )
            for sample in range(request.sampling.n or 1)
        ]

    @property
    def limit(self) -> int:
        """Output tokens at most."""
        assert self.sampling.max_new_tokens is not None, "the front resolves max_new_tokens"
        return self.sampling.max_new_tokens

    def stops_with(self, token: int) -> bool:
        """Takes the next output id; whether a stop sequence is complete."""
        self.tail.append(token)
        tail = list(self.tail)
        return any(tail[-len(stop) :] == stop for stop in self.stops)
