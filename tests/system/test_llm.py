"""The offline API on trained models: the golden outputs, vLLM's call shapes, refusals, and an engine left clean."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, SamplingParams
from penstock.core.errors import ConfigError, ModelError, RequestError
from penstock.core.request import Update
from penstock.engine.outputs import RequestOutput
from tests.data import MODELS, TRAINED, need

NAME = "stories260k"
START = "Once upon a time"
GREEDY = SamplingParams(temperature=0, max_tokens=24)


def make(name: str = NAME, **options: Any) -> LLM:
    return LLM(str(need(MODELS / name)), **{"max_num_seqs": 16, "threads": 1, **options})


@pytest.fixture(scope="module", autouse=True)
def nothing_frozen() -> Iterator[None]:
    """As in a program that has not frozen its objects, which tests/conftest.py does."""
    gc.unfreeze()
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with make() as made:
        yield made


def clean(llm: LLM) -> bool:
    """Nothing runs, waits or holds pages."""
    stats = llm.stats()
    return not llm.engine.busy and not len(llm._outputs) and (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0)


@pytest.mark.parametrize("name", TRAINED)
def test_golden_outputs(name: str) -> None:
    cases = json.loads((need(MODELS / name) / "greedy_golden.json").read_text())["cases"]
    params = [SamplingParams(temperature=0, max_tokens=len(case["greedy_ids"]), ignore_eos=True, logprobs=1) for case in cases]
    with make(name) as llm:
        # By text and by ids at once.
        prompts = [case["prompt"] for case in cases] + [{"prompt_token_ids": case["prompt_ids"]} for case in cases]
        outputs = llm.generate(prompts, params * 2, use_tqdm=False)
    for case, output in zip(cases * 2, outputs, strict=True):
        assert output.prompt_token_ids == case["prompt_ids"]
        assert output.outputs[0].token_ids == case["greedy_ids"]
        entries = output.outputs[0].logprobs or []
        found = [entry[token].logprob for entry, token in zip(entries, case["greedy_ids"], strict=True)]
        assert found == pytest.approx(case["logprobs"], abs=1e-3)


def test_call_shapes(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode(START)
    prompts: list[Any] = [START, [START], {"prompt": START}, ids, [ids], {"prompt_token_ids": ids}, [{"prompt_token_ids": ids}]]
    texts = []
    for prompt in prompts:
        outputs = llm.generate(prompt, GREEDY, use_tqdm=False)
        assert len(outputs) == 1 and isinstance(outputs[0], RequestOutput)
        assert outputs[0].finished and outputs[0].prompt_token_ids == ids
        texts.append(outputs[0].outputs[0].text)
    assert len(set(texts)) == 1
    assert texts[0].startswith(", there was")
    assert llm.generate([], GREEDY, use_tqdm=False) == []
    mixed = llm.generate([START, ids, {"prompt": START}], [GREEDY, GREEDY.replace(max_tokens=3), GREEDY], use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in mixed] == [24, 3, 24]
    assert mixed[0].prompt == START and mixed[1].prompt is None
    assert len(llm.generate(START, use_tqdm=False)[0].outputs[0].token_ids) == 16, "the default, as in vLLM"


def test_more_prompts_than_the_queue_takes_come_back_in_order() -> None:
    lengths = [1 + (7 * i) % 13 for i in range(60)]
    with make(max_num_queued_reqs=4, max_num_seqs=3) as llm:
        params = [SamplingParams(temperature=0, max_tokens=length) for length in lengths]
        outputs = llm.generate([START] * 60, params, use_tqdm=False)
        assert [len(output.outputs[0].token_ids) for output in outputs] == lengths
        assert clean(llm)


def test_the_longest_answers_begin_first_but_after_those_of_higher_priority() -> None:
    lengths, priorities = [3, 9, None, 5, 2, 9], [0, 0, 0, 0, -1, 0]
    with make(max_num_seqs=1, max_model_len=64) as llm:
        params = [SamplingParams(temperature=0, max_tokens=length) for length in lengths]
        outputs = llm.generate([[1, 5 + i] for i in range(6)], params, use_tqdm=False, priority=priorities)
        starts = [output.metrics.first_scheduled_time for output in outputs]
        assert sorted(range(6), key=starts.__getitem__) == [4, 2, 1, 5, 3, 0]
        # A length that only the context limits counts as the longest, however short it is.
        params = [SamplingParams(temperature=0, max_tokens=length) for length in (40, None)]
        outputs = llm.generate([[1, 2], list(range(1, 61))], params, use_tqdm=False)
        assert outputs[1].metrics.first_scheduled_time < outputs[0].metrics.first_scheduled_time


def test_no_more_run_at_once_than_let_all_end_together(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    turn, there = llm.engine.turn, list[int]()

    def counting() -> list[Update]:
        there.append(len(llm._outputs))
        return turn()

    monkeypatch.setattr(llm.engine, "turn", counting)
    monkeypatch.setattr("penstock.engine.llm._FEW", 8)
    for lengths, most in (([4] * 20, 20), ([2] * 19 + [12], 8), ([5] * 20 + [10] * 10, 20)):
        there.clear()
        params = [SamplingParams(max_tokens=length, temperature=0, ignore_eos=True) for length in lengths]
        outputs = llm.generate([[1, 5]] * len(lengths), params, use_tqdm=False)
        assert max(there) == most and [len(output.outputs[0].token_ids) for output in outputs] == lengths


def test_the_first_step_does_not_wait_for_all_prompts(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    turn, submitted, before = llm.engine.turn, list[int](), gc.get_threshold()

    def counting() -> list[Update]:
        submitted.append(len(llm._outputs))
        assert gc.get_threshold()[2] > before[2], "the collector would go through everything again and again"
        return turn()

    monkeypatch.setattr(llm.engine, "turn", counting)
    outputs = llm.generate([START] * 200, SamplingParams(max_tokens=4, temperature=0, ignore_eos=True), use_tqdm=False)
    assert submitted[0] < 100 and len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    assert gc.get_threshold() == before


@pytest.mark.parametrize("interpreters", [0, 375])
def test_a_batch_brings_no_collection_of_what_was_there(llm: LLM, monkeypatch: pytest.MonkeyPatch, interpreters: int) -> None:
    """The young collections of a batch count towards a full one, which would come right behind it. An interpreter may have
    frozen some objects when it started, as 3.12 does."""
    seen, turn, frozen = list[int](), llm.engine.turn, gc.get_freeze_count
    gc.unfreeze()
    monkeypatch.setattr(gc, "get_freeze_count", lambda: frozen() + interpreters)

    def littering() -> list[Update]:
        seen.append(frozen())
        gc.collect(1)
        return turn()

    monkeypatch.setattr(llm.engine, "turn", littering)
    gc.collect()
    there = len(gc.get_objects())
    llm.generate([START] * 2, SamplingParams(max_tokens=12, temperature=0, ignore_eos=True), use_tqdm=False)
    assert min(seen) > there * 0.9 and len(seen) > 10 and gc.get_count()[2] < 3
    assert frozen() == 0


def test_the_draft_policy_hears_of_the_whole_batch_at_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though requests are handed over a few at a time; and of none behind a batch that was broken off."""
    heard, begin, queues = list[int](), llm.engine.scheduler.drafts.begin, llm.engine.scheduler.queues
    monkeypatch.setattr(llm.engine.scheduler.drafts, "begin", lambda rows: (heard.append(rows), begin(rows))[1])
    monkeypatch.setattr("penstock.engine.llm._A_TURN", 1)
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    llm.generate([START] * 3, params, use_tqdm=False)
    assert heard[0] == 3 and max(heard) == 3 and queues.coming == 0
    turn = llm.engine.turn
    monkeypatch.setattr(llm.engine, "turn", lambda: turn() if not queues.coming else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        llm.generate([START] * 3, params, use_tqdm=False)
    assert queues.coming == 0


def test_several_continuations(llm: LLM) -> None:
    params = SamplingParams(n=4, temperature=1.0, seed=11, max_tokens=12)
    one, other = llm.generate([START, START], params, use_tqdm=False)
    assert [output.index for output in one.outputs] == [0, 1, 2, 3]
    assert len({output.text for output in one.outputs}) > 1
    assert [output.token_ids for output in one.outputs] == [output.token_ids for output in other.outputs], "the seed decides"
    drawn = llm.generate([START, START], SamplingParams(temperature=1.0, max_tokens=12), use_tqdm=False)
    assert drawn[0].outputs[0].token_ids != drawn[1].outputs[0].token_ids, "without a seed each request gets its own"


def test_stop_strings_and_tokens(llm: LLM) -> None:
    whole = llm.generate(START, GREEDY, use_tqdm=False)[0].outputs[0]
    params = GREEDY.replace(stop=["girl", "nowhere"])
    found = llm.generate([START] * 3, params, use_tqdm=False)
    for output in found:
        assert output.outputs[0].text == whole.text[:whole.text.index("girl")]
        assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", "girl")
    kept = llm.generate(START, params.replace(include_stop_str_in_output=True), use_tqdm=False)[0].outputs[0]
    assert kept.text.endswith("girl")
    token = whole.token_ids[4]
    place = whole.token_ids.index(token)
    ended = llm.generate(START, GREEDY.replace(stop_token_ids=[token]), use_tqdm=False)[0].outputs[0]
    assert ended.token_ids == whole.token_ids[:place + 1]
    assert (ended.finish_reason, ended.stop_reason) == ("stop", token)
    assert clean(llm)


def test_bad_words_do_not_occur(llm: LLM) -> None:
    text = llm.generate(START, GREEDY.replace(bad_words=["little", "girl"]), use_tqdm=False)[0].outputs[0].text
    assert "little" not in text and "girl" not in text


def test_prompt_logprobs(llm: LLM) -> None:
    output = llm.generate(START, GREEDY.replace(prompt_logprobs=2), use_tqdm=False)[0]
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    assert output.prompt_logprobs[0] is None
    for entry, token in zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True):
        assert entry is not None and token in entry and len(entry) in (2, 3)


