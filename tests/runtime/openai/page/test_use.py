"""The page in a real browser: errors, keys, keyboard, looks, and that what a model writes stays text."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

from magicdec.runtime.llm import LLM
from magicdec.runtime.openai.page import built_page
from tests.runtime.openai.page.browser import Page
from tests.runtime.openai.serving import held, serving
from tests.support.paths import ROOT

PROMPT = "the theory of the thing"


def test_the_keyboard_alone_will_do(page: Page) -> None:
    """The prompt has the focus at first, Ctrl+Enter asks, and Tab goes through every control."""
    page.fill(max_tokens=5)
    page.element("prompt").send_keys(Keys.CONTROL, Keys.ENTER)
    page.wait_status("Done", "Stopped at max tokens")
    reached = set()
    for _ in range(14):
        ActionChains(page.driver).send_keys(Keys.TAB).perform()
        reached.add(page.js("return document.activeElement.id"))
    assert reached >= {"draft", "max-tokens", "temperature", "seed", "generate", "answer", "colours", "theme", "prompt"}


def test_errors_are_told_in_words_and_leave_the_page_usable(page: Page) -> None:
    """What the server refuses, in its own words."""
    page.js("document.getElementById('prompt').value = 'thing '.repeat(900)")
    page.generate(max_tokens=5)
    assert page.text("status") == "Failed"
    assert re.search(r"has \d+ tokens, .* at most 1023; shorten it", page.element("error").text)
    assert ["400" in complaint for complaint in page.complaints()] == [True]  # the browser's own note of it
    page.generate(prompt=PROMPT)
    assert not page.element("error").is_displayed()
    assert page.tokens()


def test_an_engine_that_dies_and_a_server_that_is_gone_are_told(chrome: Page, engine: Path) -> None:
    """In the middle of an answer, which stays; and before one."""
    llm = LLM(engine, num_draft_tokens=4)
    step, steps = llm.engine.step, 0

    def breaks() -> object:
        nonlocal steps
        steps += 1
        if steps == 20:
            raise RuntimeError("the card fell off the bus")
        return step()

    llm.engine.step = breaks  # type: ignore[method-assign,assignment]
    with serving(llm) as server:
        chrome.open(server.url)
        chrome.wait_status("Ready")
        chrome.generate(prompt=PROMPT, max_tokens=800, seed=5, temperature=0.9)
        assert chrome.text("status") == "Failed"
        assert "the card fell off the bus" in chrome.element("error").text
        assert chrome.tokens()
    chrome.generate()
    assert chrome.element("error").text == "The server cannot be reached. Is it still running?"
    chrome.complaints()


def test_a_connection_that_is_lost_is_told(page: Page, llm: LLM) -> None:
    """An answer that ends without its last event is no whole answer."""
    page.js("""
        const real = window.fetch;
        window.fetch = async (...request) => {
            const reader = (await real(...request)).body.getReader();
            const pull = async (sink) => { sink.enqueue((await reader.read()).value); sink.close(); reader.cancel(); };
            return new Response(new ReadableStream({ pull }));
        };
    """)
    with held(llm) as gate:
        gate.release(5)  # the server itself is far from the end
        page.generate(prompt=PROMPT, max_tokens=800, seed=5, temperature=0.9)
    assert page.text("status") == "Failed"
    assert page.element("error").text == "The answer broke off: the server closed the connection."


def test_an_api_key_is_asked_for_and_kept_in_the_tab(chrome: Page, llm: LLM) -> None:
    """A wrong one is told; the right one is sent with every request, also after a reload."""
    with serving(llm, api_keys=["right"]) as locked:
        chrome.open(locked.url)
        chrome.wait_status("Needs an API key")
        assert chrome.js("return document.activeElement.id") == "key"
        assert "missing or wrong" in chrome.element("error").text
        assert chrome.complaints()  # the browser's own note of a refusal
        chrome.fill(key="wrong" + Keys.ENTER)
        chrome.wait(chrome.complaints, "a wrong key is not refused")
        assert chrome.text("status") == "Needs an API key"
        chrome.fill(key="right" + Keys.ENTER)
        chrome.wait_status("Ready")
        assert not chrome.element("error").is_displayed()
        assert not chrome.tokens()
        chrome.generate(max_tokens=5)
        assert chrome.tokens()
        chrome.driver.refresh()
        chrome.wait_status("Ready")
        assert chrome.js("return localStorage.length") == 0
        assert chrome.complaints() == []


def test_model_text_is_text(chrome: Page, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that writes HTML gets it shown, not built; the page's policy would stop a script besides."""
    attack = "<img src=x onerror='window.hacked = 1'><script>window.hacked = 1</script>&lt;"
    monkeypatch.setattr(llm.engine.tokenizer, "decode_stream", lambda: lambda _: attack)
    with serving(llm) as hostile:
        chrome.open(hostile.url)
        chrome.wait_status("Ready")
        chrome.generate(prompt=attack, max_tokens=3)
        assert chrome.text("answer") == attack * 3
        assert chrome.js("return document.querySelectorAll('#answer img, #answer script').length") == 0
        assert chrome.complaints() == []
        chrome.js("document.body.append(Object.assign(document.createElement('script'), {text: 'window.hacked = 1'}))")
        assert chrome.js("return window.hacked === undefined")
        assert "Content Security Policy" in "".join(chrome.complaints())


