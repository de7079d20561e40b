"""From updates to deltas and outputs: text that stop strings and stop tokens end, and vLLM's shapes."""

from __future__ import annotations

import random

import pytest

from penstock.core.request import Request, Timings, TokenLogprobs, Update
from penstock.core.sampling import SamplingParams
from penstock.engine.outputs import Delta, Outputs, RequestOutput
from tests.unit.text import real

TOKENIZER = "models/stories260k"
STORY = "Lily went to the park. She saw a big red ball — and a café. She was happy."


def story_ids() -> list[int]:
    return real.load(TOKENIZER).encode(STORY, add_special_tokens=False)


def start(name: str = "r", **params: object) -> tuple[Outputs, RequestOutput]:
    request = Request(name, [1], SamplingParams(**params), arrival=5.0)  # type: ignore[arg-type]
    outputs = Outputs(real.load(TOKENIZER))
    outputs.register(request)
    return outputs, RequestOutput.empty(request, "", real.load(TOKENIZER))


def feed(outputs: Outputs, output: RequestOutput, updates: list[Update]) -> list[Delta]:
    deltas = []
    for update in updates:
        for delta in outputs.push([update]):
            output.add(delta)
            deltas.append(delta)
    return deltas


def by_ones(ids: list[int], finish: str | None = "length", index: int = 0) -> list[Update]:
    updates = [Update("r", index, [token]) for token in ids]
    updates[-1].finish_reason = finish
    return updates


def test_text_is_the_decoding_of_all_tokens() -> None:
    outputs, output = start()
    feed(outputs, output, by_ones(story_ids()))
    assert output.finished and len(outputs) == 0
    assert output.outputs[0].text == STORY
    assert output.outputs[0].token_ids == story_ids()
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("length", None)


def test_an_unfinished_character_comes_with_the_end() -> None:
    outputs, output = start()
    feed(outputs, output, by_ones([403, 3 + 0xE2]))
    assert output.outputs[0].text == "Once\ufffd"


def test_the_output_continues_the_prompt() -> None:
    request = Request("r", [1, 403], SamplingParams())
    outputs = Outputs(real.load(TOKENIZER))
    outputs.register(request)
    assert outputs.push([Update("r", 0, [407])])[0].text == " upon"


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("size", [1, 3, 100])
def test_a_stop_string_ends_text_tokens_and_request(include: bool, size: int) -> None:
    outputs, output = start(stop=["She saw", "never"], include_stop_str_in_output=include)
    ids = story_ids()
    updates = [Update("r", 0, ids[i:i + size], logprobs=[TokenLogprobs([token], [-0.5], [1]) for token in ids[i:i + size]])
               for i in range(0, len(ids), size)]
    feed(outputs, output, updates)
    one = output.outputs[0]
    assert one.text == STORY[:STORY.index("She saw") + (len("She saw") if include else 0)]
    assert (one.finish_reason, one.stop_reason) == ("stop", "She saw")
    text = real.load(TOKENIZER).decode(one.token_ids)
    assert "She saw" in text and "She saw" not in real.load(TOKENIZER).decode(one.token_ids[:-1])
    assert outputs.take_aborts() == ["r"]
    assert outputs.take_aborts() == []
    assert outputs.push([Update("r", 0, [], "abort")]) == [], "the engine's answer to the abort is no news"
    assert output.metrics.finished_time > 5.0


def test_a_stop_string_that_comes_last_needs_no_abort() -> None:
    outputs, output = start(stop=["happy."])
    feed(outputs, output, by_ones(story_ids()))
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", "happy.")
    assert outputs.take_aborts() == []


def test_half_a_stop_string_is_shown_in_the_end() -> None:
    outputs, output = start(stop=["happy. The end"])
    feed(outputs, output, by_ones(story_ids()))
    assert output.outputs[0].text == STORY
    assert output.outputs[0].finish_reason == "length"


def test_stop_strings_wait_for_min_tokens() -> None:
    ids = story_ids()
    first = real.load(TOKENIZER).encode("Lily went to the park. She", add_special_tokens=False)
    outputs, output = start(stop=["She"], min_tokens=len(first) + 3)
    feed(outputs, output, by_ones(ids))
    assert output.outputs[0].text == STORY[:STORY.rindex("She")]


