"""The page in a real browser against the real server: what it shows of an answer is what the engine did."""

import threading
from collections import Counter
from typing import Any

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

from magicdec.runtime.llm import LLM
from magicdec.runtime.sampling_params import SamplingParams
from tests.runtime.openai.page.browser import Page
from tests.runtime.openai.serving import held, serving

PROMPT = "the theory of the thing"
SAMPLING: dict[str, Any] = {"max_tokens": 90, "temperature": 0.9, "seed": 5}
ORIGINS = ("accepted", "recovered", "bonus", "plain")


def _rounds(origins: list[str]) -> list[int]:
    """The number of each token's round, from 0."""
    return [sum(origin != "accepted" for origin in origins[:index]) for index in range(len(origins))]


@pytest.mark.parametrize("mode", ["completion", "chat"])
def test_an_answer_is_shown_as_the_engine_made_it(page: Page, llm: LLM, mode: str) -> None:
    """Text, the origin and the text of each token, the counts."""
    page.generate(mode=mode, prompt=PROMPT, **SAMPLING)
    prompt = llm.chat_prompt([{"role": "user", "content": PROMPT}]) if mode == "chat" else PROMPT
    (output,) = llm.generate(prompt, SamplingParams(**SAMPLING))
    completion, metrics = output.outputs[0], output.metrics
    assert set(completion.token_origins) == set(ORIGINS), "the case shows less than it should"
    assert page.text("answer") == completion.text
    assert page.text("status") == "Stopped at max tokens"
    assert [origin for origin, _ in page.tokens()] == completion.token_origins
    assert [len(text) for _, text in page.tokens()] == completion.token_lengths
    shown = {
        origin: page.js(f"return document.querySelector('[data-count={origin}]').textContent") for origin in ORIGINS
    }
    assert shown == {origin: str(count) for origin, count in Counter(completion.token_origins).items()}
    rate = round(100 * metrics.acceptance_rate)
    assert page.text("accepted") == f"{metrics.num_accepted_tokens} of {metrics.num_draft_tokens}, {rate} %"


def test_origins_differ_in_colour_and_line(page: Page) -> None:
    """Each from all others, in the answer as in the legend; without colours there is neither."""
    page.generate(prompt=PROMPT, **SAMPLING)
    script = """
        const styles = [...arguments].map((selector) => getComputedStyle(document.querySelector(selector)));
        return styles.map((s) => [s.display, s.backgroundColor, s.borderBottomColor, s.borderBottomStyle]);
    """

    def looks(place: str) -> list[list[str]]:
        return page.rows(script, *(f"{place}.{origin}" for origin in ORIGINS))

    answer, legend = looks("#answer span"), looks("#legend i")
    assert [row[1:] for row in answer] == [row[1:] for row in legend]
    assert {row[0] for row in answer} == {"inline"}
    for column in (1, 2, 3):
        assert len({row[column] for row in answer}) == len(ORIGINS)
    page.element("colours").click()
    page.wait(lambda: len({tuple(row) for row in looks("#answer span")}) == 1, "the colours do not go")


def test_figures_and_bars_follow_from_the_rounds(page: Page) -> None:
    """A bar a round, a cell a token; the mean over all rounds, and over those with drafts."""
    page.generate(prompt=PROMPT, **SAMPLING)
    origins = [origin for origin, _ in page.tokens()]
    num_rounds, num_plain = len(set(_rounds(origins))), origins.count("plain")
    mean = f"{len(origins) / num_rounds:.2f}"
    drafted = f"{(len(origins) - num_plain) / (num_rounds - num_plain):.2f}"
    assert page.text("length") == mean
    assert page.text("mean") == f"mean {mean}; with drafts {drafted}"
    label = page.element("rounds").get_attribute("aria-label")
    assert label == f"Tokens of each round: mean {mean} over {num_rounds} rounds"
    cells = {name: d.count("M") for name, d in page.paths("#rounds path") if name in ORIGINS}  # each begins with a move
    assert cells == Counter(origins)
    assert float(page.text("speed")) > 0
    assert page.text("first").endswith(" ms")


def test_it_grows_with_every_step_and_stops_at_once(chrome: Page, llm: LLM) -> None:
    """By Esc and by the button; the engine is then free, what came stays, and the page goes on."""
    with serving(llm) as server, held(llm) as gate:
        chrome.open(server.url)
        chrome.wait_status("Ready")
        chrome.fill(mode="completion", prompt=PROMPT, max_tokens=800, temperature=0.9, seed=5)
        for number, stop in enumerate([chrome.press_escape, chrome.element("stop").click], 1):
            chrome.element("generate").click()
            chrome.wait_status("Reading the prompt")
            for _ in range(6):
                _see_it_grow(chrome, gate)
            assert chrome.text("status") == "Generating"
            assert not chrome.element("generate").is_enabled()
            assert server.llm.num_open_requests == 1
            stop()
            chrome.wait_status("Stopped")
            before = chrome.tokens()
            assert 0 < len(before) < 800
            gate.release()  # of the step that was going on
            chrome.wait(lambda: server.llm.num_open_requests == 0, "the engine goes on")
            assert chrome.tokens() == before
            assert not chrome.element("error").is_displayed()
            assert len(chrome.rows("return [...document.querySelectorAll('#runs tbody tr')]")) == number
    assert chrome.complaints() == []


