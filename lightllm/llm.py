"""LLM: generate in this process, with the scheduler and the model runner of the server."""

from __future__ import annotations

import gc
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from time import monotonic

import numpy as np
from tqdm import tqdm

from lightllm.distributed.parallel_state import ParallelState
from lightllm.models.model_dir import resolve_model_dir
from lightllm.server.constraints import constraint_of, with_grammar
from lightllm.server.core.messages import (
    Finish,
    GenerateRequest,
    PromptLogprobs,
    StepPlan,
    TextBatch,
    pack,
    request_of,
    sample_of,
)
from lightllm.server.core.sampling_params import InvalidParameter, SamplingParams
from lightllm.server.core.server_args import ServerArgs
from lightllm.server.detokenization.manager import DetokenizationManager
from lightllm.server.router.batch_order import longest_first, spread
from lightllm.server.router.model_infer.model_runner import ModelRunner
from lightllm.server.router.model_infer.pending import Pending, failed
from lightllm.server.router.scheduler import Scheduler
from lightllm.server.tokenizer import load_tokenizer
from lightllm.utils.device_utils import Platform

Prompt = str | Sequence[int]


@dataclass
class CompletionOutput:
    """One of the n outputs of a prompt; what a stop hides is in none of its fields.

    logprobs: for each token {id: logprob}, the token itself first, then the likeliest; None unless asked for.
    finish_reason: stop, length, or error, which `error` then explains.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] | None = None
    finish_reason: str | None = None
    error: str | None = None


@dataclass
class RequestOutput:
    """A prompt and what became of it. prompt: its text, None if it came as ids.

    prompt_logprobs: for each prompt token {id: logprob}, the token itself first; None for the first token; None as a
    whole unless asked for.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, float] | None] | None = None


