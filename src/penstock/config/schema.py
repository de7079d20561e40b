"""Every option, with its default, its one line of documentation, its possible values and its heading in `--help`.

A field's name is its keyword in `LLM(...)` and, with dashes, its flag; names are vLLM's where the meaning is the same. Nothing
is resolved here: `resolve.py` checks what depends on the model and the device.

This is also the one place where options are accepted: known names, their types, choices and ranges. `LLM`, `AsyncLLM`, the
commands and the engine itself all come through `engine_options` and `checked`, so that none accepts what another refuses."""

import dataclasses
import difflib
import os
import types
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from penstock.core.errors import ConfigError
from penstock.parallel.axis import Place

MODEL, MEMORY, CACHE, SCHEDULING = "Model", "Memory", "Cache", "Scheduling"
SPECULATION, ADAPTERS = "Speculative decoding", "Adapters"
EXECUTION, PARALLEL, SERVER = "Execution", "Several devices", "Server"
LIMITS, OBSERVABILITY = "Limits", "Observability"
"""Headings of `--help`."""

METHODS = ("auto", "ngram", "suffix", "lookahead", "layer_skip", "draft_model", "eagle", "eagle3", "medusa", "mtp",
           "dflash", "dspark")
"""Of speculative decoding."""


def option(default: Any, doc: str, choices: tuple[str, ...] = (), *, group: str = "", least: float | None = None,
           fraction: bool = False, commas: bool = True, short: str = "") -> Any:
    """A documented dataclass field; flags, help and checks are generated from what is kept here.

    choices: the possible values, if few. group: the heading from this option on. least: the smallest possible number. fraction:
    above 0 and at most 1. commas: whether a value of a list's flag may hold several. short: a second name of the flag."""
    metadata = {"doc": doc, "choices": choices, "group": group, "least": least, "fraction": fraction, "commas": commas,
                "short": short}
    if isinstance(default, dict | list):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options of the engine. None means that `resolve` decides."""

    model: str = option("canary", "a Hugging Face folder or a hub id; canary is the small model that comes with Penstock",
                        group=MODEL)
    tokenizer: str | None = option(None, "folder or hub id of the tokenizer, if not the model's")
    revision: str | None = option(None, "branch, tag or commit of the hub id")
    skip_tokenizer_init: bool = option(False, "run on token ids only; no text in or out")
    chat_template: str | None = option(None, "a chat template's file, its text, or the name of one of the model's own")
    tool_call_parser: str = option("auto", "how the model writes tool calls: a dialect's name or vLLM's name for it, none, or "
                                   "auto: found from the chat template")
    reasoning_parser: str = option("auto", "how the model writes reasoning; the same values")
    constrain_tools: str = option("off", "auto: tool calls that the model makes by itself are held to their schemas once they "
                                  "have begun; off: only those of strict tools and forced ones", ("off", "auto"))
    generation_config: str = option("auto", "auto: default sampling parameters from generation_config.json; none, or vLLM's "
                                    "name vllm: OpenAI's", ("auto", "none", "vllm"))
    override_generation_config: dict[str, Any] = option({}, "default sampling parameters that win over generation_config.json: "
                                                        "temperature, top_p, top_k, min_p, repetition_penalty, max_new_tokens")
    pooling: str = option("auto", "how embeddings are made from hidden states: the last token's, their mean, the first token's "
                          "(cls), or auto: as the folder's 1_Pooling says, else last", ("auto", "last", "mean", "cls"))
    reranker: str = option("auto", "how pairs of texts are scored by a language model: by the prompt and the answers yes and "
                           "no of qwen3's rerankers; auto: so if the model is named like one; none: by embeddings",
                           ("auto", "none", "qwen3"))
    max_logprobs: int = option(20, "maximum number of alternatives that logprobs may ask for; -1: the whole vocabulary",
                               least=-1)
    trust_remote_code: bool = option(False, "accepted for scripts made for vLLM; changes nothing, because code that comes with "
                                     "a model is never run")
    load_format: str = option("auto", "auto: safetensors; dummy: random weights, for benchmarks", ("auto", "dummy"))
    quantization: str | None = option(None, "quantize a plain checkpoint while it is loaded: fp8, int8, int4, mxfp4, nvfp4, "
                                      "nf4, q8_0, q4_0 ...; a quantized one's own method is found without this", short="-q")
    quantization_rules: dict[str, str] = option({}, "exceptions, as PATTERN=SCHEME: modules (with * or re:...), first or last "
                                                "layer, and a scheme or plain; the first that fits decides")
    dtype: str = option("auto", "type of weights, activations and cache; auto: the checkpoint's",
                        ("auto", "float32", "float16", "bfloat16", "half", "float"))
    seed: int = option(0, "seed of dummy weights, and of the seeds drawn for requests without one")
    max_model_len: int | None = option(None, "longest prompt plus output, in tokens; by default the model's own, or what "
                                       "memory allows", group=MEMORY, least=2)
    gpu_memory_utilization: float = option(0.9, "fraction of the GPU's memory that this engine may fill", fraction=True)
    kv_cache_memory_bytes: int | None = option(None, "size of the KV cache; by default what memory allows", least=1)
    experts_on_device: str | None = option(None, "how many experts of each layer the GPU's memory holds, the others being read "
                                           "from host memory: a number, or auto for as many as fit; by default all")
    offload_weights: str | None = option(None, "share of the layers whose matrices are in host memory (on a CPU: in a file "
                                         "that is mapped) and come to the device while they run, as 0.5, or auto for as few "
                                         "as memory needs; by default none")
    offload_folder: str | None = option(None, "folder in which such matrices are in a file, not in host memory; with it there "
                                        "are no CUDA graphs, as steps wait for the disk layer by layer (on a CPU: by default "
                                        "the cache folder)")
    block_size: int | None = option(None, "tokens in a page of the KV cache (default: 16)", least=1)
    kv_cache_dtype: str = option("auto", "how keys and values are stored: as the checkpoint says or plain (auto), bfloat16, "
                                 "fp8, fp8_e5m2, fp8_per_token_head, int8, int4, nvfp4, turbo4, turbo3, q8_0, q4_0, or plain "
                                 "on the device and in 4 bits behind it (aged)", group=CACHE)
    kv_cache_plain_layers: list[str] = option([], "layers whose keys and values stay plain: numbers, first, last or "
                                              "sliding_window")
    kv_cache_scales: dict[str, str] = option({}, "scales of keys and values for fp8 and fp8_e5m2, as k=0.02,v=0.05; by default "
                                             "the checkpoint's, or 1")
    enable_prefix_caching: bool = option(True, "reuse the KV cache of earlier requests with the same prefix")
    cache_policy: str = option("adaptive", "pages of equal priority that are evicted first: the least recently used (lru), "
                               "those cheapest to recompute (cost), the last tokens of conversations (tail), or by an adaptive "
                               "balance of recency and reuse, as ARC (adaptive)", ("adaptive", "cost", "lru", "tail"))
    cache_tenant_share: float = option(1.0, "maximum fraction of the device's cache for one tenant's pages", fraction=True)
    cache_host_bytes: int | None = option(None, "host memory for pages evicted from the device, pinned on a GPU; by default "
                                          "none, or 1G with a disk or a remote store", least=0)
    cache_disk: str | None = option(None, "folder where pages outlive the engine; several engines may share it. The cache "
                                    "keeps to a subfolder penstock-cache that it creates")
    cache_disk_adopt: bool = option(False, "allow the cache to create its subfolder in a folder that has other files in it")
    cache_disk_bytes: int = option(64 << 30, "maximum size of this folder", least=1)
    cache_remote: str | None = option(None, "store that machines share: redis://HOST:PORT, or any URL of fsspec such as "
                                      "s3://BUCKET/FOLDER (pip install 'penstock[remote]')")
    cache_write: str = option("through", "write pages to host, disk and remote store as soon as they are computed (through), "
                              "or when they are evicted (evict)", ("through", "evict"))
    cache_load: str = option("auto", "auto: load pages where that is predicted to be faster than recomputing them; always: "
                             "whenever they are found", ("auto", "always"))
    max_num_seqs: int | None = option(None, "maximum number of sequences that run at once (default: 128, on a GPU 1,024)",
                                      group=SCHEDULING, least=1)
    max_num_batched_tokens: int | None = option(None, "maximum tokens of a step; longer prompts are chunked", least=1)
    max_num_queued_reqs: int = option(1024, "requests that may wait; more are refused with status 503", least=1)
    scheduling_policy: str = option("promises", "order of service, and reverse order of preemption: by fair shares and "
                                    "deadlines of classes (promises), by priority, then arrival (priority), or by arrival "
                                    "alone (fcfs)", ("promises", "fcfs", "priority"))
    classes: str | None = option(None, "JSON file with classes of service beside interactive, standard and batch: an object of "
                                 "objects with ttft, tpot (seconds), weight, queue, tenant_queue and preemptible")
    step_target_ms: float | None = option(None, "milliseconds that a step may take while requests decode: prompts are cut into "
                                          "smaller chunks (default: serve 50; offline no limit)")
    depth: int | None = option(None, "steps in flight: 1 waits for each step, 2 (the default) plans the next one meanwhile",
                               least=1)
    speculate: str = option(
        "off", "draft several tokens and verify them in one step: ngram finds them in the text so far, suffix in earlier "
        "answers too, lookahead in the model's own guesses, layer_skip asks the model's first layers, draft_model a small "
        "model, eagle, eagle3, medusa, dflash and dspark heads, mtp the checkpoint's own layer; auto takes "
        "speculative_model, else the own layer, else suffix",
        ("off", *METHODS), group=SPECULATION)
    speculative_model: str | None = option(None, "folder or hub id of a draft model or draft head")
    num_speculative_tokens: int | None = option(None, "maximum tokens drafted at once (default: 5)", least=1)
    draft_policy: str = option("adaptive", "adaptive: fewer drafts, or none, where they would cost more time than they save; "
                               "fixed: always as many", ("adaptive", "fixed"))
    speculative_config: dict[str, Any] = option({}, "all of this as vLLM writes it: method, model, num_speculative_tokens, "
                                                "prompt_lookup_max, prompt_lookup_min")
    enable_lora: bool = option(False, "serve LoRA adapters beside the model", group=ADAPTERS)
    lora_modules: list[str] = option([], "an adapter to serve from the start, as NAME=FOLDER")
    max_loras: int = option(8, "maximum adapters in the device's memory; requests for others wait", least=1)
    max_cpu_loras: int = option(1024, "maximum adapters in host memory", least=1)
    max_lora_rank: int | None = option(None, "maximum rank of an adapter (default: that of lora_modules, or 16)", least=1)
    device: str = option("auto", "auto, cpu, cuda or cuda:N; with several ranks N is the first one's", group=EXECUTION)
    threads: int | None = option(None, "CPU threads for kernels; by default all cores", least=1)
    kernels: dict[str, str] = option({}, "implementation to use for an operation, as op=name; *=reference for plain PyTorch")
    batch_invariant: bool = option(False, "results do not depend on other requests, chunking or cache hits, bit for bit; "
                                   "always so on CPUs, on a GPU at the price of slower kernels")
    enforce_eager: bool = option(False, "capture no CUDA graphs: starts sooner, decodes slower")
    tensor_parallel_size: int = option(1, "devices (on a CPU: processes) that divide every layer among them",
                                       group=PARALLEL, least=1, short="-tp")
    pipeline_parallel_size: int = option(1, "stages, each with some of the layers and on devices of its own, that work on "
                                         "several steps at once", least=1, short="-pp")
    context_parallel_size: int = option(1, "ranks with equal weights that divide the positions of every context among them: "
                                        "the cache holds so many times as much", least=1)
    pipeline_layers: str = option("", "layers of each stage, as 10,12,10; by default such that stages take equal time")
    enable_expert_parallel: bool = option(False, "of a mixture, each rank has some of the experts instead of a part of each")
    expert_placement_strategy: str = option("linear", "which rank has which experts at first: neighbours together (linear), or "
                                            "dealt one by one (round_robin)", ("linear", "round_robin"))
    enable_eplb: bool = option(False, "move experts between ranks while serving, so that each rank has equal work")
    eplb_config: dict[str, Any] = option({}, "num_redundant_experts: room for replicas of experts on all ranks together (0); "
                                         "step_interval: steps between two looks at the load (3000)")
    data_parallel_size: int = option(1, "engines with the whole model behind one server, which sends a request where least is "
                                     "left to compute and its prompt may be cached", least=1, short="-dp")
    data_parallel_rank: int = option(0, "which of them this engine is; the server says so to each", least=0)
    data_parallel_rendezvous: str = option("", "folder in which engines that step together meet; the server says so to each")
    nnodes: int = option(1, "machines that together have the ranks of one engine; each runs this command with its own "
                         "node_rank", least=1)
    node_rank: int = option(0, "number of this machine; 0 has the server", least=0)
    master_addr: str = option("127.0.0.1", "address of machine 0, on which it listens for the others")
    master_port: int = option(29501, "port of machine 0 at which ranks meet; two more for each rank follow it", least=1)
    distributed_executor_backend: str = option("mp", "what starts the ranks of other machines; mp: you do, by penstock serve "
                                               "on each; ray: actors of the Ray cluster that this machine is in", ("mp", "ray"))
    restart: str = option("none", "ranks: an engine that is lost is started again, once its requests have got their errors; "
                          "none: the server ends when no engine is left", ("none", "ranks"))
    disable_custom_all_reduce: bool = option(False, "leave short messages between GPUs to NCCL, too")
    kv_events_config: dict[str, Any] = option({}, "publish KV cache events, as in vLLM: enable_kv_cache_events, publisher, "
                                              "endpoint, replay_endpoint, buffer_steps, hwm, max_queue_size, topic",
                                              group=OBSERVABILITY)

    @property
    def ranks(self) -> int:
        """Of one engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.context_parallel_size

    @property
    def local_ranks(self) -> int:
        """Of one engine, on each machine."""
        return self.ranks // self.nnodes


