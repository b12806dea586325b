"""DrawStep: the end of a step with prompts, on buffers that stay, so that CUDA graphs can replay it."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from lightllm.common.basemodel.basemodel import BaseModel
from lightllm.common.basemodel.cuda_graph import make_runner
from lightllm.common.basemodel.layer_infer.template.residual import Attended
from lightllm.common.sampling.sampler import Sampled, Sampler
from lightllm.common.sampling.transfer import copy_to


class DrawStep:
    """Logits and draw of rows that want no more, from what stays where it is of a step.

    The host sends three numbers a line. Padding draws for the row of the ReqTable that is no request's.
    """

    def __init__(
        self,
        model: BaseModel,
        sampler: Sampler,
        attended: Callable[[], Attended],
        padding_row: int,
        sizes: Sequence[int],
    ):
        """attended: gives what is drawn from. sizes: numbers of lines for which CUDA graphs are captured; none: all
        runs eagerly."""
        device, max_lines = sampler.table.device, max(sizes, default=padding_row)
        self._model, self._sampler, self._attended = model, sampler, attended
        self._columns = torch.zeros(3 * max_lines, dtype=torch.int32, device=device)
        self._drawn = torch.zeros(2 * max_lines, dtype=torch.int32, device=device)
        self._padding = np.array([[0], [padding_row], [0]], dtype=np.int32)
        self._run = make_runner(self.body, sizes)

    def padded(self, count: int) -> int | None:
        """See Runner."""
        return self._run.padded(count)

    def __call__(self, tokens: np.ndarray, rows: np.ndarray, output_index: np.ndarray, lines: int) -> Sampled:
        """tokens: where the rows' last ones are in `attended`; int32 [n] each, padded to `lines`."""
        columns = np.concatenate(
            (np.stack((tokens, rows, output_index)), self._padding.repeat(lines - len(rows), 1)), 1
        )
        copy_to(self._columns[: 3 * lines], columns.reshape(-1))
        self._run(lines)
        return Sampled(self.drawn(lines), None)

    def drawn(self, lines: int) -> Tensor:
        """int32 [2, lines]: tokens and the bits of their logprobs."""
        return self._drawn[: 2 * lines].view(2, lines)

    def body(self, lines: int) -> None:
        tokens, rows, output_index = self._columns[: 3 * lines].view(3, lines)
        logits = self._model.logits(self._attended(), tokens)
        self.drawn(lines).copy_(self._sampler.draw(logits, rows, output_index))
