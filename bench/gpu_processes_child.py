"""One process of bench/gpu_processes.py: a line of JSON with the median seconds of each decode workload.

usage: gpu_processes_child.py MODEL. It begins when a line arrives on standard input.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from fixed import workloads
from penstock.cli.bench.offline import seconds_for
from penstock.engine.llm import LLM

WANTED = ("decode_b1", "decode_b8", "decode_b32")


def main() -> None:
    model = Path(sys.argv[1])
    found = {}
    sys.stdin.readline()
    with LLM(str(model), load_format="dummy", skip_tokenizer_init=True, max_model_len=4096, max_num_seqs=64,
             gpu_memory_utilization=0.5) as llm:
        for name, asks in workloads(model.name):
            if name in WANTED:
                seconds = []
                for _ in range(4):
                    llm.reset_prefix_cache()
                    seconds.append(seconds_for(llm, [(ask.prompt, ask.output) for ask in asks]))
                found[name] = sorted(seconds[1:])[1]
            if name == WANTED[-1]:
                break
    print(json.dumps(found))


if __name__ == "__main__":
    main()
