"""Constrained rows beside free ones on a running server: what both must be, wherever the model runs."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from support.server import RunningServer

PROMPTS = ["A", "Be", "the quick brown fox", "x" * 40]
CITIES = ["Bern", "Züri", "東京"]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"enum": CITIES},
        "codes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 4},
    },
    "required": ["city", "codes"],
    "additionalProperties": False,
}


def assert_constraints_hold(server: RunningServer, constrained: int = 16) -> None:
    """Finished outputs validate, and free neighbours, greedy and sampled, write what they write alone."""
    wishes = (dict(do_sample=False), dict(temperature=1.0, seed=5))
    free = [(prompt, wish | dict(max_new_tokens=40, ignore_eos=True)) for prompt in PROMPTS for wish in wishes]
    alone = [server.text(prompt, **wish) for prompt, wish in free]

    def ask(seed: int) -> dict[str, Any]:
        return server.generate("A", guided_json=SCHEMA, temperature=1.0, seed=seed, max_new_tokens=100)

    with ThreadPoolExecutor(constrained + len(free)) as pool:
        answers = [pool.submit(ask, seed) for seed in range(constrained)]
        beside = list(pool.map(lambda request: server.text(request[0], **request[1]), free))
        finished = [answer.result() for answer in answers]
    assert beside == alone
    for answer in finished:
        assert answer["finish_reason"] == "stop"
        value = json.loads(answer["generated_text"][0])
        assert value.keys() == {"city", "codes"} and value["city"] in CITIES
        assert len(value["codes"]) <= 4 and set(value["codes"]) <= set(range(100))
    again = ask(3)
    assert again["generated_text"] == finished[3]["generated_text"], "the same seed writes the same alone"
    assert len({answer["generated_text"][0] for answer in finished}) > 1
