"""Settings of speculative decoding, from Penstock's own options or vLLM's `speculative_config`. Pure."""

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoints, entry_points
from typing import Any

import msgspec

from penstock.config.schema import METHODS, EngineOptions
from penstock.core.errors import ConfigError

_TOKENS = 5
"""Default of the most tokens drafted at once."""
_NAMES = {**{name: name for name in METHODS}, "[ngram]": "ngram", "ngram_gpu": "ngram",
          **{f"{family}_mtp": "mtp" for family in ("deepseek", "ernie", "glm4_moe", "mimo", "qwen3_5", "qwen3_next")}}
"""Methods, by their names in vLLM's configuration and in ours."""
_NUMBERS = {"num_speculative_tokens": "tokens", "prompt_lookup_max": "longest", "prompt_lookup_min": "shortest",
            "draft_layers": "layers", "synthetic_acceptance_rate": "synthetic", "relaxed_topk": "relaxed",
            "relaxed_delta": "delta", "speculative_eagle_topk": "branches", "speculative_num_steps": "tokens",
            "speculative_num_draft_tokens": "nodes", "ahead": "ahead", "draft_tensor_parallel_size": "ranks"}
"""Fields of `Speculation`, by their names in the configuration."""
_KEYS = ("method", "model", "draft_policy", "parallel_drafting", "rejection_sample_method", "device",
         "use_relaxed_acceptance_for_thinking", *_NUMBERS)
"""Keys of vLLM's configuration that are supported; those for relaxed acceptance have TensorRT-LLM's names."""
TREES = ("draft_model", "eagle", "eagle3", "medusa", "mtp")
"""Methods whose drafts may be trees."""
_SEARCHES = ("auto", "ngram", "suffix")
_USED = {"prompt_lookup_max": (*_SEARCHES, "lookahead"), "prompt_lookup_min": _SEARCHES,
         "parallel_drafting": ("auto", "draft_model", "eagle", "eagle3", "dflash", "dspark")}
"""Keys that some methods use, and these."""
_RULES = {"strict": "", "standard": "", "synthetic": "", "probabilistic": "token", "block": "block"}
"""Rules of verification, by their names in the configuration: `Speculation.rejection`."""
_HARMLESS: dict[str, tuple[Any, ...]] = {"disable_padded_drafter_batch": (True, False), "quantization": (None,),
                                         "use_heterogeneous_vocab": (True, False),
                                         "use_local_argmax_reduction": (True, False), "enable_adaptive_verification": (False,)}
"""Keys that are accepted with these values, which change nothing here."""


@dataclass(frozen=True)
class Speculation:
    method: str
    """One of METHODS, or the name of a user's own; auto: what there is (`worker/drafters/loading.py::survey`)."""
    model: str | None = None
    """Folder or hub id of the draft model or head."""
    tokens: int = _TOKENS
    """The most tokens drafted at once for a sequence."""
    longest: int = 16
    """n-gram: the most tokens that must agree; longer agreements do not count more."""
    shortest: int = 2
    """n-gram: the fewest tokens that must agree."""
    adaptive: bool = True
    """Whether fewer tokens are drafted, or none, where that is predicted to be faster."""
    layers: int = 0
    """layer_skip: the model's first layers that draft; 0: a quarter of them."""
    parallel: bool | None = None
    """Whether a draft model or head drafts all tokens in one pass, by mask tokens (PARD, P-EAGLE); None: as its config says."""
    branches: int = 1
    """Above 1: drafts are trees, in which so many drafts of each level are followed by so many candidates each."""
    nodes: int = 0
    """The drafts of a tree; 0: branches times tokens."""
    rejection: str = ""
    """token or block: drafts are kept by rejection sampling, one by one or by the probability of all; empty: where the target
    samples the same token. Another answer, of the same distribution."""
    ahead: int = 0
    """A draft model drafts ahead for so many outcomes of each verification, on a device of its own; 0: it does not."""
    device: str = ""
    """That device."""
    ranks: int = 0
    """Ranks that divide a draft model or head: 1, or all that divide the model; 0: of a head all, of a draft model 1."""
    synthetic: float | None = None
    """For measurements: drafts are kept with this probability, whatever they are. Answers mean nothing then."""
    relaxed: int = 0
    """Lossy: while a model thinks, a draft is kept if it is among so many of the target's best tokens; 0: off."""
    delta: float = 0.6
    """Lossy: and if its log probability is at most so much below the best token's."""

    @property
    def tree(self) -> tuple[int, int, int] | None:
        """(branches, levels, drafts) of trees; None: drafts are chains."""
        return None if self.branches == 1 else (self.branches, self.tokens, self.most)

    @property
    def most(self) -> int:
        """The most drafts that a step verifies for a sequence."""
        return self.tokens if self.branches == 1 else self.nodes or min(63, self.branches * self.tokens)


