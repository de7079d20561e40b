"""The way of tokens between a pipeline's stages, on the device: chosen ones from the last stage to the rows of the first, and
drafts from the first to the others.

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

    def __init__(self, pipe: Pipe, rows: Rows) -> None:
        self._pipe, self._rows = pipe, rows
        self._places = Staging(rows.device, rows.bring)
        self._expected: deque[tuple[Ints, Ints]] = deque()
        """(rows, positions) of the tokens of each step that have not been taken in."""

    def send(self, tokens: Sequence[torch.Tensor]) -> None:
        """The last stage's: those of a step."""
        self._pipe.send_back(torch.cat(list(tokens)))

    def hand_on(self, drafting: Drafting, *, first: bool, last: bool) -> None:
        """Has every stage verify, or compute, the drafts that the first one has written."""
        places = drafting.places(drafting.count)
        if not first:
            found = torch.empty(len(places[0]), dtype=torch.int32, device=self._rows.device)
            self._pipe.receive(found)
            self._rows.tokens[places] = found
        if not last:
            self._pipe.send(self._rows.tokens[places])

    def expect(self, lines: LogitsRows) -> None:
        """The first stage's: the tokens of a step that was launched."""
        if len(lines.rows):
            self._expected.append((lines.rows, lines.positions))

    def take(self, plan: StepPlan) -> None:
        """Takes in what is on its way to rows of a plan, before the plan is applied."""
        # A drafter may keep the tokens of rows that leave.
        touched = {*plan.rows.tolist(), *plan.leave, *(enter.row for enter in plan.enter)}
        needed = max((i for i, (rows, _) in enumerate(self._expected, 1) if not touched.isdisjoint(rows.tolist())), default=0)
        for _ in range(needed):
            rows, positions = self._expected.popleft()
            found = torch.empty(len(rows), dtype=torch.int32, device=self._rows.device)
            self._pipe.receive_back(found)
            # Pinned: any other copy would make the host wait for the tokens, and the next step would be enqueued late.
            row, position = self._places.carry([rows, positions]).long().split(len(rows))
            self._rows.tokens[row, position] = found
