"""Assigns adapters to the device's slots and evicts the least recently used. Pure bookkeeping, without loading."""

from collections import Counter


class Slots:
    """`count` slots, numbered from 1; 0 stands for no adapter."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count, 0, -1))
        self._slot: dict[str, int] = {}
        """By adapter, least recently used first."""
        self._held: Counter[str] = Counter()

    def has_room(self, adapter: str) -> bool:
        """Whether `take` would find a slot."""
        return not adapter or adapter in self._slot or bool(self._free) or len(+self._held) < len(self._slot)

    def take(self, adapter: str) -> tuple[int, bool]:
        """The slot of an adapter for one more sequence, and whether it has to be filled first. There must be room."""
        if not adapter:
            return 0, False
        filled = adapter in self._slot
        if not filled and not self._free:
            self.forget(next(name for name in self._slot if not self._held[name]))
        self._slot[adapter] = slot = self._slot.pop(adapter, 0) or self._free.pop()
        self._held[adapter] += 1
        return slot, not filled

    def give(self, adapter: str) -> None:
        """One sequence less uses the adapter, which stays in its slot."""
        if adapter:
            self._held[adapter] -= 1

    def forget(self, adapter: str) -> None:
        """Frees the slot of an adapter that no sequence uses."""
        assert not self._held[adapter], adapter
        slot = self._slot.pop(adapter, 0)
        if slot:
            self._free.append(slot)
