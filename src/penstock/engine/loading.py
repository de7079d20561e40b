"""Loading of a frontend's files from a model's folder, for `LLM` and `AsyncLLM`: tokenizer, template, defaults, end tokens."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from penstock.checkpoint import Pooler, eos_ids, read_config, read_generation_config, read_pooler, resolve_folder
from penstock.config.schema import EngineOptions, generation_defaults
from penstock.core.request import EngineInfo
from penstock.core.sampling import MOST_LOGPROBS
from penstock.dialects.choice import choose
from penstock.engine.inputs import Inputs
from penstock.text import ChatTemplate, Tokenizer


class ModelFiles(msgspec.Struct, array_like=True, tag="found"):
    """Folders of a model's files, and the contents of the small ones. Sent to the frontend before the weights are read, so
    that a bad tokenizer or template is found before a long wait."""

    folder: str
    tokenizer_folder: str
    generation_config: dict[str, Any]
    """Empty if the options do not want its defaults."""
    eos_ids: list[int]
    pooler: Pooler = Pooler()
    reranker: str = "none"
    """The reranker family whose prompts score pairs of texts."""


def find(options: EngineOptions) -> ModelFiles:
    """Resolves folders, from the hub if need be, and reads the small files. ConfigError or ModelError: why not."""
    folder = resolve_folder(options.model, options.revision)
    defaults = read_generation_config(folder)
    defaults = {**(defaults if options.generation_config == "auto" else {}),
                **generation_defaults(options.override_generation_config)}
    pooler, reranker = read_pooler(folder), options.reranker
    if options.pooling != "auto":
        pooler = Pooler(options.pooling, pooler.normalize, most=pooler.most)
    if reranker == "auto":
        reranker = "qwen3" if "qwen3-reranker" in options.model.lower() else "none"
    return ModelFiles(str(folder), str(tokenizer_folder(options, folder)), defaults, eos_ids(folder, read_config(folder)),
                      pooler, reranker)


def shown(bar: Any) -> Callable[[int, int], None]:
    """Shows progress, told as (bytes done, bytes in all), by tqdm's bar."""

    def progress(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)

    return progress


def tokenizer_folder(options: EngineOptions, model: Path) -> Path:
    """The folder of the tokenizer; `model` is the model's."""
    return resolve_folder(options.tokenizer) if options.tokenizer else model


def load_text(found: ModelFiles, options: EngineOptions) -> tuple[Tokenizer | None, ChatTemplate | None]:
    """The tokenizer and the chat template; None where the options want none. ModelError or ConfigError: why not."""
    if options.skip_tokenizer_init:
        return None, None
    tokenizer = Tokenizer.load(Path(found.tokenizer_folder))
    return tokenizer, ChatTemplate.load(found.tokenizer_folder, options.chat_template, tokenizer.special_tokens)


def inputs_of(found: ModelFiles, tokenizer: Tokenizer | None, template: ChatTemplate | None, info: EngineInfo,
              options: EngineOptions) -> Inputs:
    """Makes requests for an engine of these files."""
    most = MOST_LOGPROBS if options.max_logprobs == -1 else min(options.max_logprobs, MOST_LOGPROBS)
    dialect = choose(template.sources if template is not None else (), options.tool_call_parser, options.reasoning_parser)
    # As sentence-transformers does.
    pooler = Pooler("mean") if info.encoder and not found.pooler.stated else found.pooler
    return Inputs(tokenizer, template, info, found.generation_config, found.eos_ids, options.seed, most, dialect,
                  options.constrain_tools == "auto", pooler, found.reranker)
