"""A server whose device sleeps for as long as an H200 would need for each step (`predict.py::Card`): all else, from sockets to
block tables, is real. It shows on any machine what a server adds to its steps; tokens mean nothing.

usage: python bench/sleeping_device.py [--shape llama8b] [--cards 2] [--port 8000]
       penstock bench serve --url http://127.0.0.1:8000 --random-input-len 512 --random-output-len 128 --max-concurrency 256
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from msgspec import structs

from fixed import SHAPES, write
from host import NoEngine, Times
from penstock.cli.serve import STEP_TARGET_MS, run_server
from penstock.config.schema import EngineOptions, ServerOptions, Wanted
from penstock.core.plan import StepPlan, StepResult
from penstock.engine.executor import Direct, Pending
from penstock.worker.worker import Worker
from predict import KV_TOKENS, Card


class SleepingDevice:
    """Takes plans as an executor's worker does; a step begins when it is launched and the one before has ended."""

    def __init__(self, worker: Worker, card: Card) -> None:
        self._worker = worker
        self._card = card
        self._free = 0.0

    def launch(self, plan: StepPlan) -> Pending:
        launched, seconds = self._worker.launch(plan), self._card.step(plan)
        self._free = end = max(time.perf_counter(), self._free) + seconds

        def result() -> StepResult:
            time.sleep(max(0.0, end - time.perf_counter()))
            found = launched.result()
            found.seconds = seconds
            return found
        return SimpleNamespace(result=result)


class SleepingEngine(NoEngine):
    """The engine of a server in whose folder's name the shape's is."""

    def __init__(self, options: EngineOptions, progress: Any = None) -> None:
        shape = Path(options.model).name
        super().__init__(1024, 8192, 16_384, KV_TOKENS[shape], Times(), STEP_TARGET_MS / 1e3)
        self.executor = Direct(SleepingDevice(self.rank.worker, Card(shape, options.tensor_parallel_size)))
        self.info = structs.replace(self.info, model=options.model)

    def close(self) -> None:
        """There is nothing to end."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama8b", choices=list(SHAPES))
    parser.add_argument("--cards", type=int, default=1, help="ranks that divide each layer; none is started")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    with tempfile.TemporaryDirectory() as folder:
        model = write(SHAPES[options.shape], Path(folder) / options.shape)
        wanted = Wanted([options.shape], EngineOptions(
            model=str(model), skip_tokenizer_init=True, tensor_parallel_size=options.cards))
        run_server([wanted], ServerOptions(port=options.port), engine="sleeping_device:SleepingEngine")


if __name__ == "__main__":
    main()