def _see_it_grow(chrome: Page, gate: threading.Semaphore) -> None:
    """By a step, or the few that a character of several bytes may take."""
    count = len(chrome.tokens())

    def grown() -> bool:
        gate.release()
        return len(chrome.tokens()) > count

    chrome.wait(grown, "nothing grows")


def test_speed_is_plotted(page: Page) -> None:
    """A line for this run, and the one before it."""
    for lines in (["now"], ["before", "now"]):
        page.generate(mode="completion", prompt=PROMPT, max_tokens=400, temperature=0.9, seed=5, draft=0)
        drawn = page.paths("#rate path:not(.grid)")
        assert [name for name, _ in drawn] == lines
        assert all(d.count("L") > 2 for _, d in drawn)
    assert str(page.element("rate").get_attribute("aria-label")).endswith(" now")


def test_runs_are_listed_and_compared(page: Page) -> None:
    """With a seed the draft length changes no answer, and the page says so; another seed is another answer."""
    page.generate(prompt=PROMPT, **{**SAMPLING, "seed": 3}, draft=0)
    assert {origin for origin, _ in page.tokens()} == {"plain"}
    assert page.text("accepted") == "0 of 0"
    text = page.text("answer")
    page.generate(draft=3)
    assert page.text("answer") == text
    page.generate(draft="", seed=4)
    script = (
        "return [...document.querySelectorAll('#runs tbody tr')].map((r) => [...r.cells].map((c) => c.textContent))"
    )
    rows = page.rows(script)
    assert [(row[0], row[1], row[2], row[-1]) for row in rows] == [
        ("1", "0", "90", ""),
        ("2", "3", "90", "same as #1"),
        ("3", "server's own (4)", "90", ""),
    ]


def test_a_round_is_shown_from_the_answer_the_plot_and_the_keyboard(page: Page) -> None:
    """All its tokens light up, its bar too, and words say what it did."""
    page.generate(prompt=PROMPT, **SAMPLING)
    origins = [origin for origin, _ in page.tokens()]
    rounds = _rounds(origins)
    chosen = next(i for i in range(1, 90) if (origins[i - 1], origins[i]) == ("accepted", "recovered"))
    spans = page.driver.find_elements("css selector", "#answer span")
    ActionChains(page.driver).move_to_element(spans[chosen]).perform()
    members = [i for i, number in enumerate(rounds) if number == rounds[chosen]]
    assert page.lit() == members
    assert page.text("round") == (
        f"Round {rounds[chosen] + 1}: {len(members)} tokens, {len(members) - 1} accepted and 1 recovered, "
        "in place of a refused draft"
    )
    assert page.marked_bar() == rounds[chosen]
    ActionChains(page.driver).move_to_element(page.element("prompt")).perform()
    assert (page.lit(), page.marked_bar()) == ([], None)
    page.element("answer").send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert page.lit() == [i for i, number in enumerate(rounds) if number == 1]
    page.element("answer").send_keys(Keys.ARROW_LEFT, Keys.ARROW_LEFT)
    assert page.text("round") == "Round 1: 1 token, without drafts"
    middle = ActionChains(page.driver).move_to_element(page.element("rounds"))
    middle.perform()
    bar = page.marked_bar()
    assert bar is not None
    assert page.lit() == [i for i, number in enumerate(rounds) if number == bar]


def test_characters_are_counted_as_the_server_counts_them(page: Page) -> None:
    """By code points; held-back text goes to its token when it comes, and what a stop string cut is not missed."""
    script = """
        const element = document.createElement("div");
        const answer = new Answer(element);
        for (const chunk of arguments[0]) answer.add(...chunk);
        answer.finish();
        return [...element.childNodes].map((node) => [node.className ?? null, node.textContent]);
    """
    chunks = [
        ["a👩‍🚀", ["plain", "accepted"], [1, 3]],
        ["", ["recovered"], [4]],
        ["<en", ["plain"], [5]],
        ["x", [], []],
    ]
    assert page.rows(script, chunks) == [["plain", "a"], ["accepted", "👩‍🚀"], ["recovered", "<enx"], ["plain", ""]]
    assert page.rows(script, [["no details", [], []]]) == [[None, "no details"]]