class LLM:
    """A model in this process.

    model_dir: Hugging Face directory or GGUF file; None for the embedded model. Further arguments are the fields of
    ServerArgs that concern the model (device, data_type, running_max_req_size...). Raises what loading raises.
    """

    def __init__(self, model_dir: str | None = None, **server_args):
        path = str(resolve_model_dir(model_dir))
        args = ServerArgs(model_dir=path, **server_args)
        args.check()
        if args.tp != 1:
            raise ValueError(f"LLM runs in one process with tp 1, not {args.tp}; serve with --tp {args.tp} instead")
        platform = Platform.detect(args.device)
        self._runner, self.engine = ModelRunner.from_args(args, ParallelState(), platform)
        self._tokenizer = load_tokenizer(path, args.trust_remote_code)
        self._limits = self.engine.limits()
        self._grammar_backend = args.grammar_backend
        # A CPU's launch returns a finished step: a second plan would only compute past stops.
        self._ahead = platform.device.type != "cpu"
        self._scheduler = Scheduler(replace(args, max_queue=sys.maxsize), self.engine, 1 + self._ahead)
        self._step_limits = self._scheduler.limits  # as the flags say; each batch spreads its steps below them
        self._flying: deque[Pending] = deque()
        self._next_id = 1

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answers in the order of the prompts, each a text or token ids. params: for all, or one per prompt.

        Raises InvalidParameter, before anything runs, if a prompt or a parameter cannot be served.
        """
        prompts = [prompts] if isinstance(prompts, str) else prompts
        if isinstance(params, SamplingParams) or params is None:
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise InvalidParameter("params", f"{len(params)} for {len(prompts)} prompts")
        results: dict[int, _Result] = {}
        for prompt, asked in zip(prompts, params):
            results[self._next_id << 3] = self._check(prompt, asked)
            self._next_id += 1
        with (
            _heap_at_rest(),
            self._ending(results),
            tqdm(total=len(results), disable=not use_tqdm, desc="Generating") as bar,
        ):
            requests = [result.request(request_id) for request_id, result in results.items()]
            self._scheduler.limits = spread(self._step_limits, requests)
            for request in longest_first(requests):
                self._scheduler.add(request, monotonic())
            self._run(results, bar)
        return [result.output for result in results.values()]

    def _check(self, prompt: Prompt, asked: SamplingParams) -> _Result:
        text = prompt if isinstance(prompt, str) else None
        ids = self._tokenizer.encode(prompt, asked.add_special_tokens) if isinstance(prompt, str) else list(prompt)
        vocab_size = self._limits.vocab_size
        if set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) >= vocab_size:  # most are fine: no look at each
            for token_id in ids:
                if not isinstance(token_id, (int, np.integer)) or not 0 <= token_id < vocab_size:
                    raise InvalidParameter(
                        "prompts", f"{token_id!r} is not in the vocabulary of ids 0..{vocab_size - 1}"
                    )
        resolved = asked.resolve(self._limits, len(ids))
        return _Result(text, ids, asked, with_grammar(resolved, constraint_of(resolved), self._grammar_backend))

    def _run(self, results: dict[int, _Result], bar: tqdm) -> None:
        detokenization = DetokenizationManager(self._tokenizer)
        while self._scheduler.has_work:
            self._launch_all()
            self._scheduler.update(self._flying.popleft().result(), monotonic())
            if self._ahead:
                self._launch_all()  # the device goes on while text is made
            if tokens := self._scheduler.take_output():
                texts, stops = detokenization.process(tokens)
                for stop in stops:
                    self._scheduler.stop(stop)
                for batch in texts.values():
                    bar.update(_deliver(batch, results))

    def _launch_all(self) -> None:
        while plan := self._scheduler.schedule(monotonic()):
            self._launch(plan)

    def _launch(self, plan: StepPlan) -> None:
        try:
            self._flying.append(self._runner.launch(plan))
        except BaseException:
            self._flying.append(failed(plan, "interrupted"))
            raise

    @contextmanager
    def _ending(self, results: dict[int, _Result]) -> Iterator[None]:
        """Leaves the scheduler idle, also after an interrupt."""
        try:
            yield
        finally:
            for request_id in results:
                self._scheduler.abort(request_id)
            while self._flying:
                self._scheduler.update(self._flying.popleft().result(), monotonic())
            self._scheduler.take_output()


@contextmanager
def _heap_at_rest() -> Iterator[None]:
    """The garbage collector looks at new objects only: for all that a process with torch has it takes as long as a
    hundred steps, in which the device waits."""
    frozen = gc.get_freeze_count()
    gc.freeze()
    try:
        yield
    finally:
        if not frozen:
            gc.unfreeze()


class _Result:
    """One prompt's output as it grows."""

    def __init__(self, text: str | None, ids: list[int], asked: SamplingParams, sampling: SamplingParams):
        assert sampling.n is not None
        self.asked = asked
        self.sampling = sampling
        self.output = RequestOutput(text, ids, [CompletionOutput(index) for index in range(sampling.n)])
        self.running = sampling.n
        if asked.logprobs is not None:
            for completion in self.output.outputs:
                completion.logprobs = []
        if sampling.prompt_logprobs is not None:
            self.output.prompt_logprobs = [None] * len(ids)

    def request(self, request_id: int) -> GenerateRequest:
        prompt_ids = pack(self.output.prompt_token_ids, np.int32)
        return GenerateRequest(request_id, prompt_ids, self.sampling, open_ended=self.asked.max_new_tokens is None)

    def add_prompt(self, part: PromptLogprobs) -> None:
        assert self.output.prompt_logprobs is not None
        entries = part.entries(self.output.prompt_token_ids)
        self.output.prompt_logprobs[part.start : part.start + len(entries)] = entries


def _deliver(batch: TextBatch, results: dict[int, _Result]) -> int:
    """Adds a batch to the results; gives how many of them are complete by it."""
    complete = 0
    for part in batch.prompt:
        if sample_of(part.owner) == 0:
            results[request_of(part.owner)].add_prompt(part)
    for sequence_id, token_id, text, logprob, finish, top in batch.rows():
        result = results[request_of(sequence_id)]
        completion = result.output.outputs[sample_of(sequence_id)]
        completion.text += text
        completion.token_ids.append(token_id)
        if completion.logprobs is not None:
            completion.logprobs.append({token_id: logprob} | dict(top or ()))
        if finish:
            completion.finish_reason = finish.reason
            result.running -= 1
            complete += result.running == 0
    for ended in batch.ended:
        result = results[request_of(ended.sequence_id)]
        completion = result.output.outputs[sample_of(ended.sequence_id)]
        completion.finish_reason, completion.error = Finish(ended.finish).reason, ended.reason
        result.running -= 1
        complete += result.running == 0
    return complete
