"""AutoRound: GPTQ's or AWQ's tensors, with settings of its own for single modules (`extra_config`)."""

import re
from collections.abc import Mapping
from typing import Any

from penstock.core.errors import ModelError
from penstock.quant.dialects.awq import AWQ
from penstock.quant.dialects.gptq import GPTQ
from penstock.quant.form import Form, Reader, named, setting

_ZEROS = {"gptq": "gptq", "auto_gptq": "gptq",
          **dict.fromkeys(("auto_round", "gptqmodel", "exllamav2", "triton", "tritonv2"), "gptq_v2")}
"""Version of GPTQ's zeros by packing: only those that AutoGPTQ reads store one less."""


class _AutoRound(Reader):
    methods = ("auto-round", "auto_round", "intel/auto-round")
    suffixes = ("qweight", "qzeros", "scales", "g_idx")

    def __init__(self, config: Mapping[str, Any]) -> None:
        # Before there was packing_format, the backend named the packing, perhaps with a kernel behind it.
        setting(config, "act_bits", (16, 32), 16)
        packing = str(config.get("packing_format") or config.get("backend") or "auto_round:auto_gptq")
        kind = packing.removeprefix("auto_round:").partition(":")[0]
        if kind not in (*_ZEROS, "awq", "auto_awq"):
            raise ModelError(f"quantization_config: packing_format is {packing!r}; possible are auto_round, and auto_round: "
                             f"with auto_awq, {', '.join(_ZEROS)}")
        self._config, self._reader = {**config, "checkpoint_format": _ZEROS.get(kind)}, AWQ if "awq" in kind else GPTQ
        self._extra: Mapping[str, Mapping[str, Any]] = config.get("extra_config") or {}
        blocks = config.get("block_name_to_quantize") or config.get("to_quant_block_names")
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
        return self._reader(settings).form(module, n, k)
