"""Drafts from the row's own tokens: the continuation of the latest place where its last tokens occurred before.

Prompt lookup decoding (Saxena 2023). It pays where answers repeat their prompt: editing, code, extraction. Rows are searched on
the device, so that it works on tokens that the host does not know yet."""

import torch

from penstock.core.plan import Ints
from penstock.worker.drafting import Drafter, Drafting, places_of

_CELLS = 1 << 20
"""Tokens that are searched at once, which bounds the memory that it takes."""
SCRATCH = 48 * _CELLS
"""Bytes of it."""


class NGram(Drafter):
    """Finds the longest agreement of a row's last tokens with an earlier place: of at least `shortest` tokens; those beyond
    `longest` do not count. Of equal ones it takes the latest."""

    voters = 1
    """The best places that choose the continuation."""
    stays = False
    """Whether drafts stay as they are where nothing is found; else they are token 0."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest = shortest
        self._longest = longest

    def propose(self, drafting: Drafting) -> None:
        if not len(drafting.segments):
            return
        width = int(drafting.plan.starts[drafting.segments].max()) + 1
        most = max(1, _CELLS // (width + self.beside(drafting.row[:0])[0].shape[1]))
        for at in range(0, len(drafting.count), most):
            part = slice(at, at + most)
            self._propose(drafting.rows.tokens, drafting.row[part].long(), drafting.length[part].long(), drafting.count[part],
                          width)

    def beside(self, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens [D, S] that are searched behind those of rows [D] themselves, and which of them each may see."""
        none = row.new_zeros(len(row), 0)
        return none, none.bool()

    def _propose(self, tokens: torch.Tensor, row: torch.Tensor, length: torch.Tensor, count: Ints, width: int) -> None:
        """Searches rows of at most `width` known tokens."""
        own, (others, seen) = tokens[row, :width], self.beside(row)
        last = length[:, None] - 1
        known = torch.cat((own, others.to(own.dtype)), 1)
        total = known.shape[1]
        column = torch.arange(total, device=known.device)
        alive = torch.cat((column[:width] < last, seen), 1)
        agreed = torch.zeros(known.shape, dtype=torch.int64, device=known.device)
        for back in range(self._longest):
            token = own.gather(1, (last - back).clamp(min=0))
            equal = torch.zeros_like(alive)
            equal[:, back:] = known[:, :total - back] == token
            alive = alive & equal
            agreed += alive
        best, _ = torch.where(agreed >= self._shortest, agreed * total + column, -1).topk(min(self.voters, total), 1)
        end = best % total
        # A continuation that reaches the row's end goes on from its beginning, as if the text were periodic.
        period = torch.where(end < width, last - end, total).clamp(min=1)
        source = end[..., None] + 1 + torch.arange(int(count.max()), device=known.device) % period[..., None]
        found = known.gather(1, source.flatten(1).clamp(max=total - 1)).view(source.shape)
        drafts = self._chosen(found, best // total)
        segment, offset = places_of(count, known.device)
        there, drafts = (row[segment], length[segment] + offset), drafts[segment, offset]
        # A continuation found beside a row may end with a number that is no token.
        tokens[there] = torch.where((best[segment, 0] >= 0) & (drafts >= 0), drafts, tokens[there] if self.stays else 0)

    def _chosen(self, found: torch.Tensor, agreed: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        """The continuation [D, C] of continuations [D, voters, C] of places that agree in so many tokens [D, voters], the best
        first; -1 in `agreed`: there is no such place."""
        return found[:, 0]
