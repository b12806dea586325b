"""A rank that fails, dies or hangs: what all ranks do alike goes on, anything else ends with an error for everybody."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from support.server import RunningServer, start_server, until
from support.step_driver import random_prompts, reference_ids, save_random_model
from worker.test_worker_process import Workers, greedy

from lightllm.server.core.channel import encode
from lightllm.server.core.messages import NewRow, StepPlan, pack
from lightllm.server.core.sampling_params import RequestLimits, SamplingParams

BAD_SLOT = 10**9
LIMIT = 120.0  # seconds in which every client must know; nothing else would end by then
ENDLESS = dict(do_sample=False, ignore_eos=True, max_new_tokens=4000)


@pytest.fixture
def workers(tmp_path):
    model = save_random_model(tmp_path / "model")
    (tmp_path / "sockets").mkdir(mode=0o700)
    group = Workers(tmp_path / "model", tmp_path / "sockets", tp=2, max_req_total_len=400, running_max_req_size=4)
    for child in group.children:
        assert group.until(child, "ready", "failed")[0][-1] == "ready"
    yield group, model
    group.kill()


def prompt_plan(step: int, last_slot: int) -> StepPlan:
    """Two prompts; a bad slot is noticed in the first layer, behind the first collective."""
    sampling = SamplingParams().resolve(RequestLimits(max_total_tokens=512, vocab_size=320), 2)
    return StepPlan(
        step=step,
        num_decode=0,
        rows=pack([0, 1], np.int32),
        starts=pack([0, 0], np.int32),
        lengths=pack([2, 2], np.int32),
        samples=pack([1, 1], np.uint8),
        slots=pack([0, 1, 2, last_slot], np.int32),
        ended=b"",
        new_rows=[NewRow(row, 8 * row, pack([1, 2], np.int32), 2, sampling) for row in (0, 1)],
    )


def test_a_step_that_fails_alike_on_all_ranks_ends_its_rows_and_no_others(workers) -> None:
    group, model = workers
    prompt = random_prompts([20])[0]
    for _ in range(2):
        result = group.step(prompt_plan(9, BAD_SLOT))
        assert [row for row, _ in result.failed] == [0, 1]
        assert greedy(group, prompt, 5) == reference_ids(model, prompt, 5)
    assert group.stop() == [0, 0]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_step_that_fails_on_one_rank_ends_it(workers, victim: int) -> None:
    group, _ = workers
    for rank, outbox in enumerate(group.outboxes):
        outbox.send_bytes(encode(prompt_plan(9, BAD_SLOT if rank == victim else 3)))
    seen, reason = group.until(group.children[victim], "failed")
    assert seen[-1] == "failed" and "Error" in str(reason)
    assert group.children[victim].exit_status() == 1


def ends_with_an_error(server: RunningServer, stream: bool) -> None:
    """Asks for more than there will be; the error comes by status or, in a stream that runs, by event."""
    if stream:
        with server.start_stream("x", **ENDLESS) as events:
            status, last = events.status, list(events)[-1] if events.status == 200 else {}
        assert status == 503 or "error" in last, (status, last)
    else:
        answer = server.post("/generate", {"inputs": "x", "parameters": ENDLESS})
        assert answer.status in (500, 503), (answer.status, answer.body)


@pytest.mark.parametrize(
    "name, number, timeout",
    [
        ("lightllm-tp1", signal.SIGKILL, "600"),
        pytest.param("lightllm-tp0", signal.SIGKILL, "600", marks=pytest.mark.slow),
        ("lightllm-tp1", signal.SIGSTOP, "4"),
        pytest.param("lightllm-tp0", signal.SIGSTOP, "4", marks=pytest.mark.slow),
    ],
)
def test_every_client_is_told_that_a_rank_died_or_hangs(checkpoints, name, number, timeout) -> None:
    flags = ("--tp", "2", "--nccl_timeout", timeout, "--max_total_token_num", "70000")
    with start_server(Path(checkpoints("slow")), *flags) as server, ThreadPoolExecutor(16) as pool:
        pids = server.pids()
        ends = [pool.submit(ends_with_an_error, server, i % 2 == 0) for i in range(16)]
        until(lambda: server.load()["running"] == 16)
        os.kill(pids[name], number)
        for end in ends:
            end.result(LIMIT)
        assert server.wait_gone(pids) == 1
