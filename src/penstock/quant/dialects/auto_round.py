"""AutoRound: GPTQ's or AWQ's tensors, with settings of its own for single modules (`extra_config`)."""

import re
from collections.abc import Mapping
from typing import Any

from penstock.core.errors import ModelError
from penstock.quant.dialects import awq, gptq
from penstock.quant.form import Form, Reader, named

METHODS = ("auto-round", "auto_round", "intel/auto-round")


class _AutoRound(Reader):
    suffixes = ("qweight", "qzeros", "scales", "g_idx")

    def __init__(self, config: Mapping[str, Any]) -> None:
        # Before there was packing_format, the backend said AWQ where it was not GPTQ's packing.
        older = "awq" if "awq" in str(config.get("backend")) else "auto_round:auto_gptq"
        packing = str(config.get("packing_format") or older)
        if not ("gptq" in packing or "awq" in packing):
            raise ModelError(f"quantization_config: packing_format is {packing!r}; possible are auto_round:auto_gptq and "
                             "auto_round:auto_awq")
        self._config, self._module = config, awq if "awq" in packing else gptq
        self._extra: Mapping[str, Mapping[str, Any]] = config.get("extra_config") or {}
        blocks = config.get("block_name_to_quantize")
        self._blocks = [blocks] if isinstance(blocks, str) else list(blocks or [])
        self._blocks = [name.strip() for one in self._blocks for name in str(one).split(",")]

    def form(self, module: str, n: int, k: int) -> Form | None:
        own = next((values for name, values in self._extra.items() if module == name or re.fullmatch(name, module)), None)
        if own is None and self._blocks and not named(module, self._blocks):
            return None
        config = {**self._config, **(own or {})}
        if int(config.get("bits") or 4) >= 16:
            return None
        settings = {**config, "lm_head": own is not None, "zero_point": not config.get("sym", True), "desc_act": False}
        read: Reader = self._module.reader(settings)
        return read.form(module, n, k)


reader = _AutoRound
