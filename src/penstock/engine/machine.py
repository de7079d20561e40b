"""A machine that has some ranks of an engine on another one: starts their processes, and ends with the first of them."""

import time
from collections.abc import Sequence

from penstock.engine.remote import address_of, finish, started
from penstock.observe.log import LOG
from penstock.parallel.axis import Place

_LOOK_SECONDS = 0.1
_AGAIN_SECONDS = 2.0
"""Time for machine 0 to let go of ranks that are lost, before others are started in their place."""


def run(options: bytes, places: Sequence[Place], again: bool) -> int:
    """Runs ranks with the encoded options until the engine ends them (status 0) or one is lost (1), or all start `again`."""
    while True:
        LOG.info("ranks %d to %d join the engine at %s", places[0].rank, places[-1].rank, places[0].rendezvous)
        processes = [started(options, place, address_of(place)) for place in places]
        try:
            while all(process.poll() is None for process in processes):
                time.sleep(_LOOK_SECONDS)
            ended = {process.poll() for process in processes} <= {0, None}
        finally:
            for process in processes:
                finish(process, _AGAIN_SECONDS)
        if ended or not again:
            return 0 if ended else 1
        LOG.error("a rank was lost; the ranks of this machine start again")
