"""How many sequences run at once, and how many tokens the KV pool holds: measured on a GPU, a capped share of memory on
a CPU."""

from dataclasses import dataclass

from lightllm.utils.start_refused import StartRefused

GIB = 1 << 30
CPU_SHARE = 0.3  # of the available host memory, over all ranks
CPU_CAP = 2 * GIB  # over all ranks: pages are touched as tokens come, but they stay
TABLE_SHARE = 0.5  # of the free memory, for the table of slots
LARGE_GPU = 64 * GIB


def default_rows(gpu_memory: int) -> int:
    """Sequences that run at once where the GPU has so many bytes: logits, graphs and the table of slots of a thousand
    take a few GiB, and more would only wait for arithmetic."""
    return 1024 if gpu_memory >= LARGE_GPU else 512


class NotEnoughMemory(StartRefused, RuntimeError):
    """What is asked for does not fit, or nothing useful does; the message holds the arithmetic."""


def check_rows(rows: int, max_len: int, free: int) -> None:
    """NotEnoughMemory if the slots of `rows` sequences of up to `max_len` tokens fill over half of `free` bytes."""
    fit = int(free * TABLE_SHARE) // (4 * max_len)
    if rows > fit:
        raise NotEnoughMemory(
            f"--running_max_req_size {rows} does not fit: {rows} sequences x {max_len} tokens (--max_req_total_len) x "
            f"4 bytes = {4 * rows * max_len / GIB:.2f} GiB for the table of their slots, {free / GIB:.2f} GiB free; at "
            f"most {fit} fit"
        )


@dataclass(frozen=True)
class PoolSize:
    tokens: int
    arithmetic: str  # one line for the log


def gpu_pool(free_before: int, free_after: int, mem_fraction: float, bytes_per_token: int) -> PoolSize:
    """Tokens for what a GPU has left.

    free_before and free_after: bytes free before and after CUDA graphs were captured and the largest step was run once;
    torch keeps the memory of that step for later ones, so free_after is what nobody will need.
    """
    usable = int(free_after * mem_fraction)
    tokens = usable // bytes_per_token
    return _useful(
        tokens,
        f"{free_before / GIB:.2f} GiB free - {(free_before - free_after) / GIB:.2f} GiB for the largest step and graphs"
        f" = {free_after / GIB:.2f} GiB; x {mem_fraction} / {bytes_per_token} bytes a token = {tokens} tokens",
    )


def cpu_pool(available: int, ranks: int, most_tokens: int, bytes_per_token: int) -> PoolSize:
    """Tokens for a share of the host's available bytes, at most `most_tokens`: more than all rows could ever hold."""
    usable = int(min(available * CPU_SHARE, CPU_CAP)) // ranks
    tokens = min(usable // bytes_per_token, most_tokens)
    return _useful(
        tokens,
        f"min({CPU_SHARE} x {available / GIB:.2f} GiB available, {CPU_CAP / GIB:.0f} GiB) / {ranks} ranks / "
        f"{bytes_per_token} bytes a token, at most {most_tokens} = {tokens} tokens",
    )


def _useful(tokens: int, arithmetic: str) -> PoolSize:
    if tokens < 2:
        raise NotEnoughMemory(f"no memory is left for the KV pool: {arithmetic}; a request needs 2 or more")
    return PoolSize(tokens, arithmetic)


def asked_pool(asked: int, limit: int, bytes_per_token: int) -> PoolSize:
    """The size a flag asks for; NotEnoughMemory if its bytes exceed `limit`, those that are free for it."""
    size = f"{asked} tokens x {bytes_per_token} bytes = {asked * bytes_per_token / GIB:.2f} GiB"
    if asked * bytes_per_token > limit:
        raise NotEnoughMemory(f"--max_total_token_num {asked} does not fit: {size}, {limit / GIB:.2f} GiB free")
    return PoolSize(asked, f"{size} of {limit / GIB:.2f} GiB free (--max_total_token_num)")
