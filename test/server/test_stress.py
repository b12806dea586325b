"""Random requests with random aborts, disconnects and parameters against one server: each ends in exactly one way."""

import random
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import random_prompt, reference
from support.client import assert_error
from support.server import RunningServer, start_server

REFUSED: tuple[dict[str, Any], ...] = (
    dict(temperature=-1),
    dict(max_new_tokens=10**6),
    dict(stop_sequences=[""]),
    dict(nonsense=1),
    dict(stop_token_ids=[999]),
    dict(n=2, best_of=3),
)


def parameters(choose: random.Random) -> dict[str, Any]:
    """What a request may ask for, in any mixture."""
    asked: dict[str, Any] = dict(max_new_tokens=choose.choice([1, 2, 5, 20, 60, 150]))
    menu: dict[str, Any] = dict(
        temperature=choose.choice([0, 1e-7, 0.5, 1.0, 3.0]),
        top_k=choose.choice([-1, 0, 1, 5, 1000]),
        top_p=choose.choice([0.1, 0.9, 1.0]),
        min_p=choose.choice([0.0, 0.3]),
        repetition_penalty=choose.choice([0.8, 1.3]),
        presence_penalty=choose.choice([-1, 1.5]),
        frequency_penalty=choose.choice([-1, 1.5]),
        input_penalty=True,
        seed=choose.randrange(1000),
        ignore_eos=True,
        stop_sequences=choose.choice([["e"], ["th", "a"], [[65, 66]], "zz"]),
        stop_token_ids=[choose.randrange(320)],
        logit_bias={str(choose.randrange(320)): choose.choice([-100, 5.0])},
        allowed_token_ids=choose.sample(range(320), 20),
        logprobs=choose.randrange(6),
        prompt_logprobs=choose.randrange(4),
        min_new_tokens=1,
        return_details=True,
        exponential_decay_length_penalty=[3, 1.1],
    )
    return asked | {name: menu[name] for name in choose.sample(sorted(menu), choose.randrange(6))}


def one_request(server: RunningServer, seed: int) -> str:
    """Asks and says how it ended; anything that is not one clean end fails."""
    choose = random.Random(seed)
    asked = parameters(choose)
    length = choose.choice([1, 3, 17, 60, 300])
    body = {"inputs": list(random_prompt(length, seed)), "parameters": asked}
    kind = choose.choice(["whole"] * 3 + ["stream"] * 3 + ["leave_stream", "leave_whole", "leave_at_once", "refused"])
    match kind:
        case "refused":
            asked |= choose.choice(REFUSED)
            answer = server.post(choose.choice(["/generate", "/generate_stream"]), body)
            assert answer.status == 400 and answer.error()
        case "whole":
            asked |= dict(n=choose.choice([1, 1, 2, 4]))
            answer = server.post("/generate", body)
            assert answer.status == 200, answer.body
            answered = answer.json()
            assert len(answered["generated_text"]) == asked["n"]
            reasons = answered["finish_reason"] if asked["n"] > 1 else [answered["finish_reason"]]
            counts = answered["count_output_tokens"] if asked["n"] > 1 else [answered["count_output_tokens"]]
            assert all(reason in ("stop", "length") for reason in reasons)
            assert all(1 <= count <= asked["max_new_tokens"] for count in counts)
        case "stream":
            with server.open_stream(body) as stream:
                events = list(stream)
            assert [event["token"]["count_output_tokens"] for event in events] == list(range(1, len(events) + 1))
            assert [event["finished"] for event in events] == [False] * (len(events) - 1) + [True]
            assert events[-1]["finish_reason"] in ("stop", "length")
        case "leave_stream":
            with server.open_stream(body) as stream:
                for _, event in zip(range(choose.randrange(1, 8)), stream):
                    if "error" in event:
                        assert_error(event["error"])
        case "leave_whole":
            sock = server.send_and_leave("/generate", body | {"parameters": asked | dict(n=choose.choice([1, 3]))})
            time.sleep(choose.random() * 0.3)
            sock.close()
        case "leave_at_once":
            server.send_and_leave(choose.choice(["/generate", "/generate_stream"]), body).close()
    return kind


@pytest.mark.parametrize("requests", [150, pytest.param(2000, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])])
def test_random_requests(checkpoints, requests: int) -> None:
    model = checkpoints("llama")
    expected = reference(model, random_prompt(50), 40)
    flags = ("--max_total_token_num", "3000", "--running_max_req_size", "16", "--chunked_prefill_size", "64")
    with start_server(model, *flags) as server:
        with ThreadPoolExecutor(24) as pool:
            ends = Counter(pool.map(lambda seed: one_request(server, seed), range(requests)))
        print(ends)
        assert sum(ends.values()) == requests
        server.wait_idle()
        assert server.load()["used_tokens"] == 0
        asked = dict(do_sample=False, ignore_eos=True, max_new_tokens=40)
        assert tuple(server.ids(expected.prompt, **asked)) == expected.tokens
        assert Path(f"/proc/{server.process.pid}").exists() and server.get("/health").status == 200