class Wanted(NamedTuple):
    names: list[str]
    options: EngineOptions
    share: float = 1.0
    """Its part of the requests for its names, beside others of the same names."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Options of the HTTP server in front of an engine."""

    host: str = option("127.0.0.1", "address to listen on", group=SERVER)
    port: int = option(8000, "port to listen on; 0 picks a free one", least=0)
    served_model_name: list[str] = option([], "name by which requests may call the model; by default its folder or id")
    api_key: list[str] = option([], "key that requests must carry; also read from PENSTOCK_API_KEY")
    keys_file: str | None = option(None, "file of hashed keys with tenants, limits and expiries, made by penstock keys; it is "
                                   "read again when it changes")
    admin_api_key: list[str] = option([], "key for requests that affect all tenants, such as /reset_prefix_cache")
    cache_isolation: str = option("auto", "scope of shared prompts; key: requests with the same API key, none: all, auto: key "
                                  "if the server has API keys", ("auto", "key", "none"))
    cache_secret_file: str | None = option(None, "file with the secret that tenants' cache namespaces are derived from, "
                                           "created if missing; without it they are new at each start")
    store: str | None = option(None, "folder where responses, conversations, files and batches outlive the server; without one "
                               "they are kept in memory")
    shutdown_timeout: float = option(30.0, "seconds for running requests to finish after SIGTERM", least=0)
    max_loaded_models: int | None = option(None, "maximum models loaded at once, of several; another is unloaded for one that "
                                           "is asked for; by default as many as fit", least=1)
    keep_alive: float = option(300.0, "seconds after which one of several models is unloaded if nobody uses it; 0: never",
                               least=0)
    pin: list[str] = option([], "name of a model, of several, that is loaded at the start and stays")
    allowed_origins: list[str] = option([], "origin from which browsers may call (CORS)")
    root_path: str = option("", "the path under which a proxy shows this server; requests may come with it or without")
    reuse_port: bool = option(False, "take over the listening socket of a server of this option at this port, and accept only "
                              "once the model is loaded: start the new server, then stop the old one")
    uds: str | None = option(None, "listen on a Unix socket of this path instead of host and port")
    ssl_keyfile: str | None = option(None, "private key for HTTPS, as PEM")
    ssl_certfile: str | None = option(None, "certificate for HTTPS, as PEM")
    grpc_port: int | None = option(None, "serve KServe's inference protocol there too (needs penstock[grpc])", least=0)
    ssl_ca_certs: str | None = option(None, "certificates of the authorities that issue clients' certificates")
    ssl_cert_reqs: int = option(0, "whether clients need a certificate: 0 no, 1 if they have one it is checked, 2 yes", least=0)
    ssl_ciphers: str = option("", "OpenSSL's cipher list for HTTPS; by default Python's")
    return_tokens_as_token_ids: bool = option(False, "name tokens in logprobs as token_id:N, if the request does not say")
    unknown_fields: str = option("refuse", "treatment of unknown fields of a request; refuse them, or warn: ignore them, with "
                                 "a warning in the log and their names in a header of the answer", ("refuse", "warn"))
    stall_timeout: float = option(60.0, "seconds without progress after which a busy engine counts as stuck", least=1e-3)
    allow_priority: str = option("admin", "requests that may have a priority below 0, to be served before others; admin: those "
                                 "with an admin key, all: every request", ("admin", "all"))
    trust_request_chat_template: bool = option(False, "run chat templates that requests bring; a template is a program")
    lora_dir: str | None = option(None, "folder whose subfolders are adapters by their names; it is watched", group=ADAPTERS)
    store_bytes: int = option(1 << 30, "maximum bytes of stored responses and conversations, and again of files; the oldest "
                              "responses go first, files are refused", group=LIMITS, least=1)
    store_days: float = option(30.0, "days after which stored responses and conversations are deleted", least=0)
    max_body_bytes: int = option(16 << 20, "maximum size of a request body", least=1)
    max_json_depth: int = option(64, "maximum nesting depth of a body", least=4)
    max_json_values: int = option(1_000_000, "maximum values (list entries, fields) of a body", least=1000)
    max_text_characters: int | None = option(None, "maximum characters of a text to tokenize; by default 16 for each token of "
                                             "the context, at least a million", least=1)
    max_receiving_bytes: int = option(256 << 20, "maximum bytes of all bodies that are being received", least=1)
    max_request_sequences: int = option(4096, "maximum prompts times n of a request", least=1)
    max_request_scores: int = option(16384, "maximum prompts times n times log probabilities of a request", least=1)
    max_tenant_tokens: int = option(16 << 20, "maximum prompt tokens in flight of one API key", least=1)
    max_connections: int | None = option(None, "maximum connections; beyond it the oldest idle one is closed; by default 4096, "
                                         "or what ulimit -n allows", least=1)
    max_connections_per_address: int | None = option(None, "maximum connections of one address; by default three quarters",
                                                     least=1)
    max_header_bytes: int = option(32 << 10, "maximum bytes of a request's headers", least=256)
    max_header_count: int = option(100, "maximum headers of a request", least=1)
    header_timeout: float = option(10.0, "seconds for a request's headers to arrive", least=1e-3)
    body_timeout: float = option(60.0, "seconds for its body to arrive after that", least=1e-3)
    idle_timeout: float = option(30.0, "seconds until a connection without a request is closed", least=1e-3)
    write_timeout: float = option(60.0, "seconds until a connection is closed whose client does not read its answer",
                                  least=1e-3)
    template_timeout: float = option(10.0, "seconds that a chat template may take for one conversation", least=1e-3)
    otlp_traces_endpoint: str | None = option(None, "send an OpenTelemetry span for each request there, as OTLP over HTTP "
                                              "(http://collector:4318/v1/traces); needs the extra otel", group=OBSERVABILITY)
    torch_profiler_dir: str | None = option(None, "folder for traces of the ranks' steps, from POST /start_profile to "
                                            "/stop_profile; the engine's machine has it")
    log_level: str = option("info", "level of the server's own log", ("debug", "info", "warning", "error"))
    log_format: str = option("text", "format of the server's own log: lines of text, or a JSON object a line", ("text", "json"))
    log_requests: bool = option(True, "log one line for each request that has ended")


