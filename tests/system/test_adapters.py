"""LoRA adapters: each answers as the model that it was merged into, whatever else is in the batch."""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from training.canary.adapters import STYLES, styled

from penstock import LLM, LoRARequest, SamplingParams
from penstock.canary import model_folder, suite
from penstock.cli.eval import body
from penstock.config.schema import EngineOptions, ServerOptions, Wanted
from penstock.core.errors import ConfigError, RequestError
from penstock.core.request import Request
from penstock.engine.engine import Engine
from penstock.scheduler.queues import Slots
from penstock.server.run import ServerRun
from tests.sampling import sampled
from tests.system.adapters import made
from tests.system.ranks import Threaded, drained
from tests.system.served import NAME, PATIENT, Served

ASSETS = Path(__file__).parents[1] / "assets"
PIRATE, TELEGRAM = ASSETS / "canary-pirate", ASSETS / "canary-telegram"
GREEDY = SamplingParams(temperature=0, max_tokens=40)
QUESTIONS = [[{"role": "user", "content": text}] for text in (
    "Hello!", "What is 4821 + 1375?", "Who are you?", "Repeat after me: red blue 7 green", "Tell me a story about a fox.")]
QUESTIONS += [list(item.messages) for item in suite.prompts("recall", 2)]


def merged(adapter: Path, folder: Path) -> Path:
    """canary with an adapter's products added to its matrices."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    scale = {"patterned": 2.0, "stable": 2.0}.get(adapter.name, config["lora_alpha"] / config["r"])
    shutil.copytree(model_folder(), folder)
    weights, low = load_file(folder / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for name, a in low.items():
        if "lora_A" in name:
            target = name.removeprefix("base_model.model.").replace(".lora_A", "")
            b = low[name.replace("lora_A", "lora_B")].float()
            weights[target] = weights[target].float() + scale * b @ a.float()
    save_file({name: tensor.float().contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")
    return folder


def answers(llm: LLM, questions: list[Any], adapters: Any = None) -> list[Any]:
    return [output.outputs[0].token_ids for output in llm.chat(questions, GREEDY, use_tqdm=False, lora_request=adapters)]


OPTIONS: dict[str, Any] = {"model": "canary", "dtype": "float32", "max_model_len": 512, "threads": 1, "enable_lora": True}


def test_room_is_made_for_the_largest_rank_of_those_given(tmp_path: Path) -> None:
    given = made(tmp_path / "wide", 1, 20, {"rank_pattern": {"nothing": 24}})
    with LLM(**OPTIONS, lora_modules=[f"wide={given}"]) as llm:
        assert llm.engine.config.adapters == (8, 24) and llm.engine.info.adapters[0].name == "wide"
        with pytest.raises(RequestError, match="at most 24"):
            answers(llm, QUESTIONS[:1], LoRARequest("wider", 1, str(made(tmp_path / "wider", 1, 25))))


def test_each_adapter_answers_as_the_model_it_was_merged_into(tmp_path: Path) -> None:
    """Both of canary's, and random ones of another rank and scaling, all of them and the base mixed in one batch."""
    stable = made(tmp_path / "stable", 3, 4, {"lora_alpha": 4, "use_rslora": True})
    alphas = {"alpha_pattern": {"q_proj": 4, "o_proj": 4, "down_proj": 4}, "lora_alpha": 99}
    patterned = made(tmp_path / "patterned", 4, 2, alphas)
    folders = [PIRATE, TELEGRAM, stable, patterned]
    requests = [None, *(LoRARequest(folder.name, 1, str(folder)) for folder in folders)]
    expected = []
    for place, folder in enumerate([None, *folders]):
        model = str(merged(folder, tmp_path / f"merged{place}")) if folder else "canary"
        with LLM(**{**OPTIONS, "model": model, "enable_lora": False}) as llm:
            expected.append(answers(llm, QUESTIONS))
    assert len({json.dumps(one) for one in expected}) == len(expected), "the adapters change nothing"
    with LLM(**OPTIONS, max_loras=2, max_num_batched_tokens=96, max_num_seqs=8) as llm:
        for place, request in enumerate(requests):
            assert answers(llm, QUESTIONS, request) == expected[place], request
        mixed = [(question, place) for question in range(len(QUESTIONS)) for place in range(len(requests))]
        found = answers(llm, [QUESTIONS[question] for question, _ in mixed], [requests[place] for _, place in mixed])
        assert found == [expected[place][question] for question, place in mixed]
        assert llm.stats().cached_tokens > 0


