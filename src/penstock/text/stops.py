"""Stop strings in a stream: finds the first match, and holds back text that may be the beginning of one."""

from collections.abc import Iterable


class StopStrings:
    """Watches one sequence's text for the first of some strings.

    The first is the one that is complete first; of those complete at the same character, the longest. So the outcome is that
    of looking after every character, however the text is cut into pieces."""

    __slots__ = ("_held", "_include", "_matched", "_stops")

    def __init__(self, stops: Iterable[str], include: bool = False) -> None:
        """`include` leaves the matched string in the text. `stops` are not empty strings."""
        self._stops = list(dict.fromkeys(stops))
        self._include = include
        self._held = ""
        """Text held back because some stop string begins with it."""
        self._matched = False

    def push(self, delta: str, armed: bool = True) -> tuple[str, str | None]:
        """(text that is safe to show, the stop string that was met or None). After a match nothing more comes out.

        While not `armed`, complete stop strings pass; one that is completed once armed counts as a whole."""
        if self._matched or not delta:
            return "", None
        text = self._held + delta
        found, begin, end = None, 0, len(text) + 1
        for stop in self._stops if armed else ():
            # A match that ends where the best one does counts if it is longer, hence the bound.
            place = text.find(stop, 0, end)
            if place >= 0 and (place + len(stop) < end or place < begin):
                found, begin, end = stop, place, place + len(stop)
        if found is not None:
            self._matched = True
            self._held = ""
            return text[:end if self._include else begin], found
        safe = self._partial(text)
        self._held = text[safe:]
        return text[:safe], None

    def flush(self) -> str:
        """The text has ended: returns the text held back, which is no stop string."""
        text, self._held = self._held, ""
        return text

    def _partial(self, text: str) -> int:
        """The start of the longest suffix of `text` that is a prefix of a stop string; len(text) if there is none."""
        earliest = len(text)
        for stop in self._stops:
            start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while 0 <= start < earliest:
                if stop.startswith(text[start:]):
                    earliest = start
                else:
                    start = text.find(stop[0], start + 1)
        return earliest
