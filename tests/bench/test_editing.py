"""bench/editing.py on canary, and the rows that bench/speculation.py prints."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

import editing
import speculation
from fixed import SHAPES
from penstock import LLM, canary

TEXT = " ".join(f"Dorothea saw {place} lamps by the river, and Celia counted them again. Nobody spoke; the evening was warm."
                for place in range(30))


def test_edits_change_what_they_say() -> None:
    words = ["Anna", "met", "Anna", "near", "Rome.", "Then"] + ["word"] * 40
    assert editing.renamed(words)[1][:4] == ["Rosalind", "met", "Rosalind", "near"]
    before, after = editing.corrected(words)
    assert after == words and before[20] == "owrd" and sum(map(str.__ne__, before, after)) == 1
    before, after = editing.shortened(["One.", "Two.", "Three.", "Four.", "Five.", "Six."])
    assert after == ["One.", "Two.", "Three.", "Four.", "Six."]


def test_cases_take_turns_and_no_passage_comes_twice() -> None:
    tokenizer = Tokenizer.from_file(str(canary.MODEL / "tokenizer.json"))
    found = list(editing.cases(" ".join(map(str, range(2000))), tokenizer, 2))
    assert [name for name, _, _ in found] == ["rename", "correct", "shorten"] * 2
    texts = [tokenizer.decode(answer) for _, _, answer in found]
    assert len(set(texts)) == len(texts) and texts[1].split()[:2] == ["300", "301"]


def test_answers_are_the_edited_text_with_drafts_and_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    monkeypatch.setattr(editing, "WORDS", 40)
    options = f"--device cpu --threads 1 --passages 2 --drafts 4 --policies fixed --text {tmp_path}/text.txt"
    monkeypatch.setattr(sys, "argv", ["editing.py", *options.split(), "--output", str(tmp_path / "found.json")])
    editing.main()
    record = json.loads((tmp_path / "found.json").read_text())
    [line] = record["lines"]
    assert set(line["by_edit"]) == set(editing.EDITS) and record["environment"]["git_commit"] is not None
    # Copied text is drafted and kept; without drafts a step gives one token.
    assert line["kept"] > 0.5 and line["tokens_a_step"] > 2 and line["speedup"] > 0


def test_another_answer_than_the_imposed_one_is_refused() -> None:
    with editing.imposed() as impose, LLM(str(canary.MODEL), threads=1, max_model_len=64, max_num_seqs=1) as llm:
        impose([5, 6, 7, 8, 9])
        assert editing.seconds(llm, [5, 6], [7, 8, 9]) > 0
        with pytest.raises(ValueError, match="not the imposed one"):
            editing.seconds(llm, [5, 6], [7, 8, 10])


def test_bytes_of_a_pass_are_those_of_its_matrices() -> None:
    shape = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    # q 8 x 8, k and v 4 x 8, o 8 x 8, three of 16 x 8; with joined states q, k and v are twice as wide. The vocabulary: 10 x 8.
    assert speculation.read_bytes(shape, 3, 10) == 2 * (3 * (64 + 64 + 64 + 384) + 80)
    assert speculation.read_bytes(shape, 1, 10, 2) == 2 * (128 + 128 + 64 + 384 + 80)


def test_drafts_are_timed_and_stand_beside_their_floor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "tiny", SHAPES["llama8b"] | {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 8, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 16, "vocab_size": 1000})
    monkeypatch.setattr(speculation, "copy_rate", lambda _: 1e9)
    options = "--target tiny --batches 1,2 --acceptance 0.8 --policies fixed --output-len 12 --turns 1 --device cpu"
    monkeypatch.setattr(sys, "argv", ["speculation.py", *options.split(), "--output", str(tmp_path / "found.json")])
    speculation.main()
    record = json.loads((tmp_path / "found.json").read_text())
    floor = 1e6 * speculation.read_bytes(SHAPES["tiny"], 1, 1000, 2) / 1e9
    for line in record["lines"]:
        assert line["draft_floor_us"] == pytest.approx(floor, abs=0.1) and line["draft_us"] > 0
        assert 1 < line["bound_read"] < line["bound"] == pytest.approx(3.36, abs=0.01)
    assert {line["batch"] for line in record["lines"]} == {1, 2} and record["copy_rate"] == 1e9