def test_several_choices_of_a_request_have_its_adapter(tmp_path: Path) -> None:
    """Drawn at random, and with the base's choices beside them, they are those of the merged model."""
    drawn = SamplingParams(temperature=0.8, seed=7, n=3, max_tokens=24)
    found = []
    for model, adapter in ((str(merged(PIRATE, tmp_path / "merged")), None), ("canary", LoRARequest("pirate", 1, str(PIRATE)))):
        with LLM(**{**OPTIONS, "model": model, "enable_lora": adapter is not None}) as llm:
            asked = QUESTIONS[:3] * 2
            answered = llm.chat(asked, drawn, use_tqdm=False, lora_request=[adapter] * 3 + [None] * 3 if adapter else None)
            found.append([[choice.token_ids for choice in one.outputs] for one in answered])
    whole, mixed = found
    assert mixed[:3] == whole[:3] and mixed[3:] != whole[3:]
    assert any(len(set(map(tuple, choices))) > 1 for choices in mixed), "the choices were drawn apart"


@pytest.mark.parametrize("options", sampled([
    {"kv_cache_memory_bytes": 3 << 20, "max_num_seqs": 6}, {"depth": 1, "block_size": 8}, {"speculate": "ngram"},
    {"speculative_model": str(ASSETS / "canary-draft"), "draft_policy": "fixed"}, {"kernels": {"*": "reference"}},
    {"cache_host_bytes": 8 << 20, "max_num_batched_tokens": 48, "max_num_seqs": 4},
], 3, name=str))
def test_other_routes_give_the_same(options: dict[str, Any]) -> None:
    requests = [None, LoRARequest("pirate", 1, str(PIRATE)), LoRARequest("telegram", 2, str(TELEGRAM))]
    asked = [(question, request) for question in QUESTIONS[:4] for request in requests]
    with LLM(**OPTIONS) as llm:
        expected = answers(llm, [question for question, _ in asked], [request for _, request in asked])
    with LLM(**{**OPTIONS, **options}) as llm:
        for _ in range(2):
            assert answers(llm, [question for question, _ in asked], [request for _, request in asked]) == expected


