"""LLM: generate in this process, with the scheduler and the model runner of the server."""

from __future__ import annotations

import gc
import sys
import threading
from array import array
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
    FINISHES,
    Finish,
    GenerateRequest,
    PromptLogprobs,
    StopRequest,
    TokenBatch,
    request_of,
    sample_of,
    unpack,
)
from lightllm.server.core.sampling_params import InvalidParameter, SamplingParams
from lightllm.server.core.server_args import ServerArgs
from lightllm.server.detokenization.incremental import IncrementalDetokenizer, failure
from lightllm.server.router.batch_order import longest_first, spread
from lightllm.server.router.model_infer.model_runner import ModelRunner
from lightllm.server.router.model_infer.pending import Pending, failed
from lightllm.server.router.scheduler import Scheduler
from lightllm.server.tokenizer import Tokenizer, load_tokenizer
from lightllm.utils.device_utils import Platform
from lightllm.utils.log_utils import init_logger

logger = init_logger(__name__)

TEXT_STEPS = 16  # of a batch whose text ends nothing, until their tokens become text: many at once take less time

NO_FULL_COLLECTION = 1 << 30  # collections of younger objects before one of all
_resting = threading.Lock()

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
        # A CPU's launch returns a finished step: a second plan would only compute past stops. A GPU goes on with the
        # others' while text is made of the tokens of several steps.
        self._ahead = platform.device.type != "cpu"
        self._scheduler = Scheduler(replace(args, max_queue=sys.maxsize), self.engine, 3 if self._ahead else 1)
        self._step_limits = self._scheduler.limits  # as the flags say; each batch spreads its steps below them
        self._flying: deque[Pending] = deque()
        self._next_id = 1
        self._one_call = threading.Lock()

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answers in the order of the prompts, each a text or token ids. params: for all, or one per prompt. Calls of
        several threads run one after the other.

        Raises InvalidParameter, before anything runs, if a prompt or a parameter cannot be served.
        """
        prompts = [prompts] if isinstance(prompts, str) else prompts
        if isinstance(params, SamplingParams) or params is None:
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise InvalidParameter("params", f"{len(params)} for {len(prompts)} prompts")
        with self._one_call, _heap_at_rest():
            requests = [self._check(prompt, asked) for prompt, asked in zip(prompts, params)]
            with self._ending(requests), tqdm(total=len(requests), disable=not use_tqdm, desc="Generating") as bar:
                self._scheduler.limits = spread(self._step_limits, requests)
                for request in longest_first(requests):
                    self._scheduler.add(request, monotonic())
                if self._ahead:
                    self._launch_all()  # the device is at the first prompts while all that answers need is made
                outputs = {
                    request.id: _output(request, prompt, asked)
                    for request, prompt, asked in zip(requests, prompts, params)
                }
                gc.freeze()
                ended_by_text = any(request.sampling.stop_sequences for request in requests)
                self._run(_Answers(self._tokenizer, outputs), 1 if ended_by_text else TEXT_STEPS, bar)
        return list(outputs.values())

    def _check(self, prompt: Prompt, asked: SamplingParams) -> GenerateRequest:
        ids = self._tokenizer.encode(prompt, asked.add_special_tokens) if isinstance(prompt, str) else list(prompt)
        packed = _packed(ids, self._limits.vocab_size)
        resolved = asked.resolve(self._limits, len(ids))
        sampling = with_grammar(resolved, constraint_of(resolved), self._grammar_backend)
        request = GenerateRequest(self._next_id << 3, packed, sampling, open_ended=asked.max_new_tokens is None)
        self._next_id += 1
        return request

    def _run(self, answers: _Answers, text_steps: int, bar: tqdm) -> None:
        """text_steps: after how many steps their tokens become text."""
        if new := self._scheduler.take_output():
            answers.add(new)
        steps = 0
        while self._scheduler.has_work:
            self._launch_all()
            self._scheduler.update(self._flying.popleft().result(), monotonic())
            steps += 1
            if steps % text_steps and self._scheduler.has_work:
                continue
            if self._ahead:
                self._launch_all()  # the device goes on while text is made
            if tokens := self._scheduler.take_output():
                for stop in answers.add(tokens):
                    self._scheduler.stop(stop)
                bar.update(answers.complete - bar.n)

    def _launch_all(self) -> None:
        while plan := self._scheduler.schedule(monotonic()):
            try:
                self._flying.append(self._runner.launch(plan))
            except BaseException:
                self._flying.append(failed(plan, "interrupted"))
                raise

    @contextmanager
    def _ending(self, requests: Sequence[GenerateRequest]) -> Iterator[None]:
        """Leaves the scheduler idle, also after an interrupt."""
        try:
            yield
        finally:
            for request in requests if self._scheduler.has_work else ():
                self._scheduler.abort(request.id)
            while self._flying:
                self._scheduler.update(self._flying.popleft().result(), monotonic())
            self._scheduler.take_output()


@contextmanager
def _heap_at_rest() -> Iterator[None]:
    """The garbage collector looks at new objects only, once gc.freeze() has been called at none that is here before
    that: for all that a process with torch has it takes as long as a hundred steps, for the ids of 256 prompts as long
    as two, in which the device waits. While one LLM has it so, it is so for others in the process."""
    if not _resting.acquire(blocking=False):
        yield
        return
    youngest, young, full = gc.get_threshold()
    gc.set_threshold(youngest, young, NO_FULL_COLLECTION)
    try:
        yield
    finally:
        gc.set_threshold(youngest, young, full)
        gc.unfreeze()
        _resting.release()


def _packed(ids: list[int], vocab_size: int) -> bytes:
    """int32; InvalidParameter names what is no id of the vocabulary."""
    try:
        packed = array("I", ids)  # from Python's ints in a third of the time of "i"
    except (TypeError, OverflowError):
        packed = None
    if packed is None or np.frombuffer(packed, np.uint32).max(initial=0) >= vocab_size:
        wrong = next(x for x in ids if not isinstance(x, (int, np.integer)) or not 0 <= x < vocab_size)
        raise InvalidParameter("prompts", f"{wrong!r} is not in the vocabulary of ids 0..{vocab_size - 1}")
    return packed.tobytes()


def _output(request: GenerateRequest, prompt: Prompt, asked: SamplingParams) -> RequestOutput:
    """What the answers to a request will fill."""
    ids = unpack(request.prompt_ids, np.int32).tolist()
    logprobs = asked.logprobs is not None
    return RequestOutput(
        prompt=prompt if isinstance(prompt, str) else None,
        prompt_token_ids=ids,
        outputs=[CompletionOutput(i, logprobs=[] if logprobs else None) for i in range(request.sampling.n or 1)],
        prompt_logprobs=None if request.sampling.prompt_logprobs is None else [None] * len(ids),
    )


class _Answers:
    """Outputs as they grow, by the tokens of several steps at a time. complete: those whose samples have all ended."""

    def __init__(self, tokenizer: Tokenizer, outputs: dict[int, RequestOutput]):
        """outputs: by the ids of their requests."""
        self.complete = 0
        self._tokenizer = tokenizer
        self._outputs = outputs
        self._texts: dict[int, IncrementalDetokenizer] = {}  # by sequence id

    def add(self, batch: TokenBatch) -> list[StopRequest]:
        """Gives the sequences that end by it, whoever ends them: the scheduler or their text."""
        for new in batch.new:
            self._texts[new.sequence_id] = IncrementalDetokenizer.of(self._tokenizer, new)
        for part in batch.prompt:
            self._add_prompt_logprobs(part)
        sequence_ids = unpack(batch.sequence_ids, np.int64)
        order = np.argsort(sequence_ids, kind="stable")
        sequence_ids, finishes = sequence_ids[order], unpack(batch.finishes, np.uint8)[order]
        tokens, logprobs = unpack(batch.tokens, np.int32)[order].tolist(), unpack(batch.logprobs, np.float32)[order]
        top = {likeliest.index: likeliest.pairs() for likeliest in batch.top}
        begins = np.flatnonzero(np.diff(sequence_ids, prepend=0))
        ends = np.append(begins, len(order))[1:]
        stops = []
        for sequence_id, begin, end in zip(sequence_ids[begins].tolist(), begins.tolist(), ends.tolist()):
            completion, text = self._completion(sequence_id), self._texts[sequence_id]
            finish = self._extend(completion, text, tokens[begin:end], FINISHES[finishes[end - 1]])
            if completion.logprobs is not None:
                kept = slice(begin, begin + text.num_tokens - len(completion.logprobs))
                completion.logprobs += [
                    {token: logprob} | dict(top.get(place, ()))
                    for token, logprob, place in zip(tokens[kept], logprobs[kept].tolist(), order[kept].tolist())
                ]
            if finish:
                stops.append(StopRequest(sequence_id, text.num_tokens))
                self._end(sequence_id, finish)
        for ended in batch.ended:
            completion = self._completion(ended.sequence_id)
            if not completion.finish_reason:  # else its text has ended it before
                completion.error = ended.reason
                self._end(ended.sequence_id, Finish(ended.finish))
        return stops

    def _extend(
        self, completion: CompletionOutput, text: IncrementalDetokenizer, tokens: list[int], finish: Finish
    ) -> Finish:
        """Adds tokens, the last of which comes with `finish`, and their text; gives what the sequence ends with."""
        try:
            added, finish = text.extend(tokens, finish)
        except Exception as error:
            logger.exception("no text for a prompt")
            added, finish = "", Finish.ERROR
            completion.error = failure(error)
        completion.text += added
        completion.token_ids += tokens[: text.num_tokens - len(completion.token_ids)]
        return finish

    def _end(self, sequence_id: int, finish: Finish) -> None:
        self._texts.pop(sequence_id, None)
        self._completion(sequence_id).finish_reason = finish.reason
        self.complete += all(sample.finish_reason for sample in self._outputs[request_of(sequence_id)].outputs)

    def _completion(self, sequence_id: int) -> CompletionOutput:
        return self._outputs[request_of(sequence_id)].outputs[sample_of(sequence_id)]

    def _add_prompt_logprobs(self, part: PromptLogprobs) -> None:
        output = self._outputs[request_of(part.owner)]
        assert output.prompt_logprobs is not None
        entries = part.entries(output.prompt_token_ids)
        output.prompt_logprobs[part.start : part.start + len(entries)] = entries
