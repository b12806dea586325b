import math

import pytest

from lightllm.server.core.sampling_params import InvalidParameter, RequestLimits, SamplingParams

LIMITS = RequestLimits(max_total_tokens=100, vocab_size=320, eos_token_ids=(256, 258))
PROMPT_LEN = 10


def resolve(**asked) -> SamplingParams:
    return SamplingParams(**asked).resolve(LIMITS, PROMPT_LEN)


ACCEPTED = [
    dict(n=8),
    dict(best_of=8),
    dict(n=3, best_of=3),
    dict(temperature=0),
    dict(temperature=1e30),
    dict(top_p=1),
    dict(top_p=1e-4),
    dict(top_k=-1),
    dict(top_k=0),
    dict(top_k=10**9),
    dict(top_k=10**30),
    dict(min_p=0),
    dict(min_p=1),
    dict(presence_penalty=-2),
    dict(presence_penalty=2),
    dict(frequency_penalty=-2.0),
    dict(frequency_penalty=2.0),
    dict(repetition_penalty=1e-6),
    dict(repetition_penalty=1e6),
    dict(exponential_decay_length_penalty=(0, 1.5)),
    dict(exponential_decay_length_penalty=(5, 1e300)),
    dict(max_new_tokens=1),
    dict(max_new_tokens=90),
    dict(min_new_tokens=90),
    dict(min_new_tokens=5, max_new_tokens=5),
    dict(stop_sequences=["a" * 256] * 10),
    dict(stop_sequences=[[319] * 256]),
    dict(stop_sequences=[]),
    dict(stop_token_ids=[0] * 64),
    dict(allowed_token_ids=[0, 319]),
    dict(allowed_token_ids=list(range(256))),
    dict(allowed_token_ids=[256], min_new_tokens=5, ignore_eos=True),
    dict(allowed_token_ids=[256, 1], min_new_tokens=5),
    dict(allowed_token_ids=[3], logit_bias={3: -100}),
    dict(logit_bias={0: -100, 319: 100}),
    dict(logit_bias={"17": 1}),
    dict(logit_bias={}),
    dict(seed=-1),
    dict(seed=-(2**63)),
    dict(seed=2**63 - 1),
    dict(logprobs=0),
    dict(logprobs=20),
    dict(prompt_logprobs=-1),
    dict(prompt_logprobs=20),
]

