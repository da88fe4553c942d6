"""Chromium without a window, as Debian has it, driven through its own chromedriver."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import Select, WebDriverWait

WAIT = 20.0  # seconds, for anything that should appear


class NoBrowserError(Exception):
    """This machine has none; the text says how to get it."""


class Page:
    """The page as its user sees it, found by the ids of its elements."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(self, address: str) -> None:
        """Anew, with nothing remembered of an earlier visit."""
        self.driver.get(address)
        self.js("sessionStorage.clear(); localStorage.clear()")
        self.complaints()
        self.driver.get(address)

    def element(self, name: str) -> WebElement:
        """By its id."""
        return self.driver.find_element("id", name)

    def text(self, name: str) -> str:
        """As the document holds it, spaces and all."""
        return str(self.js(f"return document.getElementById('{name}').textContent"))

    def js(self, script: str, *values: object) -> object:
        """The value of a script."""
        return self.driver.execute_script(script, *values)

    def rows(self, script: str, *values: object) -> list[Any]:
        """The value of a script that returns an array."""
        value = self.js(script, *values)
        assert isinstance(value, list)
        return value

    def emulate(self, command: str, **settings: object) -> None:
        """Another screen or system."""
        self.driver.execute_cdp_cmd(f"Emulation.{command}", settings)

    def press_escape(self) -> None:
        """Wherever the focus is."""
        ActionChains(self.driver).send_keys(Keys.ESCAPE).perform()

    def fill(self, **fields: object) -> None:
        """By id, `max_tokens` being max-tokens; `draft` and `mode` are chosen by value, others typed in."""
        for name, value in fields.items():
            if name == "mode":
                self.driver.find_element("css selector", f"[value={value}] + span").click()
            elif name == "draft":
                Select(self.element(name)).select_by_value(str(value))
            else:
                field = self.element(name.replace("_", "-"))
                field.clear()
                field.send_keys(str(value))

    def wait(self, condition: Callable[[], object], what: str) -> None:
        """Until it is true; fails with `what` and the page's own words."""
        told = f"{what}; status {self.text('status')!r}, error {self.text('error')!r}"
        WebDriverWait(self.driver, WAIT, poll_frequency=0.02).until(lambda _: condition(), told)

    def wait_status(self, *texts: str) -> None:
        """Until the status is one of these."""
        self.wait(lambda: self.text("status") in texts, f"never {texts}")

    def generate(self, **fields: object) -> None:
        """Fill in and wait for the whole answer."""
        self.fill(**fields)
        self.element("generate").click()
        self.wait(lambda: self.element("generate").is_enabled() and not self.element("stop").is_enabled(), "no end")

    def tokens(self) -> list[tuple[str, str]]:
        """(origin, text) of each token of the answer."""
        spans = "[...document.querySelectorAll('#answer span[data-round]')]"
        return [(row[0], row[1]) for row in self.rows(f"return {spans}.map((s) => [s.classList[0], s.textContent])")]

    def paths(self, selector: str) -> list[tuple[str, str]]:
        """(class, outline) of lines and bars."""
        script = (
            f"return [...document.querySelectorAll('{selector}')].map((p) => [p.classList[0], p.getAttribute('d')])"
        )
        return [(name, outline) for name, outline in self.rows(script)]

    def lit(self) -> list[int]:
        """The numbers of the tokens of the round that is shown."""
        spans = "[...document.querySelectorAll('#answer span')]"
        return self.rows(f"return {spans}.flatMap((s, i) => s.classList.contains('lit') ? [i] : [])")

    def marked_bar(self) -> int | None:
        """The number of the bar that is marked in the plot of the rounds."""
        mark = "document.querySelector('#rounds .mark')"
        place = "roundsPlot.first + Math.round((m.getAttribute('x') - LEFT) / roundsPlot.pitch)"
        number = self.js(f"const m = {mark}; return m.getAttribute('visibility') === 'visible' ? {place} : null")
        return None if number is None else int(str(number))

    def complaints(self) -> list[str]:
        """What the browser wrote to its console since the last call, refused requests and the policy's verdicts too."""
        entries = self.driver.get_log("browser")  # type: ignore[no-untyped-call]
        return [entry["message"] for entry in entries]


@contextmanager
def browser(width: int = 1280, height: int = 1000, scale: float = 1) -> Iterator[Page]:
    """A new browser with a profile of its own. scale: pixels of the screen for one of the page.

    Raises:
        NoBrowserError: Chromium or its driver is not installed.
    """
    binary = shutil.which("chromium") or shutil.which("google-chrome")
    driver_path = shutil.which("chromedriver")
    if binary is None or driver_path is None:
        raise NoBrowserError("no chromium or no chromedriver; on Debian: apt install chromium chromium-driver")
    options = Options()
    options.binary_location = binary
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(argument)
    options.add_argument(f"--window-size={width},{height}")
    options.add_argument(f"--force-device-scale-factor={scale}")
    options.set_capability("goog:loggingPrefs", {"browser": "WARNING"})
    driver = webdriver.Chrome(options=options, service=Service(driver_path))
    try:
        driver.set_page_load_timeout(WAIT)
        driver.set_script_timeout(WAIT)
        yield Page(driver)
    finally:
        driver.quit()
