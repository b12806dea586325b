"""Request: one sequence as the router sees it, from its arrival to its end."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from lightllm.common.kv_cache_mem_manager.radix_cache import Node
from lightllm.server.core.messages import GenerateRequest, sample_of
from lightllm.server.core.sampling_params import SamplingParams
from lightllm.server.router.output_lengths import length_class

WAITING = -1  # the row of a request that has none yet


@dataclass(slots=True, eq=False)
class Request:
    """Touched at admission, pause and end only; what changes each step lives in the columns of RowTable.

    ids int32: the prompt and, after a pause, the `generated` output tokens. arrival: its number, for all time. due:
    when it is too late to begin, in seconds of the scheduler's clock. passed: requests that went ahead. hint: what the
    admission policy wants to see of it. expected: output tokens that the policy foresaw.
    number: the policy's own, of its admission. match: what the prefix cache told last,
    the node at which its longest known prefix ends and the length; None: not asked yet.
    """

    sequence_id: int
    ids: np.ndarray
    prompt_len: int
    sampling: SamplingParams
    open_ended: bool
    client: str
    priority: int
    kind: int
    arrival: int
    uses_cache: bool
    row: int = WAITING
    generated: int = 0
    paused: bool = False
    due: float = float("inf")
    passed: int = 0
    hint: np.ndarray = field(default_factory=lambda: np.empty(0))
    expected: int = 0
    number: int = 0
    match: tuple[Node, int] | None = None
    stops: list[list[int]] = field(default_factory=list)  # token sequences that end the output
    tail: deque[int] = field(default_factory=deque)  # the last output ids, as many as the longest stop needs

    @staticmethod
    def sequences_of(request: GenerateRequest, arrival: int, prompt_cache: bool) -> list[Request]:
        """The n sequences that a client's request asks for, which arrive with the numbers from `arrival` on.

        prompt_cache: whether there is one, which a request need not use.
        """
        ids = np.frombuffer(request.prompt_ids, np.int32)
        stops = [stop for stop in request.sampling.stop_sequences if not isinstance(stop, str)]
        return [
            Request(
                sequence_id=request.id | sample,
                ids=ids,
                prompt_len=len(ids),
                sampling=request.sampling,
                open_ended=request.open_ended,
                client=request.client,
                priority=request.priority,
                kind=length_class(request.sampling, request.open_ended),
                arrival=arrival + sample,
                uses_cache=prompt_cache and not request.sampling.disable_prompt_cache,
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

    @property
    def scores_prompt(self) -> bool:
        """Whether the prompt's logprobs are still to be told: then all of it is computed, whatever the cache holds."""
        asked = self.sampling.prompt_logprobs is not None and sample_of(self.sequence_id) == 0
        return asked and not self.generated

    def stops_with(self, token: int) -> bool:
        """Takes the next output id; whether a stop sequence is complete."""
        self.tail.append(token)
        tail = list(self.tail)
        return any(tail[-len(stop) :] == stop for stop in self.stops)