def test_light_and_dark(page: Page) -> None:
    """As the system is, unless the reader chose."""
    ground = "return getComputedStyle(document.body).backgroundColor"
    grounds = []
    for scheme in ("light", "dark"):
        page.emulate("setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        grounds.append(page.js(ground))
    assert grounds[0] != grounds[1]
    for scheme, expected in zip(("light", "dark"), grounds, strict=True):
        page.element("theme").click()
        assert (page.text("theme"), page.js(ground)) == (f"Theme: {scheme}", expected)
    page.driver.refresh()
    assert page.text("theme") == "Theme: dark"
    page.emulate("setEmulatedMedia", features=[])


@pytest.mark.parametrize("width", [400, 700, 1280])
def test_nothing_is_wider_than_the_window(page: Page, width: int) -> None:
    """Also on a telephone, with an answer and a table of runs."""
    page.emulate("setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
    try:
        page.generate(prompt=PROMPT, max_tokens=60)
        assert page.js("return document.documentElement.scrollWidth <= window.innerWidth")
    finally:
        page.emulate("clearDeviceMetricsOverride")


def test_a_long_answer_scrolls_along_unless_its_reader_scrolled_up(chrome: Page, llm: LLM) -> None:
    """The newest text stays in sight; a reader is not torn away from the older."""
    with serving(llm) as server, held(llm) as gate:
        chrome.open(server.url)
        chrome.wait_status("Ready")
        chrome.fill(mode="completion", prompt=PROMPT, max_tokens=900, temperature=0.9, seed=5)
        chrome.element("generate").click()
        below = "const a = document.getElementById('answer'); return a.scrollHeight - a.clientHeight - a.scrollTop"
        tall = "const a = document.getElementById('answer'); return a.scrollHeight > a.clientHeight + 100"
        chrome.js("document.getElementById('answer').style.fontSize = '4rem'")  # soon tall
        gate.release(100)
        chrome.wait(lambda: chrome.js(tall), "the answer is not long")
        chrome.wait(lambda: float(str(chrome.js(below))) < 30, "the newest text is out of sight")
        chrome.js("document.getElementById('answer').scrollTop = 0")
        count = len(chrome.tokens())
        gate.release(20)
        chrome.wait(lambda: len(chrome.tokens()) > count, "nothing grows")
        assert chrome.js("return document.getElementById('answer').scrollTop") == 0
        chrome.press_escape()
        chrome.wait_status("Stopped")
    assert chrome.complaints() == []


def test_the_page_loads_nothing_else_and_builds_no_html(page: Page) -> None:
    """One document; no address in it but the name of SVG."""
    page.generate(max_tokens=3)
    loaded = page.rows("return performance.getEntriesByType('resource').map((entry) => new URL(entry.name).pathname)")
    assert set(loaded) == {"/v1/models", "/v1/chat/completions"}
    document, policy = built_page()
    assert set(re.findall(r"https?://[^\s'\"]+", document)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", document)
    assert "unsafe" not in policy
    assert document.count("<script") == document.count("</script") == 1


def test_the_package_carries_the_page(tmp_path: Path) -> None:
    """What setuptools puts into a wheel."""
    command = [sys.executable, "-W", "ignore", "setup.py", "-q", "build_py", "--build-lib", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=60)
    packed = {path.name for path in (tmp_path / "magicdec/runtime/openai/web").iterdir()}
    assert packed == {path.name for path in (ROOT / "runtime/openai/web").iterdir()} >= {"page.html", "style.css"}
