"""A rank of a loaded server is killed or stopped: how each client ends, and how long after."""

import json
import os
import random
import signal
import time
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPException
from itertools import product
from pathlib import Path
from urllib.error import HTTPError

from over_http import serving
from shapes import VOCAB

NEEDED = 10.0  # seconds in which every client must have its answer or error
SILENCE = 120.0  # seconds without a byte after which a client gives up
PATIENCE = 4  # --nccl_timeout
PROMPT, TOLD = 60, 20  # tokens of each prompt, and of an answer's begin before the end of the rank
ENDLESS = {"max_new_tokens": 4000, "ignore_eos": True, "do_sample": False}


def _ask(url: str, seed: int, stream: bool) -> tuple[str, float]:
    """What a request that is too long to be answered in time ended with, and when."""
    inputs = random.Random(seed).choices(range(3, VOCAB), k=PROMPT)
    body = json.dumps({"inputs": inputs, "parameters": ENDLESS}).encode()
    path, headers = "/generate_stream" if stream else "/generate", {"Content-Type": "application/json"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url + path, body, headers), timeout=SILENCE) as answer:
            last = answer.read().rstrip().rpartition(b"\n")[2]
        done = json.loads(last.removeprefix(b"data:"))
        end = "error event" if "error" in done else "answer" if done.get("finished", not stream) else "cut off"
    except HTTPError as refused:
        end = "error status" if "error" in json.load(refused) else "cut off"
    except TimeoutError:
        end = "silence"
    except (OSError, HTTPException, ValueError):
        end = "cut off"
    return end, time.perf_counter()


def _rank_pid(rank: int) -> int:
    """Process id of that rank of the server that this process has started."""
    processes = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            head, _, tail = stat.read_text().rpartition(")")
            pid, name = head.split(" (", 1)
            processes[int(pid)] = name, int(tail.split()[1])
    ours = {pid: name for pid, (name, parent) in processes.items() if processes.get(parent, ("", 0))[1] == os.getpid()}
    return next(pid for pid, name in ours.items() if name == f"lightllm-tp{rank}")


def kill_each_rank(shape: str, ranks: int, clients: int) -> list[dict]:
    """SIGKILL, then SIGSTOP, of each rank of a new server; every second client streams, a quarter of them waits."""
    running = clients * 3 // 4
    flags = ["--tp", str(ranks), "--running_max_req_size", str(running), "--nccl_timeout", str(PATIENCE)]
    flags += ["--graph_max_batch_size", str(running), "--log_level", "warning"]
    rows = []
    for number, rank in product((signal.SIGKILL, signal.SIGSTOP), range(ranks)):
        with serving(shape, flags) as url, ThreadPoolExecutor(clients) as pool:
            ends = [pool.submit(_ask, url, i, i % 2 == 0) for i in range(clients)]
            while json.load(urllib.request.urlopen(f"{url}/token_load"))["used_tokens"] < running * (PROMPT + TOLD):
                time.sleep(0.1)
            os.kill(_rank_pid(rank), number)
            since = time.perf_counter()
            ended = [end.result() for end in ends]
        counts = dict.fromkeys(("answer", "error event", "error status", "cut off", "silence"), 0)
        counts |= Counter(what for what, _ in ended)
        longest = max(when for _, when in ended) - since
        rows.append({"signal": number.name, "rank": rank} | counts | {"longest_s": longest, "needed_s": NEEDED})
        print(f"{shape}, a rank ends:", json.dumps(rows[-1]), flush=True)
    return rows
