"""WorkerGroup: the ranks of one model as the router sees them. A message is encoded once and pushed to every rank."""

from __future__ import annotations

from lightllm.server.core.channel import Outbox, encode
from lightllm.server.core.messages import ProfileRequest, StepPlan


class WorkerGroup:
    def __init__(self, socket_dir: str, ranks: int):
        self._ranks = [Outbox(socket_dir, f"worker{rank}") for rank in range(ranks)]

    def send(self, message: StepPlan | ProfileRequest) -> None:
        encoded = encode(message)
        for rank in self._ranks:
            rank.send_bytes(encoded)