def own_drafters() -> EntryPoints:
    """Drafters of users, by the names that installed packages give them: functions of (`Speculation`, the target's `Decoder`)
    that return a `worker/drafting.py::LoadedDrafter`."""
    return entry_points(group="penstock.drafters")


def speculation(options: EngineOptions) -> Speculation | None:
    """The settings that the options give; None if nothing is drafted. ConfigError for impossible ones."""
    given, method, model = options.speculative_config, options.speculate, options.speculative_model
    if given and (method != "off" or model is not None):
        raise ConfigError("speculative_config says all about drafting; leave speculate and speculative_model out")
    if not given and method == "off" and model is None:
        return None
    found = _of_vllm(given, options) if given else _checked(Speculation(
        "auto" if method == "off" else method, model, options.num_speculative_tokens or _TOKENS,
        adaptive=options.draft_policy == "adaptive"))
    if found.tree is not None and (options.batch_invariant or options.context_parallel_size > 1):
        raise ConfigError("speculative_eagle_topk is not possible with batch_invariant or context_parallel_size, whose sums "
                          "have an order of keys that trees change; leave one of them out")
    if found.ranks not in (0, 1, options.tensor_parallel_size):
        raise ConfigError(f"speculative_config: draft_tensor_parallel_size is {found.ranks}; possible are 1 and "
                          f"tensor_parallel_size, which is {options.tensor_parallel_size}")
    return found


def _read(value: Any) -> Any:
    """A value of the configuration; the command line gives numbers and true or false as texts."""
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value
    return found if isinstance(found, bool | int | float) else value


def _of_vllm(given: Mapping[str, Any], options: EngineOptions) -> Speculation:
    given = {key: _read(value) for key, value in given.items()}
    for key, value in given.items():
        if key in _KEYS or (key in _HARMLESS and value in _HARMLESS[key]):
            continue
        near = difflib.get_close_matches(key, _KEYS, 1)
        raise ConfigError(f"speculative_config has {key}={value!r}, which is not supported"
                          + (f"; similar is {near[0]}" if near else f"; possible are {', '.join(_KEYS)}"))
    method = given.get("method") or ("auto" if given.get("model") else None)
    model = given.get("model")
    if model in ("ngram", "[ngram]"):
        method, model = "ngram", None
    if method not in _NAMES and method not in own_drafters().names:
        raise ConfigError(f"speculative_config: method is {method!r}; possible are "
                          f"{', '.join([*METHODS, *sorted(own_drafters().names)])}")
    for key, users in _USED.items():
        searched = model is not None and key != "parallel_drafting"
        if given.get(key) and method in _NAMES and (searched or _NAMES[method] not in users):
            raise ConfigError(f"speculative_config has {key}={given[key]!r}, which {method} "
                              f"{f'with model {model!r} ' * searched}does not use; it is for {', '.join(users)}. Leave it out")
    steps, tokens = given.get("speculative_num_steps"), given.get("num_speculative_tokens")
    if None not in (steps, tokens) and steps != tokens:
        raise ConfigError(f"speculative_config: speculative_num_steps is {steps} and num_speculative_tokens {tokens}; they are "
                          "the same, so give one")
    if isinstance(given.get("ahead"), bool):
        given["ahead"] = (16 if str(given.get("device")).startswith("cuda") else 4) * given["ahead"]
    numbers = {ours: given[theirs] for theirs, ours in _NUMBERS.items() if given.get(theirs) is not None}
    rule, thinking = given.get("rejection_sample_method") or "strict", given.get("use_relaxed_acceptance_for_thinking")
    if rule not in _RULES or (rule == "synthetic") != ("synthetic" in numbers):
        raise ConfigError(f"speculative_config: rejection_sample_method is {rule!r}; possible are strict, probabilistic, "
                          "block, and synthetic with synthetic_acceptance_rate")
    if thinking:
        if numbers.setdefault("relaxed", 10) == 0:
            raise ConfigError("speculative_config: relaxed_topk is 0; possible are 1 to 128")
    elif {"relaxed", "delta"} & set(numbers):
        raise ConfigError("speculative_config: relaxed_topk and relaxed_delta need use_relaxed_acceptance_for_thinking: true, "
                          "because relaxed acceptance changes answers")
    if "longest" in numbers:
        numbers.setdefault("shortest", min(numbers["longest"], Speculation.shortest))
    elif "shortest" in numbers:
        numbers["longest"] = max(numbers["shortest"], Speculation.longest)
    policy = given.get("draft_policy", options.draft_policy)
    if policy not in ("adaptive", "fixed"):
        raise ConfigError(f"speculative_config: draft_policy is {policy!r}; possible are adaptive and fixed")
    try:
        found = msgspec.convert({"method": _NAMES.get(method, method), "model": model, "adaptive": policy == "adaptive",
                                 "parallel": given.get("parallel_drafting"), "rejection": _RULES[rule],
                                 "device": str(given.get("device") or ""), **numbers}, Speculation)
    except msgspec.ValidationError as error:
        raise ConfigError(f"speculative_config: {error}") from None
    # As SGLang counts them, with the token before the drafts.
    return _checked(replace(found, nodes=max(0, found.nodes - 1)))


