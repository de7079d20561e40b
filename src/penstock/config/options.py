"""The one place where options are accepted: known names, their types, choices and ranges.

`LLM`, `AsyncLLM`, the commands and the engine itself all come through here, so that none of them accepts what another refuses.
Checks that need the model or the device are `resolve.py`'s."""

import dataclasses
import difflib
import os
import types
from collections.abc import Mapping
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from penstock.config.schema import EngineOptions, ServerOptions
from penstock.core.errors import ConfigError
from penstock.parallel.axis import Place

Options = TypeVar("Options")

ACCEPTED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("disable_log_stats", "disable_frontend_multiprocessing", "disable_uvicorn_access_log"), (True, False)),
    **dict.fromkeys(("disable_log_requests", "enable_auto_tool_choice", "enable_chunked_prefill", "enable_sleep_mode",
                     "enable_prompt_tokens_details", "enable_server_load_tracking", "enable_tokenizer_info_endpoint"), (True,)),
    **dict.fromkeys(("guided_decoding_backend", "structured_outputs_config.backend"), ("auto", "guidance", "xgrammar")),
    "api_server_count": (1,),
    "quantization": (None,),
    "runner": ("auto", "generate", "pooling"),
    "tokenizer_mode": ("auto",),
}
"""Keywords and flags of vLLM's that are no options here, with the values that ask for what is done anyway."""


GENERATION_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")
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
            possible = ", ".join(map(repr, ACCEPTED[name]))
            raise ConfigError(f"{name}={value!r} is not supported; possible is {possible}")
    base = model if isinstance(model, EngineOptions) else EngineOptions(model=model)
    return checked(dataclasses.replace(base, **wanted))


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
    if options.enable_lora and options.pipeline_parallel_size > 1:
        raise ConfigError("adapters are not possible with pipeline stages yet; leave out enable_lora, or serve with "
                          "pipeline_parallel_size 1")
    if options.enable_expert_parallel and options.data_parallel_size > 1 and (options.ranks > 1 or options.enable_lora):
        raise ConfigError("with data_parallel_size and enable_expert_parallel, attention is by data: tensor_parallel_size, "
                          "pipeline_parallel_size and context_parallel_size must be 1, and enable_lora must be left out")
    if options.ranks % options.nnodes or options.node_rank >= options.nnodes:
        raise ConfigError(f"nnodes is {options.nnodes} and node_rank {options.node_rank}; nnodes must divide the "
                          f"{options.ranks} ranks (tensor x pipeline x context), and node_rank be less than nnodes")
    if options.nnodes > 1 and options.data_parallel_size > 1:
        raise ConfigError("data_parallel_size is not possible with nnodes; run a server on each machine behind a balancer")
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
    for name, given in (("speculate layer_skip", options.speculate == "layer_skip"),
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
    dealt = options.enable_expert_parallel and max(tensors, datas) > 1
    meeting = f"tcp://{options.master_addr}:{options.master_port}" if options.nnodes > 1 else options.data_parallel_rendezvous
    return Place(tensors=tensors, contexts=options.context_parallel_size, stages=options.pipeline_parallel_size,
                 layers=stage_layers(options), experts=dealt,
                 spare=-(-balancing(options)[0] // max(tensors, datas)) if dealt else 0, datas=datas,
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