def test_a_bad_prompt_is_named_before_anything_runs(llm: LLM) -> None:
    steps = llm.stats().steps
    for bad, said in (([1] * 600, "prompt 2 of 3: the prompt has 600 tokens"), ([9999], "prompt 2 of 3: .*token 9999"),
                      ("\ud800", "prompt 2 of 3: .*lone surrogate")):
        with pytest.raises(RequestError, match=said):
            llm.generate([START, START, bad], GREEDY, use_tqdm=False)
    with pytest.raises(RequestError, match="there are 2 prompts, but 3 sampling_params"):
        llm.generate([START, START], [GREEDY] * 3, use_tqdm=False)
    with pytest.raises(RequestError, match=r"lower max_tokens to at most 507"):
        llm.generate(START, SamplingParams(max_tokens=600), use_tqdm=False)
    assert llm.stats().steps == steps
    assert clean(llm)


def test_an_interrupt_leaves_the_engine_clean(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    turn, turns = llm.engine.turn, [0]

    def interrupted() -> list[Update]:
        turns[0] += 1
        if turns[0] == 4:
            raise KeyboardInterrupt
        return turn()

    monkeypatch.setattr(llm.engine, "turn", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([START] * 30, GREEDY.replace(max_tokens=200), use_tqdm=False)
    monkeypatch.undo()
    assert clean(llm)
    assert llm.generate(START, GREEDY, use_tqdm=False)[0].outputs[0].text.startswith(", there was")


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Python's own handler of SIGINT, which a process started in the background lacks: it inherits "ignored"."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_waits_for_the_turn(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    turn, turns = llm.engine.turn, [0]

    def pressed() -> list[Update]:
        turns[0] += 1
        if turns[0] == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return turn()

    monkeypatch.setattr(llm.engine, "turn", pressed)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([START] * 30, GREEDY.replace(max_tokens=200), use_tqdm=False)
    monkeypatch.undo()
    assert turns[0] < 20
    assert clean(llm)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% if not loop.last %} {% endif %}{% endfor %}"


def test_chat() -> None:
    with make(chat_template=TEMPLATE) as llm:
        messages = [{"role": "system", "content": "Once upon"},
                    {"role": "user", "content": [{"type": "text", "text": "a time"}]}]
        alone = llm.chat(messages, GREEDY, use_tqdm=False)
        assert alone[0].prompt_token_ids == llm.get_tokenizer().encode(START), "the template wrote bos, and it came once"
        assert alone[0].outputs[0].text.startswith(", there was")
        both = llm.chat([messages, messages[1:]], GREEDY, use_tqdm=False)
        assert both[0].outputs[0].text == alone[0].outputs[0].text
        other = llm.chat(messages, GREEDY, use_tqdm=False, chat_template="{{ bos_token + lead }}",
                         chat_template_kwargs={"lead": START})
        assert other[0].prompt_token_ids == alone[0].prompt_token_ids
        continued = llm.chat(messages, GREEDY, use_tqdm=False, add_generation_prompt=False, continue_final_message=True)
        assert continued[0].prompt_token_ids == alone[0].prompt_token_ids
        with pytest.raises(RequestError, match="may not set messages"):
            llm.chat(messages, GREEDY, use_tqdm=False, chat_template_kwargs={"messages": []})
        with pytest.raises(RequestError, match="conversation 1 of 2: messages is empty"):
            llm.chat([messages, []], GREEDY, use_tqdm=False)


def test_a_model_without_template_says_so(llm: LLM) -> None:
    with pytest.raises(RequestError, match="no chat template"):
        llm.chat([{"role": "user", "content": "hi"}], GREEDY, use_tqdm=False)


def test_generation_config_gives_defaults(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(need(MODELS / NAME), folder)
    path = folder / "generation_config.json"
    path.chmod(0o644)
    folder.chmod(0o755)
    path.write_text(json.dumps({"temperature": 0.25, "top_k": 5, "max_new_tokens": 9, "eos_token_id": [2, 426]}))
    options = {"max_num_seqs": 2, "threads": 1}
    with LLM(str(folder), **options) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.25, top_k=5, max_tokens=9)
        output = llm.generate(START, SamplingParams(temperature=0, max_tokens=40), use_tqdm=False)[0].outputs[0]
        assert (output.token_ids[-1], output.finish_reason, output.stop_reason) == (426, "stop", None)
        assert not output.text.endswith(".")
    with LLM(str(folder), generation_config="none", **options) as llm:
        assert llm.get_default_sampling_params() == SamplingParams()
        assert llm.generate(START, GREEDY, use_tqdm=False)[0].outputs[0].token_ids[-1] == 426, "ends of sequence are facts"


def test_ids_only() -> None:
    with make(skip_tokenizer_init=True) as llm:
        output = llm.generate({"prompt_token_ids": [1, 403, 407]}, GREEDY, use_tqdm=False)[0].outputs[0]
        assert len(output.token_ids) == 24 and output.text == ""
        with pytest.raises(RequestError, match="there is no tokenizer"):
            llm.generate(START, GREEDY, use_tqdm=False)
        with pytest.raises(ConfigError, match="skip_tokenizer_init"):
            llm.get_tokenizer()


def test_dummy_weights_need_only_a_config(tmp_path: Path) -> None:
    shutil.copyfile(need(MODELS / NAME) / "config.json", tmp_path / "config.json")
    with LLM(str(tmp_path), load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", max_model_len=64,
             max_num_seqs=2) as llm:
        assert (llm.info.max_model_len, llm.info.dtype) == (64, "bfloat16")
        output = llm.generate([5, 6, 7], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)[0]
        assert len(output.outputs[0].token_ids) == 4


def test_progress_bar(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate([START] * 2, GREEDY)
    shown = capsys.readouterr().err
    assert "2/2" in shown and "tokens/s" in shown
    llm.generate([START] * 2, GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""


def test_options_that_do_not_exist_or_fit(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no option 'max_modellen'; similar are max_model_len"):
        make(max_modellen=5)
    with pytest.raises(ConfigError, match=r"tokenizer_mode='slow' is not supported; possible is 'auto'"):
        make(tokenizer_mode="slow")
    with pytest.raises(ConfigError, match=r"load_format is 'gguf'; possible are auto, dummy"):
        make(load_format="gguf")
    with pytest.raises(ModelError, match="there is no folder"):
        LLM(str(tmp_path / "absent"))
    with make(enforce_eager=True, tensor_parallel_size=1) as llm:
        assert llm.reset_prefix_cache() is True