def _check_tree(found: Speculation) -> None:
    """ConfigError for a tree that cannot be."""
    least = found.branches * (found.tokens - 1)
    most = sum(found.branches ** min(level, 2) for level in range(1, found.tokens + 1))
    if not 1 < found.branches <= 16 or found.tokens < 2:
        raise ConfigError(f"speculative_eagle_topk is {found.branches} and speculative_num_steps {found.tokens}; possible are "
                          "1 to 16, and for trees at least 2 steps")
    if not least <= found.most <= min(63, most):
        raise ConfigError(f"speculative_num_draft_tokens is {found.most + 1}; a tree of {found.tokens} steps with "
                          f"{found.branches} branches can have {least + 1} to {min(63, most) + 1}, with the verified token")
    if found.rejection or found.relaxed or found.synthetic is not None:
        raise ConfigError("speculative_eagle_topk needs rejection_sample_method strict and no relaxed acceptance: the target's "
                          "own choice is looked up in the tree")


def _checked(found: Speculation) -> Speculation:
    """Refuses what contradicts itself."""
    method = found.method
    if method in ("draft_model", "eagle", "eagle3", "medusa", "dflash", "dspark") and found.model is None:
        raise ConfigError(f"speculate {method} needs the draft model: --speculative-model FOLDER or a hub id")
    if method in ("ngram", "suffix", "lookahead", "layer_skip", "mtp") and found.model is not None:
        raise ConfigError(f"speculate {method} takes no draft model, but speculative_model is {found.model!r}; leave one out")
    if not 1 <= found.tokens <= 64:
        raise ConfigError(f"num_speculative_tokens is {found.tokens}; possible are 1 to 64")
    if not 1 <= found.shortest <= found.longest <= 32:
        raise ConfigError(f"prompt_lookup_min is {found.shortest} and prompt_lookup_max {found.longest}; they must be 1 to 32, "
                          "and the first at most the second")
    if found.synthetic is not None and not 0 <= found.synthetic <= 1:
        raise ConfigError(f"synthetic_acceptance_rate is {found.synthetic}; possible are 0 to 1")
    if not 0 <= found.relaxed <= 128 or found.delta < 0:
        raise ConfigError(f"relaxed_topk is {found.relaxed} and relaxed_delta {found.delta}; possible are 1 to 128, and "
                          "0 or more")
    if found.branches != 1:
        _check_tree(found)
    elif found.nodes:
        raise ConfigError("speculative_num_draft_tokens is for trees: set speculative_eagle_topk, or num_speculative_tokens "
                          "alone")
    if bool(found.ahead) != bool(found.device) or not 0 <= found.ahead <= 64:
        raise ConfigError(f"speculative_config: ahead is {found.ahead} and device {found.device!r}; they belong together: a "
                          "draft model drafts ahead for 1 to 64 outcomes on a device of its own, cpu or cuda:N")
    if found.ranks > 1 and (found.ahead or method in ("ngram", "suffix", "lookahead", "layer_skip")):
        raise ConfigError(f"speculative_config: draft_tensor_parallel_size is {found.ranks}, but it has to be 1 for "
                          f"{'ahead' if found.ahead else method}, which has no weights on the ranks' devices")
    if found.relaxed and found.rejection:
        raise ConfigError("use_relaxed_acceptance_for_thinking needs rejection_sample_method strict; leave one of them out")
    if found.layers < 0 or (found.layers and method != "layer_skip"):
        raise ConfigError(f"draft_layers is {found.layers} with speculate {method}; it is the number of layers that draft by "
                          "layer_skip, at least 1")
    return found
