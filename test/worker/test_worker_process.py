"""The worker as a process of its own: told by messages, heard by messages."""

import dataclasses
import os
from contextlib import suppress

import numpy as np
import pytest
from support.step_driver import random_prompts, reference_ids, save_random_model

from lightllm.server.core.channel import Inbox, Outbox, encode, wait
from lightllm.server.core.messages import NewRow, StepPlan, StepResult, pack, unpack
from lightllm.server.core.sampling_params import RequestLimits, SamplingParams
from lightllm.server.core.server_args import ServerArgs
from lightllm.utils.process_utils import ChildProcess

TIMEOUT = 120


class Workers:
    """All ranks of one model, and the router's side of them."""

    def __init__(self, model_dir, socket_dir, tp: int = 1, **flags):
        args = ServerArgs(model_dir=str(model_dir), tp=tp, device="cpu", **flags)
        self.inbox = Inbox(socket_dir, "router", [StepResult])
        self.outboxes = [Outbox(socket_dir, f"worker{rank}") for rank in range(tp)]
        config = {"args": dataclasses.asdict(args), "socket_dir": str(socket_dir)}
        target = "lightllm.server.router.model_infer.worker:main"
        self.children = [
            ChildProcess(f"lightllm-tp{rank}", target, config | {"rank": rank}, env={"OMP_NUM_THREADS": "1"})
            for rank in range(tp)
        ]

    def until(self, child: ChildProcess, *kinds: str) -> tuple[list[str], object]:
        """Status events of a child up to the first of `kinds`: (kinds seen, its value)."""
        os.set_blocking(child.status_fd, True)
        seen: list[str] = []
        while True:
            for event in child.read_status():
                seen.append(event.kind)
                if event.kind in (*kinds, "closed"):
                    return seen, event.value

    def step(self, plan: StepPlan) -> StepResult:
        for outbox in self.outboxes:
            outbox.send_bytes(encode(plan))
        assert wait(self.inbox, timeout=TIMEOUT), "no result"
        (result,) = self.inbox.receive()
        assert isinstance(result, StepResult)
        return result

    def stop(self) -> list[int]:
        for child in self.children:
            child.send({"stop": True})
        return [child.exit_status() for child in self.children]

    def kill(self) -> None:
        for child in self.children:
            with suppress(ProcessLookupError):
                child.kill()
            child.exit_status()


@pytest.fixture
def start(tmp_path):
    groups: list[Workers] = []

    def start_workers(model_dir, **options) -> Workers:
        folder = tmp_path / f"sockets{len(groups)}"
        folder.mkdir(mode=0o700)
        groups.append(Workers(model_dir, folder, **options))
        return groups[-1]

    yield start_workers
    for group in groups:
        group.kill()


def greedy(workers: Workers, prompt: list[int], n: int) -> list[int]:
    limits = RequestLimits(max_total_tokens=512, vocab_size=320)
    sampling = SamplingParams(max_new_tokens=n).resolve(limits, len(prompt))
    tokens = []
    for i in range(n):
        start, length = (len(prompt) + i - 1, 1) if i else (0, len(prompt))
        result = workers.step(
            StepPlan(
                step=i,
                num_decode=min(i, 1),
                rows=pack([2], np.int32),
                starts=pack([start], np.int32),
                lengths=pack([length], np.int32),
                samples=pack([1], np.uint8),
                slots=pack(range(start, start + length), np.int32),
                ended=b"",
                new_rows=[] if i else [NewRow(2, 8, pack(prompt, np.int32), len(prompt), sampling)],
            )
        )
        assert not result.failed, result.failed
        assert result.step == i
        tokens += unpack(result.tokens, np.int32).tolist()
    return tokens


@pytest.mark.parametrize("tp", [1, 2])
def test_a_worker_serves_plans_and_stops(start, tmp_path, tp):
    model = save_random_model(tmp_path / "model")
    workers = start(tmp_path / "model", tp=tp, max_req_total_len=400, eos_id=[7], running_max_req_size=4)
    for child in workers.children:
        seen, info = workers.until(child, "ready", "failed")
        assert seen[-1] == "ready" and "progress" in seen
        assert info["max_req_total_len"] == 400
        assert info["max_total_token_num"] == 4 * 400
        assert info["eos_token_ids"] == [7] and info["vocab_size"] == 320 and info["dtype"] == "float32"
    prompt = random_prompts([20])[0]
    assert greedy(workers, prompt, 8) == reference_ids(model, prompt, 8)
    assert workers.stop() == [0] * tp


@pytest.mark.parametrize(
    "flags, cause",
    [
        (dict(max_total_token_num=10**12), "--max_total_token_num 1000000000000 does not fit"),
        (dict(tp=3), "3"),
    ],
)
def test_what_cannot_be_loaded_is_told(start, tmp_path, flags, cause):
    save_random_model(tmp_path / "model")
    workers = start(tmp_path / "model", **flags)
    seen, reason = workers.until(workers.children[0], "ready", "failed")
    assert seen[-1] == "failed" and cause in str(reason)


def test_random_weights_need_no_weight_files(start, tmp_path):
    save_random_model(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    workers = start(tmp_path / "model", load_format="random", data_type="bf16")
    seen, info = workers.until(workers.children[0], "ready", "failed")
    assert seen[-1] == "ready" and info["dtype"] == "bfloat16"
    assert len(greedy(workers, [1, 2, 3], 4)) == 4
    assert workers.stop() == [0]
