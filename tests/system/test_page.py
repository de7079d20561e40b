"""The page at `/`: its files and their policy, the engine room's events, and, where there is a Chromium, what a person sees."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.server.page import KINDS, POLICY
from tests.system.served import ROOT, Served, served

FOLDER = ROOT / "src/penstock/server/page"
CHROMIUM = os.environ.get("PENSTOCK_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which(
    "google-chrome")
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served("canary", "--kv-cache-memory-bytes", "20M", "--max-num-seqs", "8") as one:
        yield one


def test_the_page_is_served_with_a_strict_policy(server: Served) -> None:
    names = [file.name for file in FOLDER.iterdir() if file.suffix in KINDS]
    assert len(names) >= 8
    for name in names:
        path = "/" if name == "index.html" else f"/page/{name}"
        answer = server.http.get(path)
        assert answer.status_code == 200 and answer.headers["content-security-policy"] == POLICY
        assert answer.headers["content-type"] == KINDS[Path(name).suffix]
        again = server.http.get(path, headers={"If-None-Match": answer.headers["etag"]})
        assert again.status_code == 304 and not again.content
    assert "unsafe" not in POLICY
    assert server.http.get("/page/__init__.py").status_code == 404
    assert server.http.get("/page/..%2froom.py").status_code == 404


def test_the_page_names_nothing_outside_of_the_server() -> None:
    for file in FOLDER.iterdir():
        if file.suffix in KINDS:
            text = file.read_text().replace("http://www.w3.org/2000/svg", "")
            assert not re.search(r"""(src|href|from|import|url)\W{1,3}(https?:)?//""", text), file
            assert not re.search(r"\bon\w+=|style=|innerHTML|eval\(", text), file


def test_the_page_is_small() -> None:
    lines = sum(len(file.read_text().splitlines()) for file in FOLDER.iterdir() if file.suffix in KINDS)
    assert lines <= 1200, lines


def test_a_wheel_has_the_page(tmp_path: Path) -> None:
    code = "import setuptools, sys; sys.argv[1:1] = ['-q', 'build_py', '--build-lib']; setuptools.setup()"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, check=True, capture_output=True, timeout=120)
    built = {file.name for file in (tmp_path / "penstock/server/page").iterdir()}
    assert {file.name for file in FOLDER.iterdir() if file.suffix in KINDS} <= built


def test_the_engine_room_shows_what_runs(server: Served) -> None:
    with httpx.Client(base_url=server.url, timeout=30) as watcher, watcher.stream("GET", "/engine/events") as events:
        lines = (json.loads(line[6:]) for line in events.iter_lines() if line.startswith("data: "))
        facts, first = next(lines), next(lines)
        assert facts["info"]["weight_bytes"] and facts["info"]["kernels"] and facts["names"] == ["stories"]
        with server.http.stream("POST", "/v1/completions", json={"prompt": "Repeat: dog cat", "max_tokens": 2000, "n": 2,
                                                                 "ignore_eos": True, "stream": True}):
            looks = [next(lines) for _ in range(3)]
        look = next(one for one in looks if one["sequences"])
        assert {one["running"] for one in look["sequences"]} == {True} and len(look["sequences"]) == 2
        assert look["sequences"][0]["prompt"] and look["sequences"][0]["pages"]
        assert any(one["steps"] for one in looks)
        identity, end, seconds, segments = next(one for one in looks if one["steps"])["steps"][-1]
        assert identity >= 0 and end > 0 and seconds > 0 and len(segments[0]) == 3
        assert look["pages"]["slabs"] == facts["info"]["pages_total"] and sum(look["pages"]["groups"]) > 0
        assert look["stats"]["tiers"][0]["name"] == "device" and look["stats"]["tiers"][0]["used_bytes"]
        assert look["stats"]["generation_tokens"] > first["stats"]["generation_tokens"]
    with server.http.stream("POST", "/v1/completions", json={"prompt": "Repeat: dog", "max_tokens": 2000, "n": 16,
                                                             "ignore_eos": True, "stream": True, "service_tier": "flex"}):
        until = time.monotonic() + 10
        while not (queue := httpx.get(server.url + "/engine").json()["queue"]):
            assert time.monotonic() < until
            time.sleep(0.1)
        assert [len(named) for named, _ in queue] == [2] and isinstance(queue[0][0][0], str) and queue[0][1] <= 8
    server.post("/v1/completions", prompt="Repeat: sun " * 20, max_tokens=4)
    time.sleep(0.3)  # a look is kept for a quarter of a second
    found = server.http.get("/engine").json()
    assert found["tree"] and found["tree"][0]["tokens"] and found["ended"][-1]["output"] <= 4
    assert found["ended"][-1]["arrival"] <= found["ended"][-1]["first"] <= found["ended"][-1]["finished"]
    assert "Repeat" not in json.dumps(found)


def test_the_engine_room_is_the_admins_where_there_are_several_keys() -> None:
    with served("canary", "--api-key", "one", "--admin-api-key", "boss") as one:
        assert one.http.get("/").status_code == 200 and one.http.get("/page/app.js").status_code == 200
        for path in ("/engine", "/engine/events"):
            assert one.http.get(path).status_code == 401
            assert one.http.get(path, headers={"Authorization": "Bearer one"}).status_code == 403
        assert one.http.get("/engine", headers={"Authorization": "Bearer boss"}).status_code == 200
        if CHROMIUM:
            _asks_for_a_key(one.url)


