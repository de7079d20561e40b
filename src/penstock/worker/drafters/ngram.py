"""Drafts from the row's own tokens: the continuation of the latest place where its last tokens occurred before.

Prompt lookup decoding (Saxena 2023). It pays where answers repeat their prompt: editing, code, extraction. Rows are searched on
the device, so that it works on tokens that the host does not know yet."""

import torch
import torch.nn.functional as F

from penstock.core.plan import Ints
from penstock.worker.drafting import Drafter, Drafting, places_of

_CELLS = 1 << 20
"""Tokens that are searched at once for agreements of up to 16, which bounds the memory that it takes."""
SCRATCH = 64 * _CELLS
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
        most = max(1, _CELLS // (width + self.beside(drafting.row[:0])[0].shape[1]) // -(-self._longest // 16))
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
        # The row's last tokens beside those up to each place: the newest that differs ends the agreement.
        back = torch.arange(self._longest - 1, -1, -1, device=known.device)
        tail = own.gather(1, (last - back).clamp(min=0)).masked_fill(back > last, -2)
        differs = F.pad(known, (self._longest - 1, 0), value=-1).unfold(1, self._longest, 1) != tail[:, None]
        agreed = self._longest - (differs * (self._longest - back).to(torch.uint8)).amax(2).long()
        agreed = torch.where(torch.cat((column[:width] < last, seen), 1), agreed, 0)
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
