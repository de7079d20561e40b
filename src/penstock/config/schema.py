"""Every option there is, with its default and its one line of documentation. Frozen; nothing is resolved here.

A field's name is its keyword in `LLM(...)` and, with dashes, its flag; names are vLLM's where the meaning is the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


def option(default: Any, doc: str, choices: tuple[str, ...] = ()) -> Any:
    """A documented dataclass field; the flags are generated from what is kept here."""
    metadata = {"doc": doc, "choices": choices}
    if isinstance(default, dict | list):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What a user may say about an engine. None means: decided by `resolve`."""

    model: str = option("canary", "a Hugging Face folder or a hub id; canary is the small model that comes with Penstock")
    tokenizer: str | None = option(None, "folder or hub id of the tokenizer, if not the model's")
    revision: str | None = option(None, "branch, tag or commit of the hub id")
    skip_tokenizer_init: bool = option(False, "run on token ids only; no text in or out")
    chat_template: str | None = option(None, "a chat template's file, its text, or the name of one of the model's own")
    generation_config: str = option("auto", "auto: default sampling parameters from generation_config.json",
                                    ("auto", "none"))
    load_format: str = option("auto", "auto: safetensors; dummy: random weights, for benchmarks", ("auto", "dummy"))
    dtype: str = option("auto", "of weights, activations and cache; auto: the checkpoint's",
                        ("auto", "float32", "float16", "bfloat16"))
    device: str = option("auto", "auto, cpu, cuda or cuda:N")
    seed: int = option(0, "of dummy weights and of the seeds drawn for requests without one")
    max_model_len: int | None = option(None, "longest prompt plus output; by default the model's own, or what memory allows")
    max_num_seqs: int | None = option(None, "the most sequences that run at once")
    max_num_batched_tokens: int | None = option(None, "the most tokens computed in one step; longer prompts are chunked")
    max_num_queued_reqs: int = option(1024, "requests that may wait; more are refused with status 503")
    block_size: int | None = option(None, "tokens in a page of the KV cache")
    gpu_memory_utilization: float = option(0.9, "fraction of the GPU's memory that this engine may fill")
    kv_cache_memory_bytes: int | None = option(None, "size of the KV cache; by default what memory allows")
    enable_prefix_caching: bool = option(True, "find what earlier requests computed")
    cache_policy: str = option("adaptive", "what leaves the device first among pages of equal priority: the least recently "
                               "used (lru), what is cheap to compute again (cost), conversations' last tokens (tail), or what "
                               "is found again least (adaptive)", ("adaptive", "cost", "lru", "tail"))
    cache_tenant_share: float = option(1.0, "the largest fraction of the device's cache that one tenant's pages may occupy")
    cache_host_bytes: int | None = option(None, "host memory for pages that leave the device, pinned on a GPU; by default "
                                                "none, or 1G as the way to a disk or a remote store")
    cache_disk: str | None = option(None, "folder where pages outlive the engine; several engines may share it. The "
                                         "cache keeps to a subfolder penstock-cache that it creates")
    cache_disk_adopt: bool = option(False, "allow the cache to create its subfolder in a folder that has other files in it")
    cache_disk_bytes: int = option(64 << 30, "the most that this folder may hold")
    cache_remote: str | None = option(None, "where machines share pages: redis://HOST:PORT, or any URL of fsspec such as "
                                            "s3://BUCKET/FOLDER (pip install 'penstock[remote]')")
    cache_write: str = option("through", "save pages behind the device as soon as they are computed (through), or when they "
                                         "are given up (evict)", ("through", "evict"))
    cache_load: str = option("auto", "auto: load pages where that is predicted to be faster than computing them; always: "
                                     "whenever they are found", ("auto", "always"))
    kv_events_config: dict[str, Any] = option({}, "publish what is cached, as in vLLM: enable_kv_cache_events, publisher, "
                                                  "endpoint, replay_endpoint, buffer_steps, hwm, max_queue_size, topic")
    step_target_ms: float | None = option(None, "milliseconds that a step may take at most while requests wait for their next "
                                          "token and prompts have waited long; serve takes 50, offline nothing is cut")
    depth: int | None = option(None, "plans in flight: 1 waits for each step, 2 overlaps planning with the step before")
    batch_invariant: bool = option(False, "the bits of a request's results do not depend on what runs beside it, how it is "
                                   "chunked, or what was cached; CPUs always keep that, a GPU takes slower kernels for it")
    enforce_eager: bool = option(False, "capture no CUDA graphs; starts sooner, decodes slower")
    threads: int | None = option(None, "CPU threads for kernels; by default all cores")
    kernels: dict[str, str] = option({}, "implementation to use for an operation, as op=name; *=reference for plain PyTorch")


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """What a user may say about the HTTP server in front of an engine."""

    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "port to listen on; 0 picks a free one")
    served_model_name: list[str] = option([], "names that requests may call the model by; by default its folder or id")
    api_key: list[str] = option([], "keys of which a request must carry one; also read from PENSTOCK_API_KEY")
    admin_api_key: list[str] = option([], "keys of which a request must carry one that concerns all tenants: "
                                          "/reset_prefix_cache")
    cache_isolation: str = option("auto", "whose requests share cached prompts; key: those with the same API key, none: all, "
                                          "auto: key if the server has API keys", ("auto", "key", "none"))
    cache_secret_file: str | None = option(None, "file with the secret that tenants' cache namespaces are derived from, made "
                                                 "if it is missing; without it they are new at each start")
    shutdown_timeout: float = option(30.0, "seconds that running requests are given to finish after SIGTERM")
    allowed_origins: list[str] = option([], "origins that browsers may call from (CORS)")
    max_body_bytes: int = option(16 << 20, "the largest request body")
    stall_timeout: float = option(60.0, "seconds without progress after which a busy engine counts as stuck")
    trust_request_chat_template: bool = option(False, "run chat templates that requests bring; a template is a program")
    log_level: str = option("info", "of the server's own log", ("debug", "info", "warning", "error"))
