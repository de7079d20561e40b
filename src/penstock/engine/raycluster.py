"""Machines by Ray: finds nodes of its cluster for the ranks of other machines, and keeps an actor on each that runs them.

The ranks and their connections are those of machines started by hand (`engine/remote.py`); Ray carries no
tensor and no plan. The process that has the engine is Ray's driver, so that actors end with it, whatever happens."""

import os
import secrets
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.core.errors import ConfigError
from penstock.engine import remote
from penstock.observe.log import LOG
from penstock.parallel.axis import Place

_NODE_SECONDS = 60.0
"""The longest wait for nodes: one that was lost may be on its way back."""


class _Machine:
    """One machine's ranks. The actor."""

    def run(self, options: bytes, places: bytes) -> int:
        """Returns when they have ended (`engine/remote.py::run`)."""
        return remote.run(options, msgspec.json.decode(places, type=list[Place]), again=False)


class RayCluster:
    """The cluster that this process is in, and the machines that it was asked for."""

    def __init__(self) -> None:
        """Joins it. ConfigError if there is no Ray or no cluster."""
        try:
            import ray
        except ImportError:
            raise ConfigError("distributed_executor_backend ray needs Ray: pip install 'penstock[ray]'; without it start "
                              "penstock serve on each machine, with nnodes and node_rank") from None
        # Before ranks are listened to. Each start has a secret of its own unless there is one.
        os.environ.setdefault("PENSTOCK_SECRET", secrets.token_hex(32))
        try:
            ray.init(address=os.environ.get("RAY_ADDRESS", "auto"), ignore_reinit_error=True, log_to_driver=False,
                     logging_level="warning")
        except ConnectionError as error:
            raise ConfigError(f"distributed_executor_backend ray: there is no Ray cluster here ({error}); run ray start --head "
                              "here and ray start --address on the other machines, or set RAY_ADDRESS") from None
        self._ray: Any = ray
        self._actors: list[Any] = []
        self.address: str = ray.util.get_node_ip_address()
        """Of this node."""

    def start(self, options: bytes, machines: Sequence[Sequence[Place]], gpus: bool) -> None:
        """Starts the other machines' ranks on nodes of their own, with the encoded options; `gpus`: if this node has GPUs, they
        need one each. Waits for nodes that start an actor (Ray tells late of one that died). ConfigError: too few."""
        from ray.exceptions import RayError
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        environment = {name: value for name, value in os.environ.items()
                       if name.startswith(("PENSTOCK_", "HF_")) or name in ("PYTHONPATH", "OMP_NUM_THREADS")}
        left, taken = list(machines), {self._ray.get_runtime_context().get_node_id()}
        while left:
            nodes = self._nodes(len(left), len(left[0]) if gpus else 0, taken)
            actors = [self._ray.remote(_Machine).options(
                num_cpus=0, num_gpus=len(left[0]) if node["Resources"].get("GPU") else 0, runtime_env={"env_vars": environment},
                scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)).remote() for node in nodes]
            begun, left = zip(left, nodes, actors, strict=True), []
            for places, node, actor in begun:
                taken.add(name := node["NodeID"])
                try:
                    self._ray.get(actor.__ray_ready__.remote(), timeout=_NODE_SECONDS)
                except RayError:
                    left.append(places)
                    continue
                actor.run.remote(options, msgspec.json.encode(list(places)))
                self._actors.append(actor)
                LOG.info("ranks from %d on run on Ray's node %s at %s", places[0].rank, name[:8], node["NodeManagerAddress"])

    def _nodes(self, count: int, gpus: int, taken: set[str]) -> list[dict[str, Any]]:
        """Living nodes that are not taken, each with so many GPUs if this one has any."""
        own, until = self._ray.get_runtime_context().get_node_id(), time.monotonic() + _NODE_SECONDS
        while True:
            living = [node for node in self._ray.nodes() if node["Alive"]]
            here = any(node["NodeID"] == own and node["Resources"].get("GPU") for node in living)
            found = [node for node in living if node["NodeID"] not in taken and node["Resources"].get("GPU", 0) >= gpus * here]
            if len(found) >= count:
                return found[:count]
            if time.monotonic() > until:
                needed = f" with {gpus} GPUs each" if gpus and here else ""
                raise ConfigError(f"nnodes is {count + 1}, but Ray's cluster has {len(found)} other nodes{needed}; add nodes "
                                  "by ray start --address, or lower nnodes")
            time.sleep(0.5)

    def end(self) -> None:
        for actor in self._actors:
            self._ray.kill(actor)