OPTIONS: tuple[type, ...] = (EngineOptions, ServerOptions)


Options = TypeVar("Options")

ACCEPTED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("disable_log_stats", "disable_frontend_multiprocessing", "disable_uvicorn_access_log"), (True, False)),
    **dict.fromkeys(("disable_log_requests", "enable_auto_tool_choice", "enable_chunked_prefill", "enable_sleep_mode",
                     "enable_prompt_tokens_details", "enable_server_load_tracking", "enable_tokenizer_info_endpoint",
                     "enable_request_id_headers", "async_scheduling", "no_enable_log_requests"), (True,)),
    **dict.fromkeys(("guided_decoding_backend", "structured_outputs_config.backend"), ("auto", "guidance", "xgrammar")),
    **dict.fromkeys(("api_server_count", "max_num_partial_prefills"), (1,)),
    **dict.fromkeys(("model_impl", "config_format", "chat_template_content_format", "tokenizer_mode"), ("auto",)),
    "logprobs_mode": ("raw_logprobs",), "response_role": ("assistant",), "quantization": (None,),
    "runner": ("auto", "generate", "pooling")}
"""Keywords and flags of vLLM's that are no options here, with the values that ask for what is done anyway."""


GENERATION_DEFAULTS = {**{name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")},
                       "max_new_tokens": "max_tokens"}
"""Sampling parameters that generation_config.json and override_generation_config may set, by their names there."""


def engine_options(model: str | EngineOptions, given: Mapping[str, Any]) -> EngineOptions:
    """EngineOptions from keywords, as `LLM` and `AsyncLLM` take them; `model` may be EngineOptions that `given` changes.

    ConfigError for a name that does not exist, naming similar ones, and for a value that is not possible."""
    known = {field.name for field in dataclasses.fields(EngineOptions)}
    wanted: dict[str, Any] = {}
    for name, value in given.items():
        if name in known:
            wanted[name] = value
        elif name not in ACCEPTED:
            near = difflib.get_close_matches(name, [*known, *ACCEPTED], 3, 0.6)
            hint = f"; similar are {', '.join(near)}" if near else f"; possible are {', '.join(sorted(known))}"
            raise ConfigError(f"there is no option {name!r}{hint}")
        elif value not in ACCEPTED[name]:
            raise ConfigError(f"{name}={value!r} is not supported; possible is {', '.join(map(repr, ACCEPTED[name]))}")
    return checked(dataclasses.replace(model if isinstance(model, EngineOptions) else EngineOptions(model=model), **wanted))


def checked(options: Options) -> Options:
    """The options with every value of its field's type. ConfigError for a value that no model and no device could honour."""
    found: dict[str, Any] = {}
    hints = get_type_hints(type(options))
    for field in dataclasses.fields(options):  # type: ignore[arg-type]
        value = _typed(field.name, getattr(options, field.name), hints[field.name])
        if value is not None:
            _in_range(field, value)
        found[field.name] = value
    result = dataclasses.replace(options, **found)  # type: ignore[type-var]
    if isinstance(result, ServerOptions):
        _check_server(result)
    elif isinstance(result, EngineOptions):
        _check_engine(result)
    return result


def _typed(name: str, value: Any, hint: Any) -> Any:
    """`value` as its field's type: paths and torch dtypes become text, an integer may stand for a float."""
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    elif name == "dtype":
        value = {"half": "float16", "float": "float32"}.get(found := str(value).removeprefix("torch."), found)
    elif name in ("experts_on_device", "offload_weights") and isinstance(value, int | float):
        value = str(value)
    try:
        return msgspec.convert(value, hint)
    except msgspec.ValidationError:
        raise ConfigError(f"{name} must be {_in_words(hint)}, got {value!r}") from None


def unwrapped(hint: Any) -> Any:
    """int | None -> int."""
    if get_origin(hint) in (Union, types.UnionType):
        return next(part for part in get_args(hint) if part is not type(None))
    return hint


def _in_words(hint: Any) -> str:
    kind = unwrapped(hint)
    words = {int: "an integer", float: "a number", str: "a text", bool: "True or False", list: "a list of texts",
             dict: "a mapping"}[get_origin(kind) or kind]
    return words if kind is hint else f"{words} or None"


def _in_range(field: dataclasses.Field[Any], value: Any) -> None:
    choices, least = field.metadata["choices"], field.metadata["least"]
    if choices and value not in choices:
        raise ConfigError(f"{field.name} is {value!r}; possible are {', '.join(choices)}")
    if field.metadata["fraction"] and not 0 < value <= 1:
        raise ConfigError(f"{field.name} is {value}; it is a fraction above 0, at most 1")
    if least is not None and not value >= least:
        raise ConfigError(f"{field.name} is {value}; it must be at least {least:g}")


def _check_engine(options: EngineOptions) -> None:
    if not options.model:
        raise ConfigError("model is empty; name a Hugging Face folder or a hub id")
    generation_defaults(options.override_generation_config)
    if options.enable_expert_parallel and options.data_parallel_size > 1 and options.ranks > options.tensor_parallel_size:
        raise ConfigError("with data_parallel_size and enable_expert_parallel, attention is by data: pipeline_parallel_size "
                          "and context_parallel_size must be 1")
    if options.ranks % options.nnodes or options.node_rank >= options.nnodes:
        raise ConfigError(f"nnodes is {options.nnodes} and node_rank {options.node_rank}; nnodes must divide the "
                          f"{options.ranks} ranks (tensor x pipeline x context), and node_rank be less than nnodes")
    if options.nnodes > 1 and options.data_parallel_size > 1:
        raise ConfigError("data_parallel_size is not possible with nnodes; run a server on each machine behind a balancer")
    if options.nnodes > 1 and options.master_port + 2 * options.ranks > 65535:
        raise ConfigError(f"master_port is {options.master_port}; possible are 1 to {65535 - 2 * options.ranks}, because two "
                          f"ports for each of the {options.ranks} ranks follow it")
    stage_layers(options)
    balancing(options)
    if options.lora_modules and not options.enable_lora:
        raise ConfigError("lora_modules needs enable_lora")
    held = options.experts_on_device
    if held is not None and (options.ranks > 1 or options.enable_expert_parallel):
        raise ConfigError("experts_on_device is for a single GPU; with several, divide the model: leave it out")
    if held not in (None, "auto") and not (held.isdecimal() and int(held) > 0):
        raise ConfigError(f"experts_on_device is {held!r}; possible are auto and a number of experts of each layer, at least 1")
    _check_offload(options)
    if options.step_target_ms is not None and not options.step_target_ms > 0:
        raise ConfigError(f"step_target_ms is {options.step_target_ms}; it must be above 0")


def _check_offload(options: EngineOptions) -> None:
    asked = options.offload_weights
    if asked is None:
        if options.offload_folder is not None:
            raise ConfigError("offload_folder needs offload_weights")
        return
    try:
        fits = asked == "auto" or 0 < float(asked) <= 1
    except ValueError:
        fits = False
    if not fits:
        raise ConfigError(f"offload_weights is {asked!r}; possible are auto and a share of the layers above 0, at most 1")
    for name, given in (("speculate layer_skip", "layer_skip" in (options.speculate, options.speculative_config.get("method"))),
                        ("experts_on_device", options.experts_on_device is not None), ("enable_eplb", options.enable_eplb),
                        ("data_parallel_size with enable_expert_parallel",
                         options.enable_expert_parallel and options.data_parallel_size > 1)):
        if given:
            raise ConfigError(f"offload_weights is not possible with {name}, which reads matrices out of turn; leave one of "
                              "them out")


_EPLB = {"num_redundant_experts": 0, "step_interval": 3000}


def balancing(options: EngineOptions) -> tuple[int, int]:
    """(replicas of experts on all ranks together, steps between looks at the load; 0: none), of eplb_config. ConfigError."""
    given = options.eplb_config
    for name, value in given.items():
        if name not in _EPLB:
            raise ConfigError(f"eplb_config has {name!r}; possible are {', '.join(_EPLB)}")
        if not isinstance(value, int) or value < (name == "step_interval"):
            raise ConfigError(f"eplb_config: {name} is {value!r}; it must be an integer >= {int(name == 'step_interval')}")
    if given and not options.enable_eplb:
        raise ConfigError("eplb_config needs enable_eplb")
    if options.enable_eplb and not options.enable_expert_parallel:
        raise ConfigError("enable_eplb needs enable_expert_parallel")
    found = {**_EPLB, **given}
    return (found["num_redundant_experts"], found["step_interval"]) if options.enable_eplb else (0, 0)


def place(options: EngineOptions) -> Place:
    """The place of an engine's first rank."""
    tensors, datas = options.tensor_parallel_size, options.data_parallel_size if options.enable_expert_parallel else 1
    dealt = options.enable_expert_parallel and tensors * datas > 1
    meeting = f"tcp://{options.master_addr}:{options.master_port}" if options.nnodes > 1 else options.data_parallel_rendezvous
    return Place(tensors=tensors, contexts=options.context_parallel_size, stages=options.pipeline_parallel_size,
                 layers=stage_layers(options), experts=dealt,
                 spare=-(-balancing(options)[0] // (tensors * datas)) if dealt else 0, datas=datas,
                 data=options.data_parallel_rank if datas > 1 else 0, rendezvous=meeting)


def stage_layers(options: EngineOptions) -> tuple[int, ...]:
    """`pipeline_layers` as numbers; empty if it is not given. ConfigError for anything else."""
    text, stages = options.pipeline_layers, options.pipeline_parallel_size
    parts = [part.strip() for part in text.split(",")] if text else []
    if parts and (len(parts) != stages or not all(part.isdecimal() and int(part) for part in parts)):
        raise ConfigError(f"pipeline_layers is {text!r}; it must be {stages} numbers above 0, one for each stage, as "
                          f"{','.join(['8'] * stages)}")
    return tuple(map(int, parts))


def generation_defaults(given: Mapping[str, Any]) -> dict[str, float]:
    """override_generation_config with its values as numbers. ConfigError for what is no sampling parameter or no number."""
    found: dict[str, float] = {}
    for name, value in given.items():
        if name not in GENERATION_DEFAULTS:
            raise ConfigError(f"override_generation_config has {name!r}; possible are {', '.join(GENERATION_DEFAULTS)}")
        try:
            found[name] = msgspec.convert(value, int if name in ("top_k", "max_new_tokens") else float, strict=False)
        except msgspec.ValidationError:
            raise ConfigError(f"override_generation_config: {name} is {value!r}, which is not a number") from None
    return found


def _check_server(options: ServerOptions) -> None:
    if options.ssl_cert_reqs > 2:
        raise ConfigError(f"ssl_cert_reqs is {options.ssl_cert_reqs}; possible are 0, 1 and 2")
    if (options.ssl_keyfile or options.ssl_ca_certs) and not options.ssl_certfile:
        raise ConfigError("HTTPS needs a certificate: give ssl_certfile, and ssl_keyfile if the key is not in the same file")
    if options.ssl_cert_reqs and not options.ssl_ca_certs:
        raise ConfigError("ssl_cert_reqs needs ssl_ca_certs: the authorities whose certificates clients may have")
    if options.grpc_port is not None and (options.ssl_ciphers or options.ssl_cert_reqs == 1):
        raise ConfigError(f"{'ssl_ciphers' if options.ssl_ciphers else 'ssl_cert_reqs 1'} is not possible with grpc_port: gRPC "
                          "has its own ciphers, and asks every client for a certificate (2) or none (0)")
    if options.port > 65535:
        raise ConfigError(f"port is {options.port}; it must be between 0 and 65535")
    for name in ("api_key", "admin_api_key", "served_model_name"):
        if any(not text.strip() for text in getattr(options, name)):
            raise ConfigError(f"{name} must not be empty")
