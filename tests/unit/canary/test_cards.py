"""The committed family's cards agree with its records: scores, logs, sizes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from training.canary import record
from training.canary.adapters import STYLES
from training.canary.cards import card, stored
from training.canary.members import MEMBERS
from training.canary.run import FAMILY, SECOND
from training.canary.ship import ASSETS, HERE, place
from training.canary.tokenizer import FOLDER

from penstock.canary import MODEL
from penstock.canary.suite import ALL, SKILLS, Score
from penstock.cli.eval import as_json


def log(name: str) -> list[dict[str, object]]:
    """The log of what a committed folder was trained by last; canary-mla's second is of its next layer alone."""
    # canary-sink's further training gained nothing, so its weights are the first round's.
    last = "second" if name in SECOND and name != "canary-mla" else "first"
    return [json.loads(line) for line in (HERE / "logs" / last / f"{name}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", FAMILY)
def test_cards_are_made_of_what_is_recorded(name: str) -> None:
    assert (place(name) / "README.md").read_text() == card(name, place(name))


@pytest.mark.parametrize("name", FAMILY)
def test_what_is_recorded_is_what_the_log_ends_with(name: str) -> None:
    facts, end = record.read(place(name)), log(name)[-1]
    assert facts["steps"] == end["step"]
    if name in MEMBERS:
        assert facts["scores"] == end["scores"]
    for each in (facts, facts.get("earlier", {}), facts.get("next", {})):
        assert each.get("minutes", 0) < 20


@pytest.mark.parametrize("name", [*MEMBERS, *STYLES])
def test_every_skill_was_measured_by_decoding(name: str) -> None:
    scores = record.read(place(name))["decoded"]["scores"]
    assert {each["skill"] for each in scores} == set(MEMBERS[name].skills if name in MEMBERS else SKILLS) <= set(ALL)
    for each in scores:
        assert each == as_json(Score(each["skill"], each["right"], each["asked"], each["left_out"]))


def test_sizes() -> None:
    size = {name: stored(place(name))[1] for name in FAMILY}
    assert size["canary"] <= 8_000_000
    assert size["canary-draft"] <= size["canary"] / 3
    assert max(size.values()) < 12_000_000


def test_one_command_trains_them_all() -> None:
    found = {path.name for path in ASSETS.glob("canary-*")}
    assert set(FAMILY) == {*MEMBERS, *STYLES, "canary-eagle"} == {MODEL.parent.name, *found}


@pytest.mark.parametrize("name", MEMBERS)
def test_a_member_is_a_whole_folder(name: str) -> None:
    folder: Path = place(name)
    assert all((folder / path.name).read_bytes() == path.read_bytes() for path in FOLDER.iterdir())
    assert "## Scores" in (text := (folder / "README.md").read_text()) and "license: apache-2.0" in text
