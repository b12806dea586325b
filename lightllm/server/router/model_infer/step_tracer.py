"""StepTracer: torch profiler traces of a worker's steps."""

from datetime import datetime
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from lightllm.utils.log_utils import init_logger

logger = init_logger(__name__)


class StepTracer:
    """Writes `rank<r>-<time>.json.gz`, for Perfetto or chrome://tracing, into a folder that is made if need be."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self._profile: profile | None = None

    def trace(self, on: bool) -> None:
        """Begins a trace, or ends it and writes it; what is so already stays so."""
        if on == (self._profile is not None):
            return
        if on:
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
            self._profile = profile(activities=activities)
            self._profile.start()
            return
        finished, self._profile = self._profile, None
        assert finished is not None
        finished.stop()
        path = self._folder / f"rank{self._rank}-{datetime.now():%Y%m%d-%H%M%S-%f}.json.gz"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            finished.export_chrome_trace(str(path))
        except OSError as error:
            logger.error("the trace is lost: %s", error)
            return
        logger.info("trace written to %s", path)
