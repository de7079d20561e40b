"""Long messages between ranks: at once, or in runs of rows, one travelling while the next is computed. Registers `messages`."""

from penstock.ops.table import register

LEAST = 1024
"""The fewest rows of a run: enough tiles for all multiprocessors of a GPU."""
MOST = 4
"""The most runs."""


@register("messages", "reference", rank=0)
def at_once(_rows: int) -> int:
    """The number of runs in which so many rows are computed and exchanged."""
    return 1


@register("messages", "overlapped", rank=-1)
def overlapped(rows: int) -> int:
    """On two H200s it was slower (decision 0261), so that it is taken only if asked for."""
    return max(1, min(MOST, rows // LEAST))
