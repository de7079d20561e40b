"""Penstock: a large language model inference engine. `from penstock import LLM, SamplingParams`."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncLLM", "BeamSearchParams", "LoRARequest", "SamplingParams", "Span", "__version__"]

if TYPE_CHECKING:
    from penstock.core.request import Span
    from penstock.core.sampling import BeamSearchParams, SamplingParams
    from penstock.engine.adapters import LoRARequest
    from penstock.engine.async_llm import AsyncLLM
    from penstock.engine.llm import LLM

_HOMES = {"LLM": "penstock.engine.llm", "AsyncLLM": "penstock.engine.async_llm", "SamplingParams": "penstock.core.sampling",
          "BeamSearchParams": "penstock.core.sampling", "Span": "penstock.core.request",
          "LoRARequest": "penstock.engine.adapters"}


def __getattr__(name: str) -> Any:
    """Imports late: `import penstock` must not pay for torch."""
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'penstock' has no attribute {name!r}")
