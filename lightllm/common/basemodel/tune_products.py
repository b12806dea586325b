"""At the first start with a shape or a GPU that no table knows, products of few lines are timed against the library."""

from collections.abc import Callable, Iterable
from dataclasses import astuple
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from lightllm.common.basemodel.triton_kernel.rmsnorm import rmsnorm
from lightllm.common.basemodel.triton_kernel.skinny_linear import (
    CANDIDATES,
    MOST_LINES,
    SkinnyConfig,
    forget_tables,
    skinny_linear,
)
from lightllm.common.triton_utils.kernel_tables import add_to_kernel_table, kernel_table
from lightllm.common.triton_utils.timing import graph_microseconds
from lightllm.utils.log_utils import init_logger

logger = init_logger(__name__)

KERNEL = "skinny_linear"
LINES = (1, MOST_LINES)  # for which a configuration is looked for
MARGIN = 0.98  # of the library's time, from which on a kernel of ours is taken
WORTH = 1 << 21  # numbers in a weight: with fewer the product takes no time to speak of
EPS = 1e-6
NORM_BLOCKS = 64  # of the product before, whose sums of squares ours reads for the norm
TIMED_BYTES = 3e8  # of copies of a weight, several times a GPU's cache


def tune_products(weights: Iterable[Tensor], progress: Callable[[float, float, str], None]) -> None:
    """Finds configurations for these weights' shapes on their GPU and keeps them in the cache folder.

    progress hears (shapes done, shapes in all, what).
    """
    suitable = [w for w in weights if w.is_cuda and w.dtype == torch.bfloat16 and w.dim() == 2 and w.numel() >= WORTH]
    if not suitable:
        return
    device = suitable[0].device
    known = kernel_table(KERNEL, device)
    shapes = sorted({(w.shape[0], w.shape[1]) for w in suitable})
    missing = {name: shape for shape in shapes if (name := f"{shape[0]}x{shape[1]}") not in known}
    for done, (name, (outputs, inputs)) in enumerate(missing.items()):
        progress(done, len(missing), f"tuning products with {name}")
        found = {str(lines): tune(outputs, inputs, lines, device)[0] for lines in LINES}
        add_to_kernel_table(KERNEL, device, {name: {lines: best for lines, best in found.items() if best}})
    if missing:
        progress(len(missing), len(missing), "tuning products")
        logger.info("products of few lines tuned for %s", ", ".join(missing))
        forget_tables()
        torch.cuda.empty_cache()


def tune(outputs: int, inputs: int, lines: int, device: torch.device) -> tuple[list | None, float, float]:
    """(the fields of the best configuration, None if the library is as good; microseconds of the library and of the
    best). Products are timed as in a layer, for a launch may overlap with the kernel before it: the library behind
    a norm of the lines, ours with the norm as part of it."""
    copies = max(2, min(40, int(TIMED_BYTES / (2 * outputs * inputs))))
    weights = torch.randn(copies, outputs, inputs, dtype=torch.bfloat16, device=device)
    x = torch.randn(lines, inputs, dtype=torch.bfloat16, device=device)
    squares = torch.ones(NORM_BLOCKS, lines, device=device)

    def library(w: Tensor) -> None:
        F.linear(rmsnorm(x, weights[0, 0], EPS), w)

    def ours(config: SkinnyConfig, w: Tensor) -> None:
        skinny_linear(x, w, None, config, squares, EPS)

    expected = graph_microseconds([partial(library, w) for w in weights])
    fitting = [config for config in CANDIDATES if config.fits(lines, outputs, inputs)]
    times = {config: graph_microseconds([partial(ours, config, w) for w in weights]) for config in fitting}
    if not times:
        return None, expected, expected
    best = min(times, key=times.__getitem__)
    return list(astuple(best)) if times[best] < MARGIN * expected else None, expected, times[best]