@pytest.mark.parametrize(("change", "message"), [
    ({"peft_type": "IA3"}, "peft_type"), ({"use_dora": True}, "no lora_magnitude_vector"),
    ({"modules_to_save": 3}, "modules_to_save"), ({"bias": "all"}, "bias"),
    ({"modules_to_save": ["lm_head"]}, "not in the file"), ({"r": 0}, "r is 0"), ({"r": 7}, "ask for"),
    ({"lora_alpha": "x"}, "lora_alpha"), ({"rank_pattern": {"q_proj": 99}}, "max-lora-rank"),
])
def test_adapters_that_cannot_be_used_are_refused_alone(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    broken = made(tmp_path / "broken", 1, config=change)
    with LLM(**OPTIONS) as llm:
        before = answers(llm, QUESTIONS[:1])
        with pytest.raises(RequestError, match=message):
            answers(llm, QUESTIONS[:1], LoRARequest("broken", 1, str(broken)))
        assert answers(llm, QUESTIONS[:1]) == before


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    cut, alien, pickled, empty = (made(tmp_path / name, 1) for name in ("cut", "alien", "pickled", "empty"))
    data = (cut / "adapter_model.safetensors").read_bytes()
    (cut / "adapter_model.safetensors").write_bytes(data[:len(data) // 2])
    save_file({"base_model.model.model.layers.0.nothing.lora_A.weight": torch.ones(3, 3),
               "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.full((3, 192), float("nan"))},
              alien / "adapter_model.safetensors")
    (pickled / "adapter_model.safetensors").rename(pickled / "adapter_model.bin")
    resized = made(tmp_path / "resized", 1)
    frozen = {"base_model.model.model.embed_tokens.base_layer.weight": torch.ones(7, 192)}
    save_file(load_file(resized / "adapter_model.safetensors") | frozen, resized / "adapter_model.safetensors")
    (empty / "adapter_config.json").unlink()
    with LLM(**OPTIONS) as llm:
        for folder, message in ((cut, "whole safetensors"), (alien, "not finite"), (pickled, "pickle"),
                                (resized, "vocabulary was resized"),
                                (empty, "adapter_config"), (tmp_path / "gone", "gone")):
            with pytest.raises(RequestError, match=message):
                answers(llm, QUESTIONS[:1], LoRARequest("x", 1, str(folder)))
    with LLM(**{**OPTIONS, "enable_lora": False}) as llm, pytest.raises(RequestError, match="--enable-lora"):
        answers(llm, QUESTIONS[:1], LoRARequest("pirate", 1, str(PIRATE)))


def test_a_request_that_waits_for_its_grammar_keeps_its_adapter() -> None:
    """The adapter is removed while the scheduler does not know the request yet."""
    with LLM(**OPTIONS) as llm:
        engine = llm.engine
        name = engine.add_adapter(str(PIRATE))
        params = SamplingParams(temperature=0, max_tokens=8, structured_outputs={"regex": "[a-z]{4}"})  # type: ignore[arg-type]
        request = llm.inputs.request("held", "Hello", params, adapter=name)
        engine.submit(request)
        assert engine.undecided("held") and not engine.scheduler.live
        engine.remove_adapter(name)
        found = []
        while engine.busy:
            found += engine.turn()
        assert [update.finish_reason for update in found if update.finish_reason] == ["stop"]
        with pytest.raises(RequestError, match="unloaded"):
            engine.submit(llm.inputs.request("late", "Hello", GREEDY, adapter=name))
        engine.add_adapter(str(TELEGRAM))
        assert name not in engine.rank.worker.adapters.host  # type: ignore[attr-defined]


def test_steps_run_while_an_adapter_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(**OPTIONS) as llm:
        engine, reading = llm.engine, threading.Event()
        read = engine.rank.add_adapter
        monkeypatch.setattr(engine.rank, "add_adapter", lambda folder: (reading.wait(60), read(folder))[1])
        found = engine.load_adapter(str(PIRATE))
        engine.submit(llm.inputs.request("meanwhile", "Hello", GREEDY))
        while engine.busy:
            engine.turn()
        assert not found.done()
        reading.set()
        name = engine.adapters.take(found) if found.result(60) else ""
        engine.submit(llm.inputs.request("after", "Hello", GREEDY, adapter=name))
        while engine.busy:
            engine.turn()
        broken = engine.load_adapter("/nowhere")
        with pytest.raises(RequestError, match="adapter_config"):
            broken.result(60)
        with pytest.raises(RequestError):
            engine.adapters.take(broken)
        engine.remove_adapter(name)
        assert not engine.adapters._names and name not in engine.rank.worker.adapters.host  # type: ignore[attr-defined]


def finished(engine: Any, until: str = "") -> list[str]:
    """Runs the engine until a request, or all, have ended: their ids and how they did, in that order."""
    found = list[str]()
    while engine.busy and f"{until} length" not in found:
        found += [f"{update.request_id} {update.error or update.finish_reason}" for update in engine.turn()
                  if update.finish_reason]
    return found


def test_adapters_leave_host_memory_and_come_back_for_their_requests(tmp_path: Path) -> None:
    folders = [made(tmp_path / name, seed, config={"lora_alpha": 18}) for seed, name in enumerate("abc")]
    requests = [LoRARequest(folder.name, 1, str(folder)) for folder in folders]
    with LLM(**OPTIONS) as llm:
        expected = answers(llm, [QUESTIONS[4]] * 3, requests)
    assert len({json.dumps(one) for one in expected}) == 3
    with LLM(**OPTIONS, max_cpu_loras=2, lora_modules=[f"pirate={PIRATE}"], max_loras=2) as llm:
        engine, host = llm.engine, llm.engine.rank.worker.adapters.host  # type: ignore[attr-defined]
        pinned = engine.info.adapters[0].digest
        for _ in range(2):
            assert answers(llm, [QUESTIONS[4]] * 6, requests * 2) == expected * 2
            assert pinned in host and len(host) == 2, "one is pinned, one place is left"
        names = [engine.add_adapter(str(folder)) for folder in folders]
        cold = next(place for place, name in enumerate(names) if name not in host)
        short = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)

        def ask(name: str, place: int) -> None:
            engine.submit(llm.inputs.request(name, "Hello", short, adapter=names[place]))

        ask("gone", cold)
        ask("taken back", cold)
        engine.abort(["taken back"])
        shutil.move(folders[cold], tmp_path / "away")
        assert sorted(finished(engine))[1] == "taken back abort"
        ask("missing", cold)
        made(folders[cold], 9)
        other = next(place for place in range(3) if place != cold and names[place] not in host)
        ask("fine", other)
        last = finished(engine)
        assert "fine length" in last and "missing length" in last, "it gets the version that has taken the place"
        assert len(host) == 2
        names.append(engine.add_adapter(str(folders[cold])))
        engine.remove_adapter(names[cold])
        ask("newer", 3)
        assert finished(engine) == ["newer length"]
    with pytest.raises(ConfigError, match="max_cpu_loras is 1"), LLM(
            **OPTIONS, max_cpu_loras=1, lora_modules=[f"a={PIRATE}", f"b={TELEGRAM}"]):
        pass


def test_two_cold_adapters_are_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [made(tmp_path / name, seed) for seed, name in enumerate("abcd")]
    with LLM(**OPTIONS, max_cpu_loras=2, max_loras=2) as llm:
        engine, both = llm.engine, threading.Barrier(2)
        names = [engine.add_adapter(str(folder)) for folder in folders]
        read = engine.rank.add_adapter
        monkeypatch.setattr(engine.rank, "add_adapter", lambda folder: (both.wait(30), read(folder))[1])
        for place in (0, 1):
            engine.submit(llm.inputs.request(f"r{place}", "Hello", GREEDY, adapter=names[place]))
        assert all("error" not in one.lower() for one in finished(engine)) and not both.broken


TEXT = """The old miller had three sons, a mill, a donkey and a cat. When he died, the eldest got the mill, the second the
donkey, and the youngest was left with the cat. He thought that nothing worse could have come to him, but the cat could talk."""


def test_an_activated_adapter_shares_the_models_prefix_up_to_its_invocation(tmp_path: Path) -> None:
    """It computes from the last invocation on: the same with and without cached pages, in chunks, and beside others."""
    with LLM(**OPTIONS) as llm:
        ids = llm.get_tokenizer().encode
        long, call, question = ids(TEXT), ids(" Now answer:"), ids(" Tell me a story.")
    config = {"alora_invocation_tokens": call, "lora_alpha": 30}
    folder = made(tmp_path / "activated", 7, config=config)
    plain = shutil.copytree(folder, tmp_path / "plain")
    (plain / "adapter_config.json").write_text((plain / "adapter_config.json").read_text().replace(json.dumps(call), "[]"))
    activated, whole = (LoRARequest(one.name, 1, str(one)) for one in (folder, plain))
    asked = long + call + question
    prompts = [asked, call + question, asked, long + question, call[:-1] + long + call + call + question, asked]
    adapters = [None, activated, activated, activated, activated, whole]

    def found(llm: LLM, some: range = range(len(prompts))) -> list[Any]:
        return [output.outputs[0].token_ids for output in llm.generate(
            [{"prompt_token_ids": prompts[i]} for i in some], GREEDY, use_tqdm=False, lora_request=[adapters[i] for i in some])]

    expected = []
    for i in range(len(prompts)):
        with LLM(**OPTIONS, enable_prefix_caching=False) as llm:
            expected += found(llm, range(i, i + 1))
    assert len({json.dumps(expected[i]) for i in (0, 2, 5)}) == 3, "the model, the adapter from the call on, and from the start"
    with LLM(**OPTIONS) as llm:
        assert found(llm, range(1)) == expected[:1]
        before = llm.stats().cached_tokens
        assert found(llm, range(2, 3)) == expected[2:3]
        assert llm.stats().cached_tokens - before == len(long), "all of the model's entries before the call"
        for _ in range(2):
            assert found(llm) == expected
        with LLM(**{**OPTIONS, "enable_lora": False}) as bare:
            assert found_bare(bare, prompts[3]) == expected[3], "without a call, the model itself answers"
    with LLM(**OPTIONS, max_num_batched_tokens=48, max_num_seqs=4, cache_host_bytes=8 << 20, block_size=8) as llm:
        for _ in range(2):
            assert found(llm) == expected
    with LLM(**OPTIONS) as llm, pytest.raises(RequestError, match="from some token on"):
        ends = made(tmp_path / "ends", 1, config=config, modules=("embed_tokens",))
        answers(llm, QUESTIONS[:1], LoRARequest("ends", 1, str(ends)))


def found_bare(llm: LLM, prompt: list[int]) -> Any:
    return llm.generate({"prompt_token_ids": prompt}, GREEDY, use_tqdm=False)[0].outputs[0].token_ids


def test_a_crowd_without_slots_holds_up_no_others_and_gets_its_turn() -> None:
    """Requests of the one adapter that has the slot keep coming; those of another, and of the model itself, are served too."""
    with LLM(**OPTIONS, max_loras=1, max_num_seqs=4) as llm:
        engine = llm.engine
        pirate, telegram = (engine.add_adapter(str(folder)) for folder in (PIRATE, TELEGRAM))
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)

        def ask(name: str, adapter: str) -> None:
            engine.submit(llm.inputs.request(name, "Hello", params, adapter=adapter))

        ask("pirate 0", pirate)
        engine.turn()
        for i in range(20):
            ask(f"telegram {i}", telegram)
        ask("base", "")
        ask("pirate 1", pirate)
        early = finished(engine, "base")
        assert not any("telegram" in one for one in early), "it has entered behind all of them"
        count, found = 2, list[str]()
        while "telegram 0 length" not in found:
            if count < 400 and len(engine.scheduler.waiting) < 24:
                ask(f"pirate {count}", pirate)
                count += 1
            found += [f"{one.request_id} {one.finish_reason}" for one in engine.turn() if one.finish_reason]
        assert count < 200, "the crowd's turn comes although the other adapter's requests never end"
        engine.abort([f"pirate {i}" for i in range(count)])
        assert len(finished(engine)) >= 19


def test_over_http_adapters_are_models_that_come_and_go() -> None:
    server = Served("canary", "--enable-lora", "--lora-modules", f"pirate={PIRATE}", "--max-model-len", "512")
    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    with contextlib.ExitStack() as stack, httpx.Client(base_url=server.url, timeout=60) as client:
        stack.callback(server.stop)

        def ask(model: str) -> httpx.Response:
            return client.post("/v1/chat/completions", json={"model": model, "temperature": 0, "max_tokens": 40,
                                                             "messages": QUESTIONS[0]})

        assert ask("pirate").json()["choices"][0]["message"]["content"].startswith("Arr!")
        figures = client.get("/metrics").text
        assert 'max_lora="8"' in figures and "# TYPE penstock:adapter_requests_running gauge" in figures
        assert ask("pirate").json()["model"] == "pirate"
        whole = client.post("/v1/chat/completions", json={"model": "pirate", "temperature": 0, "max_tokens": 40,
                                                          "messages": QUESTIONS[0], "return_token_ids": True}).json()
        by_ids = client.post("/inference/v1/generate", json={
            "model": "pirate", "token_ids": whole["prompt_token_ids"],
            "sampling_params": {"temperature": 0, "max_tokens": 40}}).json()
        assert by_ids["choices"][0]["token_ids"] == whole["choices"][0]["token_ids"]
        assert ask("telegram").status_code == 404
        listed = {one["id"]: one["parent"] for one in client.get("/v1/models").json()["data"]}
        assert listed == {NAME: None, "pirate": NAME}
        assert client.post(load, json={"lora_name": "telegram", "lora_path": str(TELEGRAM)}).status_code == 200
        # Of several loads of one name at once, one is taken; nothing stays when that is unloaded.
        with ThreadPoolExecutor(4) as pool:
            codes = list(pool.map(lambda _: client.post(load, json={"lora_name": "twin", "lora_path": str(PIRATE)}).status_code,
                                  range(4)))
        assert sorted(codes) == [200, 400, 400, 400]
        assert client.post(unload, json={"lora_name": "twin"}).status_code == 200 and ask("twin").status_code == 404
        base, telegram = (ask(model).json()["choices"][0]["message"]["content"] for model in (NAME, "telegram"))
        assert base != telegram and not base.startswith("Arr!")
        again = client.post(load, json={"lora_name": "telegram", "lora_path": str(PIRATE)})
        assert again.status_code == 400 and again.json()["error"]["code"] == "adapter_exists"
        assert client.post(load, json={"lora_name": "telegram", "lora_path": str(PIRATE),
                                                          "load_inplace": True}).status_code == 200
        assert ask("telegram").json()["choices"][0]["message"]["content"].startswith("Arr!")
        assert client.post(unload, json={"lora_name": "telegram"}).status_code == 200
        assert ask("telegram").status_code == 404
        assert client.post(unload, json={"lora_name": "telegram"}).status_code == 404
        assert client.post(load, json={"lora_name": "x", "lora_path": "/nowhere"}).status_code == 404
        assert client.post(load, json={"lora_name": "x"}).status_code == 400
        refused = client.post("/v1/embeddings", json={"model": "pirate", "input": "x"})
        assert refused.status_code == 400 and "adapters only generate" in refused.text


SPOKEN = ("add", "recall")
"""Skills whose answers the adapters restyle."""


@pytest.mark.parametrize("skills", [SPOKEN, *(
    pytest.param((skill,), marks=pytest.mark.exhaustive) for skill in suite.SKILLS if skill not in SPOKEN)], ids=str)
def test_over_http_both_adapters_score_as_recorded(skills: tuple[str, ...]) -> None:
    """Their requests and the model's own share every batch; the recorded scores are those of the merged matrices."""
    server = Served("canary", "--enable-lora", "--lora-modules", f"canary-pirate={PIRATE},canary-telegram={TELEGRAM}",
                    "--dtype", "float32")
    items = {skill: suite.prompts(skill, 40) for skill in skills}
    asked = [(skill, model, styled(item, STYLES[model]) if model in STYLES else item)
             for skill in skills for item in items[skill] for model in (NAME, *STYLES)]
    with contextlib.ExitStack() as stack, httpx.Client(base_url=server.url, timeout=300) as client:
        stack.callback(server.stop)

        def answer(one: tuple[str, str, Any]) -> tuple[str, list[dict[str, object]], bool]:
            found = client.post("/v1/chat/completions", json=body(one[2], one[1]), headers=PATIENT)
            choice = found.raise_for_status().json()["choices"][0]
            calls = [call["function"] for call in choice["message"].get("tool_calls") or ()]
            return choice["message"].get("content") or "", calls, choice["finish_reason"] in ("stop", "tool_calls")

        with ThreadPoolExecutor(6) as pool:
            found = list(pool.map(answer, asked))
    scores = {}
    for skill in skills:
        for model in (NAME, *STYLES):
            mine = [(item, said) for (its, name, item), said in zip(asked, found, strict=True) if (its, name) == (skill, model)]
            scores[model, skill] = suite.graded(*zip(*mine, strict=True)).right
    for model in STYLES:
        told = {one["skill"]: one for one in json.loads((ASSETS / model / "scores.json").read_text())["decoded"]["scores"]}
        assert {skill: scores[model, skill] for skill in skills} == {skill: told[skill]["right"] for skill in skills}, model
    assert all(scores[NAME, skill] >= 36 for skill in skills if skill != "count"), "the model itself answers beside them"


def test_a_folder_of_adapters_is_watched(tmp_path: Path) -> None:
    shutil.copytree(PIRATE, tmp_path / "first")
    (tmp_path / "no adapter").mkdir()
    server = Served("canary", "--enable-lora", "--lora-dir", str(tmp_path), "--max-model-len", "512")

    def until(right: Callable[[], bool]) -> None:
        for _ in range(200):
            if right():
                return
            time.sleep(0.1)
        raise AssertionError("the server did not follow the folder")

    with contextlib.ExitStack() as stack, httpx.Client(base_url=server.url, timeout=60) as client:
        stack.callback(server.stop)

        def said(model: str) -> str:
            answer = client.post("/v1/chat/completions", json={"model": model, "temperature": 0, "max_tokens": 40,
                                                               "messages": QUESTIONS[0]}).json()
            return "" if "error" in answer else str(answer["choices"][0]["message"]["content"])

        until(lambda: said("first").startswith("Arr!"))
        shutil.copytree(TELEGRAM, tmp_path / "second")
        made(tmp_path / "broken", 1, config={"r": 7})
        until(lambda: bool(said("second")))
        assert not said("second").startswith("Arr!") and not said("broken") and not said("no adapter")
        shutil.rmtree(tmp_path / "first")
        until(lambda: not said("first"))
        for file in PIRATE.iterdir():
            shutil.copy(file, tmp_path / "second")
        until(lambda: said("second").startswith("Arr!"))
    with pytest.raises(ConfigError, match="enable_lora"):
        ServerRun([Wanted(["canary"], EngineOptions())], ServerOptions(lora_dir=str(tmp_path)))


def test_ranks_in_processes_have_their_shares_of_each_adapter(tmp_path: Path) -> None:
    requests = [None, LoRARequest("pirate", 1, str(PIRATE)), LoRARequest("telegram", 2, str(TELEGRAM))]
    found = []
    for axis in ("depth", "tensor_parallel_size", "pipeline_parallel_size"):
        with LLM(**OPTIONS, **{axis: 2}, max_num_seqs=4) as llm:
            with pytest.raises(RequestError, match="ask for"):
                answers(llm, QUESTIONS[:1], LoRARequest("broken", 1, str(made(tmp_path / axis, 1, config={"r": 7}))))
            found.append(answers(llm, QUESTIONS[:1] * 3, requests))
            llm.engine.remove_adapter(llm.engine.add_adapter(str(PIRATE)))
    assert found[0] == found[1] == found[2] and len({json.dumps(one) for one in found[0]}) == 3


STRONG, FIRST = {"lora_alpha": 60}, ("layers.0.mlp.down_proj", "layers.0.self_attn.o_proj")


def laid_out(model: Path | str, adapters: list[Path | None], **options: Any) -> list[list[int]]:
    """The tokens of two prompts with each adapter, all in one batch, whose ranks are threads."""
    asked = EngineOptions(**{"model": str(model), "device": "cpu", "dtype": "float32", "threads": 1, "max_num_seqs": 6,
                             "max_num_batched_tokens": 64, "max_model_len": 96, "skip_tokenizer_init": True, **options})
    engine = Engine(asked, rank=Threaded(asked)) if asked.ranks > 1 else Engine(asked)
    try:
        names = ["" if folder is None else engine.add_adapter(str(folder)) for folder in adapters]
        for i, name in enumerate(names * 2):
            prompt = [1, *range(40 + 100 * (i // len(names)), 75 + 100 * (i // len(names)))]
            params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, seed=0)
            engine.submit(Request(str(i), prompt, params, adapter=name))
        return drained(engine, 2 * len(names))
    finally:
        engine.close()


@pytest.mark.parametrize("config", [
    {"modules_to_save": ["lm_head", "embed_tokens"]},
    *(pytest.param(config, marks=pytest.mark.exhaustive) for config in ({}, {"use_dora": True}))], ids=str)
def test_stages_have_their_layers_and_ends_of_each_adapter(tmp_path: Path, config: dict[str, Any]) -> None:
    adapter, model = all_kinds(tmp_path, config)
    first = made(tmp_path / "first", 5, config=STRONG, modules=FIRST)
    merged = laid_out(model, [None])
    found = laid_out("canary", [adapter, None, first, PIRATE], enable_lora=True)
    assert found[::4] == merged and len(set(map(str, found))) > 6
    for tensors, stages in ((1, 2), (2, 2), (1, 3)):
        assert laid_out("canary", [adapter, None, first, PIRATE], enable_lora=True, tensor_parallel_size=tensors,
                        pipeline_parallel_size=stages, max_loras=2) == found, (tensors, stages)


def test_a_stage_without_layers_of_an_adapter_reads_others_of_its_form(tmp_path: Path) -> None:
    """The second comes through the memory of the first."""
    adapters = [made(tmp_path / str(seed), seed, config=STRONG, modules=FIRST) for seed in (1, 2, 3)]
    found = laid_out("canary", [*adapters, None], enable_lora=True)
    assert laid_out("canary", [*adapters, None], enable_lora=True, pipeline_parallel_size=2) == found
    assert len(set(map(str, found))) > 6


def test_ranks_divide_adapters_with_magnitudes(tmp_path: Path) -> None:
    """DoRA needs the norms of whole rows, of which ranks may have columns."""
    adapter, model = all_kinds(tmp_path, {"use_dora": True})
    with LLM(**{**OPTIONS, "model": str(model), "enable_lora": False}) as llm:
        expected = answers(llm, QUESTIONS[:2])
    with LLM(**OPTIONS, tensor_parallel_size=2, max_num_seqs=4) as llm:
        assert answers(llm, QUESTIONS[:2], LoRARequest("all", 1, str(adapter))) == expected


def test_slots() -> None:
    slots = Slots(2)
    assert slots.take("") == (0, False) and slots.has_room("a")
    assert slots.take("a") == (1, True) and slots.take("a") == (1, False) and slots.take("b") == (2, True)
    assert not slots.has_room("c") and slots.has_room("b") and slots.has_room("")
    slots.give("b")
    assert slots.take("c") == (2, True) and not slots.has_room("b")
    slots.give("a")
    assert not slots.has_room("b")
    slots.give("a")
    slots.forget("a")
    assert slots.take("b") == (1, True)


def _tied(name: str, weights: dict[str, torch.Tensor]) -> str:
    return name if name in weights else "model.embed_tokens.weight"


def all_kinds(folder: Path, config: dict[str, Any]) -> tuple[Path, Path]:
    """An adapter on every matrix of canary: DoRA on the projections, products on the embedding and the head or, if `saved`,
    these two whole; and the model that has it merged, its head apart from its embedding."""
    rank, scale, draw = 5, 2.0, torch.Generator().manual_seed(len(config))
    base = {name: tensor.float() for name, tensor in load_file(model_folder() / "model.safetensors").items()}
    base["lm_head.weight"] = base[_tied("lm_head.weight", base)].clone()
    low, merged, saved = {}, dict(base), config.get("modules_to_save", [])

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw) * 0.05

    for name, tensor in base.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        if tensor.dim() != 2:
            continue
        rows, columns = tensor.shape
        if any(module.endswith(one) for one in saved):
            low[f"{module}.weight"] = merged[name] = tensor + random(rows, columns)
        elif "embed_tokens" in name:
            a, b = random(rank, rows), random(columns, rank) * 4
            low[f"{module}.lora_embedding_A"], low[f"{module}.lora_embedding_B"] = a, b
            merged[name] = tensor + scale * (b @ a).t()
        else:
            a, b = random(rank, columns), random(rows, rank)
            low[f"{module}.lora_A.weight"], low[f"{module}.lora_B.weight"] = a, b
            merged[name] = tensor + scale * b @ a
            if config.get("use_dora") and "lm_head" not in name:
                magnitude = merged[name].norm(dim=1) * (1 + random(rows))
                low[f"{module}.lora_magnitude_vector"] = magnitude
                merged[name] = magnitude[:, None] * merged[name] / merged[name].norm(dim=1, keepdim=True)
    if config.get("use_dora"):  # no magnitudes at the two ends
        low = {name: one for name, one in low.items() if "lm_head" not in name and "embed" not in name}
        merged |= {name: base[name] for name in ("lm_head.weight", "model.embed_tokens.weight")}
    adapter, model = folder / "adapter", folder / "model"
    adapter.mkdir(parents=True)
    save_file({name: one.contiguous() for name, one in low.items()}, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank * scale,
                                                             "bias": "none", **config}))
    shutil.copytree(model_folder(), model)
    save_file({name: one.contiguous() for name, one in merged.items()}, model / "model.safetensors")
    told = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**told, "tie_word_embeddings": False}))
    return adapter, model


