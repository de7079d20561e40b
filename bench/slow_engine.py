"""A server whose steps take as long as a cost model says (`penstock simulate --model-cost`): canary computes, then the engine
waits for the rest of the time. A simulation of a trace can be held against this server on a machine that is busy.

usage: PENSTOCK_COST=cost.json python bench/slow_engine.py --port 8000 --max-num-seqs 8
       penstock bench serve --url http://127.0.0.1:8000 --trace trace.jsonl --use-trace-arrivals
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from penstock.cli.serve import run_server
from penstock.cli.simulation.fleet import read_cost
from penstock.config.schema import EngineOptions, ServerOptions, Wanted
from penstock.core.plan import Masks, StepPlan, StepResult
from penstock.engine.engine import Engine
from penstock.engine.executor import Pending


class SlowExecutor:
    """Holds results back, in the worker's thread, until the step would have ended."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._inner = engine, engine.executor
        self._times = read_cost(Path(os.environ["PENSTOCK_COST"])).times()
        self._free = 0.0

    def submit(self, plan: StepPlan) -> Pending:
        seconds = self._times.seconds(self._engine.scheduler.in_flight[-1].load)
        self._free = end = max(time.perf_counter(), self._free) + seconds
        held: Future[StepResult] = Future()

        def hold(done: Future[StepResult]) -> None:
            time.sleep(max(0.0, end - time.perf_counter()))
            if error := done.exception():
                held.set_exception(error)
            else:
                done.result().seconds = seconds
                held.set_result(done.result())
        self._inner.submit(plan).add_done_callback(hold)
        return held

    def mask(self, step: int, masks: Masks) -> None:
        self._inner.mask(step, masks)

    def close(self) -> None:
        self._inner.close()


class SlowEngine(Engine):
    """The real engine behind such an executor."""

    def __init__(self, options: EngineOptions, progress: Any = None) -> None:
        super().__init__(options, progress)
        self.executor = SlowExecutor(self)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--max-num-seqs", type=int, default=8)
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    engine = EngineOptions(max_num_seqs=options.max_num_seqs, max_model_len=2048, threads=1, step_target_ms=250.0)
    sys.exit(run_server([Wanted(["canary"], engine)], ServerOptions(port=options.port), "slow_engine:SlowEngine"))