# -- in a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("there is no Chromium: apt-get install chromium, or set PENSTOCK_CHROMIUM")
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


def _until(page: Any, expression: str) -> None:
    """Waits until an expression is true. (Playwright's own wait_for_function uses eval, which the page's policy forbids.)"""
    until = time.monotonic() + 20
    while not page.evaluate(f"() => Boolean({expression})"):
        assert time.monotonic() < until, f"{expression}: {page.inner_text('body')}"
        time.sleep(0.05)


def _asks_for_a_key(url: str) -> None:
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        page = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"]).new_page()
        page.goto(url)
        page.fill("#secret", "wrong")
        page.press("#secret", "Enter")
        _until(page, "document.getElementById('secret').value === ''")
        page.fill("#secret", "boss")
        page.click("text=Use it")
        _until(page, "document.querySelector('.welcome h1').textContent === 'stories'")
        assert page.evaluate("localStorage.getItem('key')") is None


@pytest.fixture
def page(browser: Any, server: Served) -> Iterator[Any]:
    """The page in a fresh profile. Its console must stay empty: a breach of the policy is told there."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    one, said = context.new_page(), list[str]()
    one.on("console", lambda message: said.append(message.text))
    one.on("pageerror", lambda error: said.append(str(error)))
    one.goto(server.url)
    _until(one, "document.querySelector('.welcome h1').textContent === 'stories'")
    yield one
    assert not [line for line in said if "status of 4" not in line], said
    context.close()


def _ask(page: Any, text: str) -> str:
    before = page.locator("article.assistant").count()
    page.fill("#input", text)
    page.press("#input", "Enter")
    _until(page, f"document.querySelectorAll('article.assistant[aria-busy=false]').length > {before}")
    return str(page.locator("article.assistant .body").last.inner_text())


def _tune(page: Any, **settings: str) -> None:
    if page.locator("#settings").is_hidden():
        page.keyboard.press("Alt+s")
    for name, value in settings.items():
        page.get_by_label(name.replace("_", " ")).first.fill(value)


def _change(page: Any, body: str) -> None:
    """Lets the page's requests have another body, written in JavaScript."""
    page.evaluate("""() => { const send = window.fetch; window.fetch = (path, options) => {
        if (!options?.body) return send(path, options);
        const body = JSON.parse(options.body);
        return send(path, { ...options, body: JSON.stringify(CHANGED) }); }; }""".replace("CHANGED", body))


def test_a_conversation_branches_and_is_kept(page: Any, server: Served) -> None:
    _tune(page, Temperature="0")
    assert _ask(page, "Repeat: red") == "red"
    page.click("article.user >> text=Edit")
    page.fill(".edit", "Repeat: blue")
    page.press(".edit", "Enter")
    _until(page, "document.querySelector('article.assistant .body').textContent.trim() === 'blue'")
    assert page.locator("article.user .tools").inner_text().count("2/2") == 1
    page.click("[title='The branch before']")
    assert page.locator("article.assistant .body").inner_text() == "red"
    page.click("text=Again")
    _until(page, "document.querySelector('article.assistant .tools')?.textContent.includes('2/2')")
    page.wait_for_selector("article.assistant[aria-busy=false]")
    page.reload()
    page.click("#list button >> nth=0")
    page.wait_for_selector("article.assistant")
    assert "2/2" in page.locator("article.assistant .tools").inner_text()
    page.on("dialog", lambda dialog: dialog.accept())
    page.click("#clear")
    _until(page, "!document.querySelector('#list li')")


def test_an_answer_stops_when_told(page: Any, server: Served) -> None:
    _tune(page, **{"Longest_answer_(tokens)": "3000", "Temperature": "2", "Top_k": "1000"})
    page.get_by_label("Stop at").fill("")
    _change(page, "{ ...body, ignore_eos: true }")
    page.fill("#input", "Tell me more")
    page.click("#send")
    _until(page, "(document.querySelector('article.assistant .body')?.textContent.length || 0) > 20")
    page.keyboard.press("Escape")
    page.wait_for_selector("article.assistant[aria-busy=false]")
    assert "stopped" in page.locator("article.assistant footer").inner_text()
    assert server.settle()["vllm:num_requests_running"] == 0


def test_probabilities_and_a_branch_from_an_alternative(page: Any) -> None:
    _tune(page, Temperature="0", Token_probabilities="3")
    _ask(page, "Repeat: dog cat")
    page.click("text=Probabilities")
    page.hover(".tokens .t >> nth=0")
    assert page.locator("#tip tr").count() == 3 and "%" in page.locator("#tip").inner_text()
    page.locator(".tokens").press("ArrowRight")
    assert page.locator(".t.here").count() == 1
    page.mouse.move(0, 0)
    page.hover(".tokens .t >> nth=0")
    other = page.locator("#tip tr:not(.chosen) code").first.inner_text()
    page.click("#tip tr:not(.chosen) button >> nth=0")
    _until(page, "document.querySelector('article.assistant .tools')?.textContent.includes('2/2')")
    page.wait_for_selector("article.assistant[aria-busy=false]")
    assert page.locator("article.assistant .body").inner_text().startswith(other.strip())