REFUSED = [
    ("n", dict(n=0), "8"),
    ("n", dict(n=9), "8"),
    ("n", dict(n=True), "int"),
    ("n", dict(n=1.5), "int"),
    ("best_of", dict(best_of=9), "8"),
    ("best_of", dict(n=2, best_of=3), "2"),
    ("do_sample", dict(do_sample=1), "bool"),
    ("temperature", dict(temperature=-1), "0"),
    ("temperature", dict(temperature=math.nan), "0"),
    ("temperature", dict(temperature=math.inf), "1e+30"),
    ("temperature", dict(temperature=10**400), "range"),
    ("temperature", dict(temperature="1"), "float"),
    ("top_p", dict(top_p=0), "0"),
    ("top_p", dict(top_p=1.01), "1"),
    ("top_p", dict(top_p=math.nan), "1"),
    ("top_k", dict(top_k=-5), "-1"),
    ("top_k", dict(top_k=1.5), "int"),
    ("min_p", dict(min_p=1.1), "1"),
    ("min_p", dict(min_p=-0.1), "0"),
    ("presence_penalty", dict(presence_penalty=1e308), "2"),
    ("presence_penalty", dict(presence_penalty=None), "float"),
    ("frequency_penalty", dict(frequency_penalty=-2.1), "-2"),
    ("repetition_penalty", dict(repetition_penalty=0), "1e-06"),
    ("repetition_penalty", dict(repetition_penalty=-1), "1e-06"),
    ("repetition_penalty", dict(repetition_penalty=math.inf), "1000000"),
    ("input_penalty", dict(input_penalty="no"), "bool"),
    ("exponential_decay_length_penalty", dict(exponential_decay_length_penalty=(-1, 1.0)), "start"),
    ("exponential_decay_length_penalty", dict(exponential_decay_length_penalty=(1, 0.9)), "factor"),
    ("exponential_decay_length_penalty", dict(exponential_decay_length_penalty=(1, math.nan)), "factor"),
    ("exponential_decay_length_penalty", dict(exponential_decay_length_penalty=(1, math.inf)), "factor"),
    ("exponential_decay_length_penalty", dict(exponential_decay_length_penalty=[1]), "2"),
    ("max_new_tokens", dict(max_new_tokens=0), "1"),
    ("max_new_tokens", dict(max_new_tokens=-1), "1"),
    ("max_new_tokens", dict(max_new_tokens=91), "100"),
    ("max_new_tokens", dict(max_new_tokens=10**12), "100"),
    ("max_new_tokens", dict(max_new_tokens="5"), "int"),
    ("max_new_tokens", dict(max_new_tokens=1.5), "int"),
    ("max_new_tokens", dict(max_new_tokens=True), "int"),
    ("min_new_tokens", dict(min_new_tokens=-1), "0"),
    ("min_new_tokens", dict(min_new_tokens=6, max_new_tokens=5), "5"),
    ("min_new_tokens", dict(min_new_tokens=91), "90"),
    ("stop_sequences", dict(stop_sequences=""), "empty"),
    ("stop_sequences", dict(stop_sequences=["", "zzz"]), "empty"),
    ("stop_sequences", dict(stop_sequences=[[]]), "empty"),
    ("stop_sequences", dict(stop_sequences=["a"] * 11), "10"),
    ("stop_sequences", dict(stop_sequences=["a" * 257]), "256"),
    ("stop_sequences", dict(stop_sequences=[[1] * 257]), "256"),
    ("stop_sequences", dict(stop_sequences=[[320]]), "319"),
    ("stop_sequences", dict(stop_sequences=[[1.5]]), "int"),
    ("stop_sequences", dict(stop_sequences=5), "str"),
    ("stop_token_ids", dict(stop_token_ids=[320]), "319"),
    ("stop_token_ids", dict(stop_token_ids=[-1]), "319"),
    ("stop_token_ids", dict(stop_token_ids=[0] * 65), "64"),
    ("allowed_token_ids", dict(allowed_token_ids=[2**70]), "319"),
    ("allowed_token_ids", dict(allowed_token_ids=[0] * 257), "256"),
    ("allowed_token_ids", dict(allowed_token_ids=[256, 258], min_new_tokens=2), "stop"),
    ("logit_bias", dict(logit_bias={320: 1}), "319"),
    ("logit_bias", dict(logit_bias={"-1": 1}), "319"),
    ("logit_bias", dict(logit_bias={"x": 1}), "int"),
    ("logit_bias", dict(logit_bias={1: 100.5}), "100"),
    ("logit_bias", dict(logit_bias={1: math.nan}), "100"),
    ("logit_bias", dict(logit_bias=dict.fromkeys(range(301), 1.0)), "300"),
    ("logit_bias", dict(logit_bias=[5]), "object"),
    ("seed", dict(seed=-(2**63) - 1), str(-(2**63))),
    ("seed", dict(seed=2**63), str(2**63 - 1)),
    ("logprobs", dict(logprobs=21), "20"),
    ("logprobs", dict(logprobs=-1), "0"),
    ("logprobs", dict(logprobs=True), "int"),
    ("prompt_logprobs", dict(prompt_logprobs=21), "20"),
    ("prompt_logprobs", dict(prompt_logprobs=-2), "-1"),
]


@pytest.mark.parametrize("asked", ACCEPTED, ids=lambda asked: str(asked)[:60])
def test_accepts(asked):
    resolve(**asked)


@pytest.mark.parametrize("field, asked, limit", REFUSED, ids=lambda value: str(value)[:60])
def test_refuses_by_field_and_limit(field, asked, limit):
    with pytest.raises(InvalidParameter) as refused:
        resolve(**asked)
    assert refused.value.field == field
    assert limit in refused.value.reason
    assert str(refused.value).startswith(field)


def test_absent_max_new_tokens_is_what_the_limit_leaves():
    assert resolve().max_new_tokens == 90


