"""DrawStep: the end of a step with prompts, on buffers that stay, so that CUDA graphs can replay it."""

from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from lightllm.common.basemodel.cuda_graph import make_runner
from lightllm.common.basemodel.layer_infer.template.residual import Attended
from lightllm.common.basemodel.triton_kernel.host_memory import ADDRESS, deliver
from lightllm.server.router.model_infer.batch_builder import Parts, StepArrays


class DrawStep:
    """Logits and draw of rows that want no more, from what stays where it is of a step.

    The host sends three numbers a line with the step, and where the answer goes. Padding draws for the row of the
    ReqTable that is no request's.
    """

    def __init__(self, parts: Parts, attended: Callable[[], Attended], letter: Tensor, sizes: Sequence[int]):
        """attended: gives what is drawn from. letter int32: an address and `numbers` are sent to its end. sizes: of
        lines for which CUDA graphs are captured; none: all runs eagerly."""
        self._parts, self._attended = parts, attended
        self._letter = letter
        self._padding = np.array([[0], [parts.req_table.max_rows], [0]], dtype=np.int32)
        self.run = make_runner(self.body, sizes)

    def numbers(self, step: StepArrays, lines: int) -> np.ndarray:
        """int32 [3 * lines]: of the rows that are sampled the places in `attended`, the numbers, the output_index."""
        columns = np.stack((step.sampled_tokens, step.sampled_rows, step.output_index))
        return np.concatenate((columns, self._padding.repeat(lines - columns.shape[1], 1)), 1).reshape(-1)

    def body(self, lines: int) -> None:
        address, columns = self._letter[-ADDRESS - 3 * lines :].split((ADDRESS, 3 * lines))
        tokens, rows, output_index = columns.view(3, lines)
        logits = self._parts.model.logits(self._attended(), tokens)
        deliver(self._parts.sampler.draw(logits, rows, output_index), address)