def test_one_of_several_sequences_stops() -> None:
    outputs, output = start(n=2, stop=["park"])
    ids = story_ids()
    for position, token in enumerate(ids):
        feed(outputs, output, [Update("r", 0, [token]), Update("r", 1, [ids[-1 - position]])])
    assert output.outputs[0].text == "Lily went to the "
    assert outputs.take_aborts() == ["r/0"]
    assert not output.finished
    feed(outputs, output, [Update("r", 1, [], "length")])
    assert output.finished and len(outputs) == 0


@pytest.mark.parametrize(("include", "text"), [(False, "Once"), (True, "Once upon")])
def test_the_text_of_a_stop_token_is_not_shown(include: bool, text: str) -> None:
    outputs, output = start(stop_token_ids=[407], include_stop_str_in_output=include)
    feed(outputs, output, [Update("r", 0, [403]), Update("r", 0, [407], "stop", 407)])
    assert output.outputs[0].text == text
    assert output.outputs[0].token_ids == [403, 407]
    assert output.outputs[0].stop_reason == 407


def test_special_tokens_are_shown_if_wanted() -> None:
    for skip, text in ((True, "Once upon"), (False, " Once<s> upon")):
        outputs, output = start(skip_special_tokens=skip)
        feed(outputs, output, by_ones([403, 1, 407]))
        assert output.outputs[0].text.strip() == text.strip()
        assert output.outputs[0].token_ids == [403, 1, 407]


def test_without_text() -> None:
    outputs, output = start(detokenize=False)
    feed(outputs, output, by_ones(story_ids()))
    assert output.outputs[0].text == "" and output.outputs[0].token_ids == story_ids()
    bare = Outputs(None)
    bare.register(Request("r", [1], SamplingParams()))
    assert bare.push([Update("r", 0, [403], "length")])[0].text == ""


def test_unknown_and_forgotten_requests_are_ignored() -> None:
    outputs, _ = start()
    assert outputs.push([Update("other", 0, [403])]) == []
    outputs.forget("r")
    outputs.forget("r")
    assert outputs.push([Update("r", 0, [403])]) == []


def test_vllms_shapes() -> None:
    outputs, output = start(logprobs=2, prompt_logprobs=1)
    line = TokenLogprobs([403, 407, 403], [-2.0, -0.5, -2.0], [3, 1, 3])
    feed(outputs, output, [
        Update("r", 0, [403], logprobs=[line], prompt_logprobs=[TokenLogprobs([5, 6], [-3.0, -1.0], [4, 1])], cached_tokens=16),
        Update("r", 0, [407], "stop", logprobs=[TokenLogprobs([407], [-0.25], [1])],
               timings=Timings(arrival=5.0, first_scheduled=6.0, first_token=7.0, finished=9.0, preemptions=1))])
    one = output.outputs[0]
    assert one.logprobs is not None
    first = one.logprobs[0]
    assert list(first) == [403, 407]
    assert (first[403].logprob, first[403].rank, first[403].decoded_token) == (-2.0, 3, " Once")
    assert one.cumulative_logprob == -2.25
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert output.prompt_logprobs[1] is not None and output.prompt_logprobs[1][5].rank == 4
    assert output.num_cached_tokens == 16
    assert output.metrics.time_in_queue == 1.0
    assert (output.metrics.first_token_time, output.metrics.finished_time, output.metrics.num_preemptions) == (7.0, 9.0, 1)
    assert one.finished() and "Once" in repr(one)


def test_an_error_is_told() -> None:
    outputs, output = start()
    feed(outputs, output, [Update("r", 0, [403]), Update("r", 0, [], "error", error="not finite")])
    assert (output.outputs[0].finish_reason, output.outputs[0].error) == ("error", "not finite")
    assert output.outputs[0].text == "Once"


def test_deltas_join_to_the_whole_for_any_cut() -> None:
    cuts, size = random.Random(3), real.load(TOKENIZER).vocab_size
    for _ in range(200):
        ids = [cuts.randrange(size) for _ in range(cuts.randrange(1, 30))]
        stops = [real.load(TOKENIZER).decode([cuts.choice(ids)]) or "x" for _ in range(2)] if cuts.random() < 0.5 else None
        told = []
        for step in (1, cuts.randrange(1, 6)):
            outputs, output = start(stop=stops)
            updates = [Update("r", 0, ids[i:i + step]) for i in range(0, len(ids), step)]
            updates[-1].finish_reason = "length"
            feed(outputs, output, updates)
            told.append((output.outputs[0].text, output.outputs[0].token_ids, output.outputs[0].stop_reason))
        assert told[0] == told[1]
        if stops is None:
            assert told[0][0] == real.load(TOKENIZER).decode(ids)
