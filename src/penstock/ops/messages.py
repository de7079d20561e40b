"""Long messages between ranks: at once, or in runs of rows, one travelling while the next is computed. Registers `messages`."""

from penstock.ops import gpu
from penstock.ops.table import register

LEAST = 1024
"""The fewest rows of a run: enough tiles for all multiprocessors of a GPU."""
MOST = 4
"""The most runs."""
LONG = 1 << 25
"""The most bytes of a copy. Two runs hide a sum; more only divide longer copies, as the host must keep ahead of them."""


@register("messages", "reference", rank=0)
def at_once(_rows: int, _nbytes: int, _copied: bool) -> int:
    """The number of runs in which so many rows are computed and exchanged. `copied`: copy engines carry them."""
    return 1


@register("messages", "overlapped", rank=-1)
def overlapped(rows: int, _nbytes: int, _copied: bool) -> int:
    """By NCCL, whose kernels take multiprocessors, it was slower (decision 0261), so that it is taken only if asked for."""
    return max(1, min(MOST, rows // LEAST))


@register("messages", "copied", rank=1, supports=gpu.supports)
def copied(rows: int, nbytes: int, copied: bool) -> int:
    """Beside copies products keep all multiprocessors."""
    return max(2, -(-nbytes // LONG)) if copied and rows >= 2 * LEAST and nbytes <= MOST * LONG else 1
