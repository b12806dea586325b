"""DrawStep: the end of a step with prompts, on buffers that stay, so that CUDA graphs can replay it."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from lightllm.common.basemodel.cuda_graph import make_runner
from lightllm.common.basemodel.layer_infer.template.residual import Attended
from lightllm.common.sampling.sampler import Sampled
from lightllm.server.router.model_infer.batch_builder import Parts, StepArrays


class DrawStep:
    """Logits and draw of rows that want no more, from what stays where it is of a step.

    The host sends three numbers a line with the step. Padding draws for the row of the ReqTable that is no request's.
    """

    def __init__(self, parts: Parts, attended: Callable[[], Attended], columns: Tensor, sizes: Sequence[int]):
        """attended: gives what is drawn from. columns int32: `numbers` are sent to its end. sizes: numbers of lines for
        which CUDA graphs are captured; none: all runs eagerly."""
        self._parts, self._attended = parts, attended
        self._columns = columns
        self._drawn = torch.zeros(len(columns) // 3 * 2, dtype=torch.int32, device=columns.device)
        self._padding = np.array([[0], [parts.req_table.max_rows], [0]], dtype=np.int32)
        self.run = make_runner(self.body, sizes)

    def numbers(self, step: StepArrays, lines: int) -> np.ndarray:
        """int32 [3 * lines]: of the rows that are sampled the places in `attended`, the numbers, the output_index."""
        columns = np.stack((step.sampled_tokens, step.sampled_rows, step.output_index))
        return np.concatenate((columns, self._padding.repeat(lines - columns.shape[1], 1)), 1).reshape(-1)

    def __call__(self, lines: int) -> Sampled:
        self.run(lines)
        return Sampled(self.drawn(lines), None)

    def drawn(self, lines: int) -> Tensor:
        """int32 [2, lines]: tokens and the bits of their logprobs."""
        return self._drawn[: 2 * lines].view(2, lines)

    def body(self, lines: int) -> None:
        tokens, rows, output_index = self._columns[-3 * lines :].view(3, lines)
        logits = self._parts.model.logits(self._attended(), tokens)
        self.drawn(lines).copy_(self._parts.sampler.draw(logits, rows, output_index))
