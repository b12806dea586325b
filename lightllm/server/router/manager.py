"""The router process: requests in, plans out, results in, tokens out. Imports no torch."""

import gc
from functools import partial
from time import monotonic

import msgspec

from lightllm.server.core.channel import Inbox, Outbox, encode, wait
from lightllm.server.core.messages import (
    AbortRequest,
    Compiled,
    CompileRequest,
    EngineInfo,
    ForgetRequest,
    GenerateRequest,
    LoadReport,
    LoadRequest,
    ProfileRequest,
    StepPlan,
    StepResult,
    StopRequest,
)
from lightllm.server.core.server_args import ServerArgs
from lightllm.server.router.compiling import Compiling
from lightllm.server.router.scheduler import Scheduler
from lightllm.utils.log_utils import set_log_level
from lightllm.utils.process_utils import Child

PLANS_IN_FLIGHT = 2
PLANS_OF_SHORT_STEPS = 3


def main(child: Child) -> None:
    """Runs until the launcher says stop. Sleeps on the inbox: while nothing happens it takes no CPU time."""
    args = ServerArgs(**child.config["args"])
    socket_dir = child.config["socket_dir"]
    set_log_level(args.log_level)
    asking = (GenerateRequest, AbortRequest, StopRequest, LoadRequest, ProfileRequest)
    inbox = Inbox(socket_dir, "router", [*asking, StepResult, Compiled])
    detokenizer = Outbox(socket_dir, "detok")
    fronts = [Outbox(socket_dir, f"front{index}") for index in range(args.httpserver_workers)]
    workers = [Outbox(socket_dir, f"worker{rank}") for rank in range(args.tp)]
    command = child.receive()
    if "engine" not in command:
        return
    engine = EngineInfo(**command["engine"])
    scheduler = Scheduler(args, engine, PLANS_IN_FLIGHT, plans_of_short_steps=PLANS_OF_SHORT_STEPS)
    compiling = Compiling(args.tp, args.max_queue, partial(_send_to_all, workers), scheduler.grammars)
    gc.collect()
    gc.freeze()
    child.ready()
    patience = args.nccl_timeout if args.tp > 1 and engine.on_gpu else None
    while True:
        ready = wait(inbox, child.control_fd, timeout=_time_left(scheduler, patience))
        if child.control_fd in ready and child.receive().get("stop"):
            return
        for message in inbox.receive():
            match message:
                case StepResult():
                    scheduler.update(message, monotonic())
                case GenerateRequest() if compiling.needs(message):
                    if reason := compiling.add(message):
                        scheduler.refuse(message, 429, reason)
                case GenerateRequest():
                    scheduler.add(message, monotonic())
                case Compiled():
                    for request in compiling.take(message):
                        if message.failure:
                            scheduler.refuse(request, 400, message.failure)
                        else:
                            scheduler.add(request, monotonic())
                case AbortRequest():
                    compiling.abort(message.id)
                    scheduler.abort(message.id)
                case StopRequest():
                    scheduler.stop(message)
                case LoadRequest():
                    load = scheduler.load()
                    load = msgspec.structs.replace(load, waiting=load.waiting + compiling.waiting)
                    fronts[message.front].send(LoadReport(message.ticket, load))
                case ProfileRequest():
                    _send_to_all(workers, message)
        if _time_left(scheduler, patience) == 0:
            raise TimeoutError(f"a step of {args.tp} ranks took longer than --nccl_timeout {patience:g} s")
        while plan := scheduler.schedule(monotonic()):
            _send_to_all(workers, plan)
        if output := scheduler.take_output():
            detokenizer.send(output)


def _send_to_all(workers: list[Outbox], message: StepPlan | CompileRequest | ForgetRequest | ProfileRequest) -> None:
    encoded = encode(message)
    for worker in workers:
        worker.send_bytes(encoded)


def _time_left(scheduler: Scheduler, patience: float | None) -> float | None:
    """Seconds until the oldest step in flight has taken longer than `patience`; None while there is nothing to time.

    For ranks on GPUs: their collectives, parts of CUDA graphs, know no time limit, and no step is long. On CPUs steps
    may be, and collectives have a limit of their own.
    """
    if patience is None or scheduler.oldest_launch is None:
        return None
    return max(0.0, scheduler.oldest_launch + patience - monotonic())
