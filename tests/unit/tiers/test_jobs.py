"""Loads in parts: they land once, when nobody writes to the device any more, whatever the parts come to and in which order."""

from __future__ import annotations

import random
import threading

from penstock.core.plan import Load, PageName
from penstock.worker.jobs import Job, Reports

NAME = PageName(0, b"")


def job(parts: int, reports: Reports, kind: type[Job] = Job) -> Job:
    return kind(Load(7, [], 60.0), [0] * parts, reports)


def test_a_part_that_writes_holds_the_landing_up() -> None:
    reports = Reports()
    one = job(3, reports)
    assert one.wanted()
    one.lose(NAME)
    one.end(0, False, failed=True)
    assert not one.wanted() and not reports.take()[0], "one part still writes"
    one.end(0, False)
    one.end(0, True)
    [result] = reports.take()[0]
    assert (result.ticket, result.ok, result.lost, result.missed) == (7, False, (NAME,), (0,))
    one.give_up()
    assert not reports.take()[0], "it lands once"


class Sudden(Job):
    """Given up by another thread between two looks of this one."""

    looks = 0

    @property
    def given_up(self) -> bool:
        self.looks += 1
        return self.looks > 1

    @given_up.setter
    def given_up(self, value: bool) -> None:
        self.looks = 2 * value


def test_what_is_given_up_in_between_lands_nevertheless() -> None:
    reports = Reports()
    one = job(1, reports, Sudden)
    one.end(0, one.wanted())
    assert [result.ticket for result in reports.take()[0]] == [7]


def test_threads_at_random() -> None:
    rng = random.Random(5)
    for _ in range(100):
        reports, parts = Reports(), rng.randrange(1, 6)
        one, fates = job(parts, reports), [rng.choice(["good", "good", "good", "lost", "failed"]) for _ in range(parts)]

        def part(fate: str, one: Job = one) -> None:
            if fate == "lost":
                one.lose(NAME)
            one.end(0, fate == "good" and one.wanted(), fate == "failed")

        threads = [threading.Thread(target=part, args=(fate,)) for fate in fates]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        [result] = reports.take()[0]
        assert result.ok == ("failed" not in fates) and (not result.ok or len(result.lost) == fates.count("lost"))


def test_who_was_late_is_told() -> None:
    """Of a load from several places: those that had not given all when patience ran out."""
    reports = Reports()
    one = Job(Load(7, [], 60.0), [-1, 0, 0, 1], reports)
    for place in (-1, 0, 1):
        one.end(place, one.wanted())
    one.give_up(late=True)
    [result] = reports.take()[0]
    assert not result.ok and result.missed == (0,)
    other = Job(Load(8, [], 60.0), [-1, 0], reports)
    other.give_up()
    assert reports.take()[0][0].missed == ()
