"""Schedulers without a server: a pool, rows and limits of a step, of whatever size a test wants."""

from typing import Any

from lightllm.server.core.messages import EngineInfo
from lightllm.server.core.server_args import ServerArgs
from lightllm.server.router.scheduler import Scheduler


def make_scheduler(
    pool: int = 1000,
    rows: int = 8,
    budget: int = 64,
    chunk: int = 16,
    plans: int = 2,
    queue: int = 100,
    longest: int = 500,
    policy: str | None = None,
    prompt_cache: bool = True,
    plans_of_short_steps: int = 0,
    **flags: Any,
) -> Scheduler:
    """longest: tokens of one request. policy: by name; None is conservative. flags: of the server."""
    limits = dict(batch_max_tokens=budget, chunked_prefill_size=chunk, mixed_prefill_size=budget, max_queue=queue)
    args = ServerArgs(
        **limits | flags, schedule_policy=policy or "conservative", disable_dynamic_prompt_cache=not prompt_cache
    )
    engine = EngineInfo("llama", "float32", "CPU", 1 << 20, [], pool, longest, rows)
    return Scheduler(args, engine, plans, plans_of_short_steps=plans_of_short_steps)
