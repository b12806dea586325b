"""WorkerGroup: the ranks of one model as the router sees them. A plan is encoded once and pushed to every rank."""

from __future__ import annotations

from lightllm.server.core.channel import Outbox, encode
from lightllm.server.core.messages import StepPlan


class WorkerGroup:
    def __init__(self, socket_dir: str, ranks: int):
        self._ranks = [Outbox(socket_dir, f"worker{rank}") for rank in range(ranks)]

    def launch(self, plan: StepPlan) -> None:
        encoded = encode(plan)
        for rank in self._ranks:
            rank.send_bytes(encoded)
