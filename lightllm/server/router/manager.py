"""The router process: requests in, plans out, results in, tokens out. Imports no torch."""

from __future__ import annotations

import gc

from lightllm.server.core.channel import Inbox, Outbox, wait
from lightllm.server.core.messages import (
    AbortRequest,
    EngineInfo,
    GenerateRequest,
    LoadReport,
    LoadRequest,
    StepResult,
    StopRequest,
)
from lightllm.server.core.server_args import ServerArgs
from lightllm.server.router.scheduler import Scheduler
from lightllm.server.router.worker_group import WorkerGroup
from lightllm.utils.log_utils import set_log_level
from lightllm.utils.process_utils import Child

PLANS_IN_FLIGHT = 2


def main(child: Child) -> None:
    """Runs until the launcher says stop. Sleeps on the inbox: while nothing happens it takes no CPU time."""
    args = ServerArgs(**child.config["args"])
    socket_dir = child.config["socket_dir"]
    set_log_level(args.log_level)
    inbox = Inbox(socket_dir, "router", [GenerateRequest, AbortRequest, StopRequest, LoadRequest, StepResult])
    detokenizer = Outbox(socket_dir, "detok")
    fronts = [Outbox(socket_dir, f"front{index}") for index in range(args.httpserver_workers)]
    workers = WorkerGroup(socket_dir, args.tp)
    command = child.receive()
    if "engine" not in command:
        return
    engine = EngineInfo(**command["engine"])
    scheduler = Scheduler(
        max_total_token_num=engine.max_total_token_num,
        running_max_req_size=args.running_max_req_size,
        batch_max_tokens=args.batch_max_tokens,
        chunked_prefill_size=args.chunked_prefill_size,
        max_queue=args.max_queue,
        max_req_total_len=engine.max_req_total_len,
        plans_in_flight=PLANS_IN_FLIGHT,
    )
    gc.collect()
    gc.freeze()
    child.ready()
    while True:
        ready = wait(inbox, child.control_fd)
        if child.control_fd in ready and child.receive().get("stop"):
            return
        for message in inbox.receive():
            match message:
                case StepResult():
                    scheduler.update(message)
                case GenerateRequest():
                    scheduler.add(message)
                case AbortRequest():
                    scheduler.abort(message.id)
                case StopRequest():
                    scheduler.stop(message)
                case LoadRequest():
                    fronts[message.front].send(LoadReport(message.ticket, scheduler.load()))
        while plan := scheduler.schedule():
            workers.launch(plan)
        if output := scheduler.take_output():
            detokenizer.send(output)
