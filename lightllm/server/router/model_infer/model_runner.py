"""ModelRunner: the only place where the model meets its KV cache, attention backend and sampler."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lightllm.common.basemodel.attention.backend import AttentionBackend
from lightllm.common.basemodel.attention.library_attention import measure_crossover
from lightllm.common.basemodel.attention.token_backend import TokenAttentionBackend
from lightllm.common.basemodel.basemodel import BaseModel
from lightllm.common.basemodel.cuda_graph import ladder, make_runner, token_ladder
from lightllm.common.basemodel.layer_infer.template.residual import Attended
from lightllm.common.basemodel.layer_weights.weight_loader import Progress
from lightllm.common.basemodel.model_config import ConfigError, ModelConfig
from lightllm.common.basemodel.peer_crossover import share_peer_memory
from lightllm.common.basemodel.tune_products import tune_products
from lightllm.common.grammar.backend import backend_named
from lightllm.common.grammar.grammar_mask import GrammarMask
from lightllm.common.kv_cache_mem_manager import sizing
from lightllm.common.kv_cache_mem_manager.kv_buffer import KVBuffer, ReqTable
from lightllm.common.sampling.sampler import Sampled, Sampler
from lightllm.distributed.communication_op import RankLost, all_gather
from lightllm.distributed.parallel_state import ParallelState
from lightllm.models.registry import model_class
from lightllm.server.core.messages import EngineInfo, StepPlan, unpack
from lightllm.server.core.server_args import ServerArgs
from lightllm.server.router.model_infer.batch_builder import BatchBuilder, Parts, PromptSpan, StepArrays
from lightllm.server.router.model_infer.decode_step import DecodeStep
from lightllm.server.router.model_infer.mixed_step import MixedStep
from lightllm.server.router.model_infer.pending import Pending, PromptScores, failed, launched, moment
from lightllm.server.router.model_infer.warm_up import largest_step, small_steps
from lightllm.utils.device_utils import Platform
from lightllm.utils.log_utils import init_logger

logger = init_logger(__name__)

PROMPT_SLICE = 256  # positions whose logits exist at once for prompt_logprobs
FAILURE_SKEW = 5.0  # seconds between ranks in which the same step fails
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


class ModelRunner:
    """`launch(plan)` runs one step; on a GPU it only queues it. Every rank runs the same plans in the same order."""

    @torch.inference_mode()
    def __init__(
        self,
        model: BaseModel,
        req_table: ReqTable,
        kv: KVBuffer,
        backend: AttentionBackend,
        parallel: ParallelState,
        graph_sizes: Sequence[int] = (),
        grammars: GrammarMask | None = None,
        mixed_sizes: Sequence[int] = (),
    ):
        """graph_sizes: numbers of lines for which decode steps are captured as CUDA graphs, mixed_sizes: numbers of
        tokens for steps with prompts; none: all runs eagerly.

        grammars: masks what the grammars of requests forbid; None if no request has one.
        """
        self._model = model
        self._parallel = parallel
        self._device = req_table.table.device
        self._sampler = Sampler(req_table.max_rows, model.vocab_size, self._device)
        self._grammars = grammars
        if grammars is not None:
            self._sampler.add(grammars)
        parts = Parts(model, self._sampler, req_table, kv, backend)
        self._builder = BatchBuilder(parts)
        self._decode = DecodeStep(parts, max(graph_sizes, default=req_table.max_rows))
        self._draw = make_runner(self._decode.draw, graph_sizes)
        self._forward = make_runner(self._decode.forward, graph_sizes)
        self._mixed = MixedStep(parts, mixed_sizes, graph_sizes) if mixed_sizes else None
        self._last: Pending | None = None  # step that was launched

    @classmethod
    def from_args(
        cls, args: ServerArgs, parallel: ParallelState, platform: Platform, progress: Progress = lambda *_: None
    ) -> tuple[ModelRunner, EngineInfo]:
        """Loads `args.model_dir` (a Hugging Face directory), measures the KV pool and allocates it.

        Raises ConfigError for a checkpoint that cannot be served, NotEnoughMemory for a pool that does not fit.
        """
        assert args.model_dir is not None, "model_dir must be resolved"
        config = ModelConfig.from_pretrained(args.model_dir)
        on_cpu = platform.device.type == "cpu"
        dtype = DTYPES[args.data_type] if args.data_type else "float32" if on_cpu else config.dtype
        if foreign := [token for token in args.eos_id if token >= config.vocab_size]:
            raise ConfigError(f"--eos_id {foreign[0]} is not in the vocabulary of ids 0..{config.vocab_size - 1}")
        rows, max_len = args.running_max_req_size or sizing.default_rows(platform.gpu_memory), _max_len(args, config)
        sizing.check_rows(rows, max_len, platform.free_memory() // (parallel.size if on_cpu else 1))
        parallel = share_peer_memory(parallel, config.hidden_size, getattr(torch, dtype), args.batch_max_tokens)
        model = model_class(config.model_type).load(
            args.model_dir, config, parallel, getattr(torch, dtype), platform.device, args.load_format, progress
        )
        if not args.disable_autotune:
            groups = model.outer_weights, *model.layer_weights
            tune_products((w.weight for group in groups for w in group.values()), progress)
        req_table = ReqTable(rows, max_len, platform.device)
        if args.llm_kv_type:
            _check_kv_type(args.llm_kv_type, model, platform)
        shape, kv_type = (model.slot_shapes, getattr(torch, dtype)), args.llm_kv_type
        backend = TokenAttentionBackend(_library_from(model, KVBuffer(1, *shape, platform.device, kv_type), shape[1]))

        eager = args.disable_cudagraph or on_cpu
        graph_sizes = [] if eager else ladder(min(args.graph_max_batch_size or rows, rows))
        mixed_sizes = [] if eager else token_ladder(min(args.graph_max_tokens, args.batch_max_tokens))

        eos_token_ids = sorted({*config.eos_token_ids, *args.eos_id})
        grammars = GrammarMask(
            backend_named(args.grammar_backend), Path(args.model_dir, "tokenizer.json"), model.vocab_size, eos_token_ids
        )

        def runner(slots: int) -> ModelRunner:
            kv = KVBuffer(slots, *shape, platform.device, kv_type)
            return cls(model, req_table, kv, backend, parallel, graph_sizes, grammars, mixed_sizes)

        pool = _pool_size(args, rows, max_len, KVBuffer.bytes_per_token(*shape, kv_type), runner, parallel, platform)
        logger.info("KV pool: %s", pool.arithmetic)
        of_ranks = all_gather(torch.tensor([[pool.tokens]], device=platform.device), parallel)
        info = EngineInfo(
            model_type=config.model_type,
            dtype=dtype,
            device=platform.name,
            vocab_size=model.vocab_size,
            eos_token_ids=eos_token_ids,
            max_total_token_num=int(of_ranks.min()),
            max_req_total_len=max_len,
            running_max_req_size=rows,
            prefix_reusable=not config.rope.depends_on_length,
        )
        ready = runner(info.max_total_token_num)
        ready._drop_slow_graphs()
        return ready, info

    def _drop_slow_graphs(self) -> None:
        """Of decode steps a size that is slow to draw is dropped from both. All ranks call it at the same moment."""
        self._forward.drop(self._draw.drop_slow(self._parallel))
        if self._mixed:
            self._mixed.run.drop_slow(self._parallel)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Pending:
        """One forward and one draw. A step that raises ends its rows, unless the device is beyond use or it does not
        raise at the same place on every rank."""
        try:
            self._last = self._launch(plan)
            return self._last
        except RankLost:
            raise
        except KeyboardInterrupt:
            self._wait()  # the device may still read what the host has sent
            raise
        except Exception as error:
            if not self._parallel.alike(f"{plan.step} {_place(error)}", FAILURE_SKEW):
                raise
            logger.exception("step %d failed", plan.step)
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
        self._wait()  # raises if the device is beyond use
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        return failed(plan, reason)

    def _wait(self) -> None:
        """For all that was launched."""
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def _launch(self, plan: StepPlan) -> Pending:
        starts = self._builder.start_rows(plan)
        rows = unpack(plan.rows, np.int32)
        if plan.num_decode == len(rows) and (lines := self._draw.padded(len(rows))):
            self._sampler.start(starts)
            return self._launch_decode(plan, rows, lines)
        step = self._builder.arrays(plan)
        if self._mixed and (size := self._mixed.padded(step)):
            rows = step.sampled_rows
            lines = self._mixed.draw.run.padded(len(rows))
            begun = self._moment()
            answer = self._mixed.stage(step, size, lines)
            self._mixed.run(size)
            self._sampler.start(starts)  # while the device is at what does not need it
            only_draws = len(rows) and not self._builder.scores_prompts and self._sampler.only_draws(rows)
            if only_draws and lines:
                self._mixed.draw.run(lines)
                return launched(plan.step, self._device, begun, rows, Sampled(answer, None), sent=answer)
            return self._end(step, plan.step, begun, self._mixed.attended, answer)
        inputs = self._builder.build(step)
        begun = self._moment()
        attended = self._model.attended(*inputs)
        self._sampler.start(starts)
        return self._end(step, plan.step, begun, attended)

    def _moment(self) -> torch.cuda.Event | None:
        """When the device comes to the next step: to the end of the last one, if that is not there yet. Another event
        would take the device 2 us."""
        if self._last and self._last.done and not self._last.done.query():
            return self._last.done
        return moment(self._device)

    def _end(
        self,
        step: StepArrays,
        number: int,
        begun: torch.cuda.Event | None,
        attended: Attended,
        sent: Tensor | None = None,
    ) -> Pending:
        """All that may be wanted of a step."""
        outcome = self._builder.outcome(step)
        if outcome is None:
            return launched(number, self._device, begun, step.rows[:0], None, sent=sent)
        sampled = None
        if len(outcome.sampling.rows):
            logits = self._model.logits(attended, outcome.logits_index)
            sampled = self._sampler(logits, outcome.sampling)
        prompt = [self._score(attended, span) for span in outcome.prompt_spans]
        failures = self._grammar_failures()
        return launched(number, self._device, begun, step.sampled_rows, sampled, prompt, failures, sent)

    def _launch_decode(self, plan: StepPlan, rows: np.ndarray, lines: int) -> Pending:
        """A step of decode rows alone, all of which are sampled, padded to `lines`."""
        positions = unpack(plan.starts, np.int32)
        begun = self._moment()
        answer = self._decode.stage(rows, positions, unpack(plan.slots, np.int32), lines)
        if self._sampler.only_draws(rows):
            self._draw(lines)
            return launched(plan.step, self._device, begun, rows, Sampled(answer, None), sent=answer)
        self._forward(lines)
        logits = self._decode.logits(lines)[: len(rows)]
        sampled = self._sampler(logits, self._builder.sampling(rows, positions + 1))
        return launched(plan.step, self._device, begun, rows, sampled, (), self._grammar_failures(), answer)

    @property
    def grammars(self) -> GrammarMask:
        """Which compiles beside the steps."""
        assert self._grammars is not None, "a server's runner has them"
        return self._grammars

    def _grammar_failures(self) -> dict[int, str]:
        """Rows of the step that was just sampled whose grammar cannot go on, and why."""
        return self._grammars.take_failures() if self._grammars else {}

    def _score(self, attended: Attended, span: PromptSpan) -> PromptScores:
        """Logprobs of the prompt ids that one chunk predicts."""
        parts = []
        for begin in range(0, len(span.targets), PROMPT_SLICE):
            targets = span.targets[begin : begin + PROMPT_SLICE]
            index = span.index[begin : begin + PROMPT_SLICE]
            logprobs = self._model.logits(attended, index).float().log_softmax(-1)
            top = logprobs.topk(min(span.k, logprobs.shape[1]), -1)
            parts.append((logprobs.gather(1, targets[:, None]).squeeze(1), top.indices, top.values))
        return PromptScores(span.row, span.start, *(torch.cat(tensors) for tensors in zip(*parts)))


def _place(error: Exception) -> str:
    """The lines of code that an exception came through, by which ranks know that they failed alike."""
    return " ".join(f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__))


def _max_len(args: ServerArgs, config: ModelConfig) -> int:
    """Tokens that a request may have."""
    context = config.max_position_embeddings
    if args.max_req_total_len is not None and args.max_req_total_len > context:
        raise ConfigError(f"--max_req_total_len {args.max_req_total_len}: the model's context has {context} tokens")
    return args.max_req_total_len or context


def _library_from(model: BaseModel, kv: KVBuffer, dtype: torch.dtype) -> int | None:
    """From how many tokens on chunks are left to cuDNN on this device."""
    layer_kv = kv.layer(0)
    if layer_kv.device.type == "cpu" or len(layer_kv.shape) != 4:
        return None
    length = measure_crossover(model.heads, layer_kv.shape[3], layer_kv, dtype)
    torch.cuda.empty_cache()
    logger.info("attention of prompts by cuDNN: %s", f"from {length} tokens of a step on" if length else "never")
    return length


def _check_kv_type(kv_type: str, model: BaseModel, platform: Platform) -> None:
    """ConfigError if the model's cache or the device cannot have it."""
    if any(len(shape) == 1 and shape[0] for shape in model.slot_shapes):
        raise ConfigError(f"--llm_kv_type {kv_type}: {model.config.model_type} keeps latents, not K and V of heads")
    if any(shape[-1] % 2 for shape in model.slot_shapes):
        raise ConfigError(f"--llm_kv_type {kv_type}: heads need an even number of features, not {model.head_dim}")
    if kv_type == "fp8kv" and not platform.has_float8:
        raise ConfigError(f"--llm_kv_type fp8kv: {platform.name} has no float8 arithmetic; int8kv runs everywhere")


def _pool_size(
    args: ServerArgs,
    rows: int,
    max_len: int,
    bytes_per_token: int,
    runner: Callable[[int], ModelRunner],
    parallel: ParallelState,
    platform: Platform,
) -> sizing.PoolSize:
    before = platform.free_memory()
    if platform.device.type == "cpu":
        if args.max_total_token_num:
            return sizing.asked_pool(args.max_total_token_num, before // parallel.size, bytes_per_token)
        return sizing.cpu_pool(before, parallel.size, rows * max_len, bytes_per_token)
    probe = runner(1)  # holds the memory of its graphs until it has been measured
    result = probe.launch(largest_step(args, rows, max_len)).result()
    if result.failed:
        raise sizing.NotEnoughMemory(
            f"the largest step (--batch_max_tokens {args.batch_max_tokens}) failed: {result.failed[0][1]}"
        )
    for plan in small_steps(args, rows, max_len):
        probe.launch(plan).result()
    torch.cuda.synchronize()
    after = platform.free_memory()
    if args.max_total_token_num:
        return sizing.asked_pool(args.max_total_token_num, after, bytes_per_token)
    return sizing.gpu_pool(before, after, args.mem_fraction, bytes_per_token)
