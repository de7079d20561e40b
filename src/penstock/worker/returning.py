"""The way of tokens between a pipeline's stages, on the device: chosen ones from the last stage to the rows of the first, and
drafts from the stage that has written them to the others.

The first stage takes in a step's tokens when a later one needs one of its rows: none waits for what it does not need."""

from collections import deque
from collections.abc import Sequence

import torch

from penstock.core.plan import Ints, StepPlan
from penstock.parallel.pipe import Pipe
from penstock.worker.drafting import Drafting
from penstock.worker.rows import Rows, Staging
from penstock.worker.sampler import LogitsRows


class Returning:
    """One end of the way."""

    def __init__(self, pipe: Pipe, rows: Rows, *, first: bool, last: bool, late: bool) -> None:
        """`late`: the last stage drafts, and not the first."""
        self._pipe, self._rows, self._first, self._last, self._late = pipe, rows, first, last, late
        self._places = Staging(rows.device, rows.bring)
        self._expected: deque[tuple[Ints, Ints]] = deque()
        """(rows, positions) of the tokens of each step that have not been taken in."""

    def send(self, tokens: Sequence[torch.Tensor]) -> None:
        """The last stage's: those of a step."""
        self._pipe.send_back(torch.cat(list(tokens)))

    def hand_on(self, drafting: Drafting, trees: Sequence[torch.Tensor] = ()) -> None:
        """Has every stage verify, or compute, the drafts that one has written, in these trees by rows."""
        places, row = drafting.places(drafting.count), drafting.row.long()
        self._rows.tokens[places] = self.share(self._rows.tokens[places])
        for tree in trees:
            tree[row] = self.share(tree[row])

    def share(self, x: torch.Tensor) -> torch.Tensor:
        """Returns on every stage what the stage that drafts has in x."""
        if self._late and self._last:
            self._pipe.send_back(x)
            # It comes around.
            x = torch.empty_like(x)
        if self._late and self._first:
            # In the order in which they were sent.
            self._take(len(self._expected))
            self._pipe.receive_back(x)
        if not self._first:
            self._pipe.receive(x)
        if not self._last:
            self._pipe.send(x)
        return x

    def expect(self, lines: LogitsRows) -> None:
        """The first stage's: the tokens of a step that was launched."""
        if len(lines.rows):
            self._expected.append((lines.rows, lines.positions))

    def take(self, plan: StepPlan) -> None:
        """Takes in what is on its way to rows of a plan, before the plan is applied."""
        # A drafter may keep the tokens of rows that leave.
        touched = {*plan.rows.tolist(), *plan.leave, *(enter.row for enter in plan.enter)}
        needed = max((i for i, (rows, _) in enumerate(self._expected, 1) if not touched.isdisjoint(rows.tolist())), default=0)
        self._take(needed)

    def _take(self, steps: int) -> None:
        for _ in range(steps):
            rows, positions = self._expected.popleft()
            found = torch.empty(len(rows), dtype=torch.int32, device=self._rows.device)
            self._pipe.receive_back(found)
            # Pinned: any other copy would make the host wait for the tokens, and the next step would be enqueued late.
            row, position = self._places.carry([rows, positions]).long().split(len(rows))
            self._rows.tokens[row, position] = found