def test_two_settings_side_by_side(page: Any) -> None:
    _tune(page)
    page.check("#compare")
    page.get_by_label("Longest answer").nth(0).fill("1")
    page.get_by_label("Longest answer").nth(1).fill("2")
    page.fill("#input", "Repeat: dog cat sun")
    page.press("#input", "Enter")
    _until(page, "document.querySelectorAll('.pair article[aria-busy=false] footer small').length === 2")
    _until(page, "[...document.querySelectorAll('.pair small')].every(one => one.textContent.includes(' out'))")
    small = page.locator(".pair footer small").all_inner_texts()
    assert "1 out" in small[0] and "2 out" in small[1]
    page.click("text=Go on with this")
    assert page.locator(".pair article").nth(1).get_attribute("class") == "assistant chosen"


def test_schemas_and_tools(page: Any) -> None:
    _tune(page, Answer_by_JSON_schema='{"type": "object", "properties": {"a": {"enum": [7]}}, "required": ["a"], '
                                      '"additionalProperties": false}')
    assert "".join(_ask(page, "Say it").split()).removeprefix("Thought") == '{"a":7}'
    page.get_by_label("Answer by JSON schema").fill("{")
    assert "The schema is not JSON" in _ask(page, "Again")
    page.get_by_label("Answer by JSON schema").fill("")
    parameters = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}
    page.get_by_label("Tools").fill(json.dumps([{"name": "weather", "parameters": parameters}]))
    _change(page, 'body.messages.at(-1).role === "tool" ? body : { ...body, tool_choice: "required" }')
    page.click("#new")
    _ask(page, "How is the weather?")
    assert "weather" in page.locator(".call b").first.inner_text() and '"Rome"' in page.locator(".call pre").first.inner_text()
    while page.locator(".call textarea").count():
        page.locator(".call textarea").first.fill("sunny")
        page.locator("text=Send the result").first.click()
        time.sleep(0.2)
    _until(page, "document.querySelectorAll('article.tool').length && "
                 "document.querySelector('article:last-child.assistant[aria-busy=false]')")


def test_markdown_makes_no_markup_of_an_answers_own(page: Any) -> None:
    text = ("# Title\n\nA **bold** [link](https://a.example) and [bad](javascript:alert(1)) <img src=x onerror=alert(1)>\n\n"
            "- one\n- two\n  1. inner\n\n```python\ndef f(): return 'x'  # why\n```\n\n| a | b |\n|---|---|\n| 1 | `2` |\n\n"
            "> quoted")
    html = page.evaluate("""async text => { const { markdown } = await import("/page/markdown.js");
        const box = document.createElement("div"); box.append(...markdown(text)); return box.innerHTML; }""", text)
    for part in ("<h3>Title</h3>", "<strong>bold</strong>", 'href="https://a.example"', "<ul><li>one</li>",
                 "<ol><li>inner</li></ol>",
                 '<span class="k">def</span>', "<td><code>2</code></td>", "<blockquote>", "&lt;img src=x"):
        assert part in html, (part, html)
    assert "javascript:" not in re.sub(r">[^<]*<", "><", html) and "<img" not in html


def test_the_engine_room_in_a_browser(page: Any, server: Served) -> None:
    page.keyboard.press("Alt+2")
    page.evaluate("""() => { for (let i = 0; i < 12; i++) fetch("v1/completions", { method: "POST",
        headers: { "Content-Type": "application/json" },
        body: JSON.stringify({ prompt: "Repeat: dog ".repeat(9 + i), max_tokens: 900, ignore_eos: true }) }) }""")
    _until(page, "[...document.querySelectorAll('.numbers div')].some(one => /^[1-9][0-9]*running/.test(one.textContent))")
    page.wait_for_selector(".tree div")
    assert page.locator("#room canvas").count() == 4 and "linear" in page.locator("#room table").inner_text()
    colours = page.evaluate("""() => [...document.querySelectorAll("#room canvas")].map(one =>
        new Set(one.getContext("2d").getImageData(0, 0, one.width, one.height).data).size)""")
    assert min(colours) > 3, colours
    assert page.locator("#room").inner_text().count("NaN") == page.locator("#room").inner_text().count("undefined") == 0


def test_dark_and_narrow(browser: Any, server: Served) -> None:
    context = browser.new_context(viewport={"width": 360, "height": 700}, color_scheme="dark")
    page = context.new_page()
    page.goto(server.url)
    page.wait_for_selector(".welcome h1")
    back = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(back) == "rgb(21, 24, 27)"
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth") and page.locator("#history").is_hidden()
    page.click("#menu")
    assert page.locator("#history").is_visible()
    page.click("#theme")
    assert page.evaluate(back) == "rgb(255, 255, 255)"
    page.click("#tab-room")
    page.wait_for_selector(".tree, .numbers b")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    context.close()