@pytest.mark.parametrize("config", [{}, {"use_dora": True}, {"modules_to_save": ["lm_head", "embed_tokens"]}], ids=str)
def test_every_matrix_can_be_adapted(tmp_path: Path, config: dict[str, Any]) -> None:
    """Mixed with the base and another adapter; whole prompts' scores included, which need every layer's every token."""
    adapter, model = all_kinds(tmp_path, config)
    params = SamplingParams(temperature=0, max_tokens=24, logprobs=0, prompt_logprobs=0)
    mine, other = LoRARequest("all", 1, str(adapter)), LoRARequest("pirate", 2, str(PIRATE))
    with LLM(**{**OPTIONS, "model": str(model), "enable_lora": False}) as llm:
        expected = llm.chat(QUESTIONS[4], params, use_tqdm=False)[0]
    with LLM(**OPTIONS) as llm:
        found = llm.chat([QUESTIONS[4]] * 4, params, use_tqdm=False, lora_request=[None, mine, other, mine])
    for one in (found[1], found[3]):
        assert one.outputs[0].token_ids == expected.outputs[0].token_ids
        for mine, theirs in zip(one.prompt_logprobs[1:], expected.prompt_logprobs[1:], strict=True):
            assert {k: v.logprob for k, v in mine.items()} == pytest.approx({k: v.logprob for k, v in theirs.items()}, abs=1e-3)
    assert found[0].outputs[0].token_ids != found[1].outputs[0].token_ids
