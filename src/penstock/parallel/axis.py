"""Which ranks there are and where each stands. Knows no tensors, so that engine and options can read it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """One rank's place: rank `tensor` of `tensors` that divide every layer among them."""

    tensor: int = 0
    tensors: int = 1
    rendezvous: str = ""
    """The folder (private to the user) through which the ranks of one machine find each other."""

    @property
    def alone(self) -> bool:
        return self.tensors == 1


ALONE = Place()
"""The only rank."""
