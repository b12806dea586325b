"""The model worker process of one rank: plans in, results out."""

import gc
import os
import queue
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import torch

from lightllm.distributed.parallel_state import ParallelState
from lightllm.server.core.channel import Inbox, Outbox, wait
from lightllm.server.core.messages import Compiled, CompileRequest, ForgetRequest, ProfileRequest, StepPlan, StepResult
from lightllm.server.core.server_args import ServerArgs
from lightllm.server.router.model_infer.model_runner import ModelRunner
from lightllm.server.router.model_infer.pending import Pending
from lightllm.server.router.model_infer.step_tracer import StepTracer
from lightllm.utils.device_utils import Platform
from lightllm.utils.log_utils import set_log_level
from lightllm.utils.process_utils import Child


def main(child: Child) -> None:
    """Loads this rank's share of the model, says ready, then runs plans until the launcher says stop."""
    args = ServerArgs(**child.config["args"])
    rank: int = child.config["rank"]
    socket_dir = child.config["socket_dir"]
    set_log_level(args.log_level)
    platform = Platform.detect(args.device, rank)
    if platform.device.type == "cpu" and args.tp > 1:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // args.tp))
    inbox = Inbox(socket_dir, f"worker{rank}", [StepPlan, CompileRequest, ForgetRequest, ProfileRequest])
    parallel = ParallelState.init(
        rank, args.tp, platform.dist_backend, Path(socket_dir) / "tp_store", args.enable_ep_moe
    )
    runner, info = ModelRunner.from_args(args, parallel, platform, child.progress)
    parallel.limit_waiting(args.nccl_timeout)
    gc.collect()
    gc.freeze()
    child.ready(msgspec.structs.asdict(info))
    router = Outbox(socket_dir, "router")
    send = router.send if rank == 0 else lambda result: None
    on_cpu = platform.device.type == "cpu"  # where a launched step is a finished one
    collect = (lambda pending: send(pending.result())) if on_cpu else _collector_thread(send, child)
    tell_compiled = _compiled_teller(Outbox(socket_dir, "router"))
    tracer = StepTracer(Path(args.profile_dir), rank) if args.profile_dir else None
    while True:
        ready = wait(inbox, child.control_fd)
        if child.control_fd in ready and child.receive().get("stop"):
            if tracer is not None:
                tracer.trace(False)
            return
        for message in inbox.receive():
            match message:
                case StepPlan():
                    collect(runner.launch(message))
                case CompileRequest(key, grammar):
                    runner.grammars.compile(key, grammar, partial(tell_compiled, key))
                case ForgetRequest(key):
                    runner.grammars.forget(key)
                case ProfileRequest() if tracer is not None:
                    tracer.trace(message.on)


def _compiled_teller(router: Outbox) -> Callable[[int, str], None]:
    """For any thread."""
    lock = threading.Lock()

    def tell(key: int, failure: str) -> None:
        with lock:
            router.send(Compiled(key, failure))

    return tell


def _collector_thread(send: Callable[[StepResult], None], child: Child) -> Callable[[Pending], None]:
    """Waits for the oldest step in a thread while the main thread launches the next; a dead device ends the process."""
    launched: queue.SimpleQueue[Pending] = queue.SimpleQueue()

    def collect() -> None:
        try:
            while True:
                send(launched.get().result())
        except Exception as error:
            child.fail(f"{type(error).__name__}: {error}")

    threading.Thread(target=collect, name="collector", daemon=True).start()
    return launched.put
