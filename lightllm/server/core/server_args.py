"""ServerArgs: one field is one flag is one line of docs/options.md (which `lightllm options` writes)."""

from dataclasses import dataclass, field

from lightllm.server.output_parsers.registry import NONE, TOOL_PARSERS


def flag(default, help: str, **extra):
    """A field that becomes `--name`; `extra` may hold `choices`."""
    factory = {"default_factory": lambda: list(default)} if isinstance(default, list) else {"default": default}
    return field(**factory, metadata={"help": help, **extra})


REASONING_FORMATS = ("deepseek-r1", "deepseek-v3", "qwen3", "qwen3-thinking", "glm4", "glm45")  # one format

MAX_PROCESSES = 128  # of one kind


@dataclass(frozen=True)
class ServerArgs:
    model_dir: str | None = flag(
        None, "Hugging Face directory or GGUF file (LLaMA architecture); default: the embedded SmolLM2-135M-Instruct"
    )
    model_name: str | None = flag(None, "name told to clients; default: the last part of model_dir, without .gguf")
    host: str = flag("127.0.0.1", "address to listen on")
    port: int = flag(8000, "port to listen on; 0 takes a free one")
    httpserver_workers: int = flag(1, "HTTP front processes that share the port")
    tp: int = flag(1, "tensor-parallel ranks, one worker process each")
    nccl_timeout: float = flag(
        60.0, "seconds that a tensor-parallel rank may keep the others waiting; then the server ends with an error"
    )
    enable_ep_moe: bool = flag(False, "ranks hold some experts of a mixture whole instead of a part of each expert")
    device: str = flag(
        "auto", "where the model runs; auto takes the GPU if there is one", choices=["auto", "cuda", "cpu"]
    )
    data_type: str | None = flag(
        None, "bf16, fp16 or fp32; default: the checkpoint's on GPUs, fp32 on CPUs", choices=["bf16", "fp16", "fp32"]
    )
    load_format: str = flag(
        "auto", "auto reads the checkpoint's weights, random draws them (benchmarks)", choices=["auto", "random"]
    )
    trust_remote_code: bool = flag(False, "let the checkpoint's own Python code load its tokenizer")
    chat_template: str | None = flag(None, "file with a Jinja chat template; default: the checkpoint's")
    tool_call_parser: str | None = flag(
        None, "how the model writes calls; default: told from its chat template", choices=[*TOOL_PARSERS, NONE]
    )
    reasoning_parser: str | None = flag(
        None, "how the model marks thoughts; default: told from its chat template", choices=[*REASONING_FORMATS, NONE]
    )
    grammar_backend: str = flag(
        "llguidance", "library that enforces JSON schemas and grammars", choices=["llguidance", "xgrammar"]
    )
    allow_special_tokens_in_prompt: bool = flag(
        False, "control tokens that users type into chat messages are control tokens; otherwise they are plain text"
    )
    allow_request_chat_template: bool = flag(False, "chat requests may bring a chat_template of their own")
    api_key: list[str] = flag(
        [], "keys of which every request must bring one; liveness alone goes without", metavar="KEY"
    )
    allowed_origins: list[str] = flag([], "web origins whose pages may ask (CORS); * is any", metavar="ORIGIN")
    strict_fields: bool = flag(
        False, "refuse unknown fields of OpenAI and Anthropic requests; otherwise a header names them"
    )
    eos_id: list[int] = flag([], "end-of-sequence ids besides those of the checkpoint")
    max_total_token_num: int | None = flag(None, "KV cache size in tokens; default: measured, what memory leaves")
    llm_kv_type: str | None = flag(
        None,
        "int8kv or fp8kv: K and V in 8 bits with a 16-bit scale per token and head; default: in the data type",
        choices=["int8kv", "fp8kv"],
    )
    mem_fraction: float = flag(
        0.9,
        "share that the KV cache takes of the GPU memory which the largest step leaves free; without effect on a CPU",
    )
    max_req_total_len: int | None = flag(
        None, "prompt + output tokens of one request, at most the model's context; default: that"
    )
    running_max_req_size: int | None = flag(
        None, "sequences that run at once; default: 1024 where the GPU has 64 GiB or more, otherwise 512"
    )
    batch_max_tokens: int = flag(8192, "tokens of one step, all sequences together")
    chunked_prefill_size: int | None = flag(
        None, "prompt tokens of one sequence computed in one step; default: 8192 on a GPU, 2048 on a CPU"
    )
    mixed_prefill_size: int = flag(
        256,
        "the same while others decode, who wait for it; such a step has at most four times as many tokens; with "
        "--tpot_slo that decides instead",
    )
    schedule_policy: str = flag(
        "past_future",
        "what outputs are expected to need: past_future predicts their lengths from recent ones; conservative counts "
        "max_new_tokens and pauses nobody if all requests give it; aggressive fills the pool",
        choices=["past_future", "conservative", "aggressive"],
    )
    ttft_slo: float | None = flag(
        None, "seconds to the first token; requests that cannot make it are refused with 429; default: they wait"
    )
    tpot_slo: float | None = flag(None, "seconds between tokens, which steps keep by computing less of waiting prompts")
    fair_share: bool = flag(False, "clients, named by API key or user, take turns by the tokens served to them")
    disable_dynamic_prompt_cache: bool = flag(False, "compute every prompt whole, keep no prefix for later requests")
    disable_autotune: bool = flag(False, "leave products of shapes that no table of this GPU knows to the library")
    disable_cudagraph: bool = flag(False, "launch every kernel of a decode step anew instead of replaying CUDA graphs")
    graph_max_batch_size: int | None = flag(
        None, "most decoding sequences for which CUDA graphs are captured; default: as many as run at once"
    )
    graph_max_tokens: int = flag(2048, "most tokens of a step with prompts for which CUDA graphs are captured")
    max_queue: int = flag(2048, "waiting sequences; more are refused with 429 and Retry-After")
    max_body_size: int = flag(16, "largest HTTP request body in MiB; larger is refused with 413")
    drain_timeout: float = flag(30.0, "seconds that running requests have to end after SIGTERM")
    use_tgi_api: bool = flag(False, "/generate, /generate_stream and / in the shapes of text-generation-inference")
    profile_dir: str | None = flag(
        None,
        "folder for torch profiler traces of what happens from POST /start_profile to /stop_profile; default: none",
    )
    request_log: str = flag("human", "a line on stderr for every request that ends", choices=["human", "json", "none"])
    otlp_traces_endpoint: str | None = flag(
        None, "OpenTelemetry collector that gets a trace of every request, such as http://localhost:4318/v1/traces"
    )
    log_level: str = flag("info", "least severe messages logged", choices=["debug", "info", "warning", "error"])

    def check(self) -> None:
        """Raises ValueError naming the flag and its range."""
        for name in ("httpserver_workers", "tp"):
            self._demand(name, 1 <= getattr(self, name) <= MAX_PROCESSES, f"1 to {MAX_PROCESSES}")
        counts = (
            "running_max_req_size", "batch_max_tokens", "chunked_prefill_size", "mixed_prefill_size",
            "graph_max_batch_size", "graph_max_tokens", "max_queue", "max_body_size",
        )  # fmt: skip
        for name in counts:
            value = getattr(self, name)
            self._demand(name, value is None or value >= 1, "at least 1")
        for name in ("max_total_token_num", "max_req_total_len"):
            value = getattr(self, name)
            self._demand(name, value is None or value >= 2, "at least 2, a token of the prompt and one of the output")
        self._demand("port", 0 <= self.port <= 65535, "0 to 65535")
        self._demand("nccl_timeout", 0 < self.nccl_timeout <= 86400, "above 0 and at most 86400")
        self._demand("mem_fraction", 0 < self.mem_fraction <= 1, "above 0 and at most 1")
        self._demand("drain_timeout", 0 <= self.drain_timeout <= 86400, "0 to 86400")
        for name in ("ttft_slo", "tpot_slo"):
            value = getattr(self, name)
            self._demand(name, value is None or value > 0, "above 0")
        self._demand("eos_id", all(token >= 0 for token in self.eos_id), "at least 0")
        self._demand("api_key", all(self.api_key), "not empty")

    def prompt_chunk(self, on_gpu: bool) -> int:
        """Most prompt tokens of one sequence in a step."""
        return self.chunked_prefill_size or (8192 if on_gpu else 2048)

    def _demand(self, name: str, holds: bool, range_: str) -> None:
        if not holds:
            raise ValueError(f"--{name} must be {range_}, not {getattr(self, name)}")
