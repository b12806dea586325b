"""Pending: a launched step whose numbers are still on their way to the host."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lightllm.common.sampling.sampler import Sampled
from lightllm.server.core.messages import PromptLogprobs, StepPlan, StepResult, TopLogprobs, unpack


@dataclass(frozen=True)
class PromptScores:
    """log P(id | ids before it) of positions of a row's prompt, from `start` on, and the k likeliest ids there."""

    row: int
    start: int
    logprobs: Tensor  # float32 [count]
    top_ids: Tensor  # int64 [count, k]
    top_logprobs: Tensor  # float32 [count, k]


@dataclass(frozen=True)
class Pending:
    """`result` waits for the step and gives its numbers, among them the seconds between its events; on a CPU there are
    none, and nothing to wait for. sent: host memory that the device reads and writes until then."""

    collect: Callable[[float], StepResult]
    begun: torch.cuda.Event | None = None
    done: torch.cuda.Event | None = None
    sent: Tensor | None = None

    def result(self) -> StepResult:
        if self.begun is None or self.done is None:
            return self.collect(0.0)
        self.done.synchronize()
        return self.collect(1e-3 * self.begun.elapsed_time(self.done))


def moment(device: torch.device) -> torch.cuda.Event | None:
    """When the device comes to what is launched next; None on a CPU."""
    if device.type == "cpu":
        return None
    event = torch.cuda.Event(enable_timing=True, blocking=True)
    event.record()
    return event


def launched(
    step: int,
    device: torch.device,
    begun: torch.cuda.Event | None,
    rows: np.ndarray,
    sampled: Sampled | None,
    prompt: Sequence[PromptScores] = (),
    refused: dict[int, str] | None = None,
    sent: Tensor | None = None,
) -> Pending:
    """The step's results, copied behind the work queued so far unless the step writes them to the host itself. rows
    int32 [S] are the first of those of `sampled`. A step on a GPU that has none is done no sooner than its work, which
    began at the moment `begun`.

    refused: rows whose request asks for what cannot be done, and why. sent: see Pending.
    """
    columns: list[Tensor] = []
    if sampled is not None:
        columns.append(sampled.drawn)
        if sampled.top:
            columns += [sampled.top.ids.to(torch.int32), sampled.top.logprobs]
    scores = [tensor for s in prompt for tensor in (s.logprobs, s.top_ids.to(torch.int32), s.top_logprobs)]
    on_host = [tensor if tensor.is_cpu else tensor.to("cpu", non_blocking=True) for tensor in (*columns, *scores)]

    def collect(seconds: float) -> StepResult:
        arrays = [tensor.numpy() for tensor in on_host]
        (tokens, logprobs), *top = arrays[: len(columns)] or [_NONE]
        parts = arrays[len(columns) :]
        return StepResult(
            step=step,
            rows=rows.tobytes(),
            tokens=tokens[: len(rows)].tobytes(),
            logprobs=logprobs[: len(rows)].tobytes(),
            top=_top(sampled, *top) if sampled is not None and top else [],
            prompt=[
                PromptLogprobs(s.row, s.start, *(part.tobytes() for part in parts[3 * i : 3 * i + 3]))
                for i, s in enumerate(prompt)
            ],
            failed=[],
            device_seconds=seconds,
            refused=list((refused or {}).items()),
        )

    return Pending(collect, begun, moment(device), sent)


_NONE = np.empty((2, 0), dtype=np.int32)


def _top(sampled: Sampled, ids: np.ndarray, logprobs: np.ndarray) -> list[TopLogprobs]:
    assert sampled.top is not None
    return [
        TopLogprobs(line, ids[i, :count].tobytes(), logprobs[i, :count].tobytes())
        for i, (line, count) in enumerate(zip(sampled.top.lines, sampled.top.counts))
    ]


def failed(plan: StepPlan, reason: str) -> Pending:
    """A step that could not run: every row of it ends with `reason`, and every row that it should have set up."""
    rows = dict.fromkeys((*unpack(plan.rows, np.int32).tolist(), *(new.row for new in plan.new_rows)))
    result = StepResult(plan.step, b"", b"", b"", [], [], [(row, reason) for row in rows])
    return Pending(lambda seconds: result)
