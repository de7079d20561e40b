"""Hidden states and label logits that a step reports, and their copies to the host."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from penstock.core.plan import Hidden, Ints, StepPlan, Want
from penstock.layers.decoder import Decoder
from penstock.worker.rows import Rows, to_host
from penstock.worker.sampler import MAX_LOGITS_ROWS

Places = npt.NDArray[np.integer[Any]]

REPORTS = int(Want.HIDDEN | Want.LABELS)


class Reports:
    """Pooled results of a step's segments. The properties are valid once the device has computed them."""

    def __init__(self, model: Decoder, hidden: torch.Tensor, plan: StepPlan, rows: Rows) -> None:
        """`hidden`: those of all tokens of the step, [T, width]."""
        firsts = np.cumsum(plan.counts) - plan.counts
        hiddens, last, total, labels = (
            (plan.wants & int(want)) > 0 for want in (Want.HIDDEN, Want.LAST, Want.SUM, Want.LABELS))
        states = hiddens & ~labels
        segments, found = list[Ints](), list[torch.Tensor]()

        def report(of: Places, values: Callable[[Places], torch.Tensor]) -> None:
            if len(of):
                segments.append(of.astype(np.int32))
                found.append(to_host(values(of).float()))

        def at(places: Places) -> torch.Tensor:
            return hidden.index_select(0, torch.from_numpy(places.astype(np.int64)).to(hidden.device))

        def sums(of: Places) -> torch.Tensor:
            # One sum for each segment: its order does not depend on the other segments.
            return torch.stack([hidden[first:first + count].sum(0, dtype=torch.float32) for first, count in zip(
                firsts[of].tolist(), plan.counts[of].tolist(), strict=True)])

        if (each := states & ~last & ~total).any():
            of = np.repeat(np.arange(len(plan.rows)), plan.counts)
            places = np.flatnonzero(each[of])
            report(of[places], lambda _: at(places))
        report(np.flatnonzero(states & last), lambda of: at(firsts[of] + plan.counts[of] - 1))
        report(np.flatnonzero(states & total), sums)
        self._segments, self._parts = segments, found
        self._labels: list[tuple[int, list[torch.Tensor]]] = []
        """Logits of segments, in pieces."""
        for segment in np.flatnonzero(labels & hiddens).tolist():
            first, count = int(firsts[segment]), int(plan.counts[segment])
            pieces = hidden[first:first + count].split(MAX_LOGITS_ROWS)
            self._labels.append((segment, [to_host(model.whole(model.head(piece))) for piece in pieces]))
        asked = np.flatnonzero(labels & ~hiddens)
        for start in range(0, len(asked), MAX_LOGITS_ROWS):
            some = asked[start:start + MAX_LOGITS_ROWS]
            if model.spec.head.mean:
                x = sums(some) / torch.from_numpy(plan.counts[some]).to(hidden.device)[:, None]
                x = x.to(hidden.dtype)
            else:
                x = at(firsts[some] + (0 if model.spec.whole else plan.counts[some] - 1))
            for segment, line in zip(some.tolist(), model.whole(model.head(x)), strict=True):
                wanted = rows.labels[int(plan.rows[segment])]
                self._labels.append((segment, [to_host(line[wanted] if wanted else line)]))

    @property
    def hidden(self) -> Hidden | None:
        if not self._parts:
            return None
        return Hidden(np.concatenate(self._segments), np.concatenate([part.numpy() for part in self._parts]))

    @property
    def labels(self) -> list[tuple[int, npt.NDArray[np.float32]]]:
        return [(segment, np.concatenate([part.numpy() for part in parts])) for segment, parts in self._labels]