@pytest.mark.parametrize("prompt_len", [100, 101, 5000])
def test_prompt_that_leaves_no_room_names_both_lengths(prompt_len):
    for asked in (SamplingParams(), SamplingParams(max_new_tokens=1)):
        with pytest.raises(InvalidParameter, match=rf"inputs: .*{prompt_len} tokens.*100 tokens"):
            asked.resolve(LIMITS, prompt_len)


def test_empty_prompt():
    with pytest.raises(InvalidParameter, match="inputs: the prompt is empty"):
        SamplingParams().resolve(LIMITS, 0)


GREEDY = [
    dict(),
    dict(seed=3),
    dict(do_sample=False, temperature=2.0, top_p=0.5, top_k=5, min_p=0.1),
    dict(do_sample=True, temperature=0),
    dict(temperature=0, top_p=0.9),
    dict(temperature=1e-6),
    dict(temperature=9.9e-6),
]


@pytest.mark.parametrize("asked", GREEDY, ids=str)
def test_greedy(asked):
    params = resolve(**asked)
    assert (params.do_sample, params.temperature, params.top_k, params.top_p, params.min_p) == (
        False,
        0.0,
        -1,
        1.0,
        0.0,
    )


@pytest.mark.parametrize(
    "asked, drawn",
    [
        (dict(do_sample=True), (1.0, -1, 1.0, 0.0)),
        (dict(temperature=0.5), (0.5, -1, 1.0, 0.0)),
        (dict(temperature=1e-5), (1e-5, -1, 1.0, 0.0)),
        (dict(top_p=0.5), (1.0, -1, 0.5, 0.0)),
        (dict(top_p=1e-320), (1.0, -1, 1e-6, 0.0)),
        (dict(top_k=5), (1.0, 5, 1.0, 0.0)),
        (dict(top_k=0), (1.0, -1, 1.0, 0.0)),
        (dict(top_k=10**30), (1.0, -1, 1.0, 0.0)),
        (dict(min_p=0.2), (1.0, -1, 1.0, 0.2)),
    ],
    ids=str,
)
def test_sampled(asked, drawn):
    params = resolve(**asked)
    assert params.do_sample and (params.temperature, params.top_k, params.top_p, params.min_p) == drawn


def test_n_is_best_of():
    assert [(p.n, p.best_of) for p in (resolve(), resolve(n=3), resolve(best_of=4))] == [(1, 1), (3, 3), (4, 4)]


def test_stop_ids_hold_eos_unless_ignored():
    assert set(resolve(stop_token_ids=[7, 256]).stop_token_ids) == {7, 256, 258}
    assert resolve(stop_token_ids=[7], ignore_eos=True).stop_token_ids == [7]


def test_a_stop_string_is_a_list_of_one():
    assert resolve(stop_sequences="ab").stop_sequences == ["ab"]
    assert resolve(stop_sequences=["ab", [1, 2]]).stop_sequences == ["ab", [1, 2]]


def test_a_seed_is_drawn_when_none_is_given():
    seeds = {resolve(seed=seed).seed for seed in (None, -1) for _ in range(20)}
    assert len(seeds) == 40 and all(0 <= seed < 2**63 for seed in seeds)
    assert resolve(seed=0).seed == 0


def test_negative_seeds_are_seeds_of_their_own():
    given = [-2, -3, -(2**40), -(2**63)]
    seeds = [resolve(seed=seed).seed for seed in given]
    assert seeds == [resolve(seed=seed).seed for seed in given]
    assert len(set(seeds)) == 4 and all(0 <= seed < 2**63 for seed in seeds)


def test_off_is_one_value():
    params = resolve(min_new_tokens=0, prompt_logprobs=-1)
    assert (params.min_new_tokens, params.prompt_logprobs, params.logprobs) == (1, None, 0)


def test_the_asked_parameters_stay_as_they_were():
    asked = SamplingParams(stop_sequences="ab")
    assert asked.resolve(LIMITS, 5) is not asked
    assert asked == SamplingParams(stop_sequences="ab")


def test_resolving_again_changes_nothing():
    once = resolve(temperature=0.3, n=2, stop_token_ids=[5], logit_bias={3: 1.0})
    assert once.resolve(LIMITS, PROMPT_LEN) == once
