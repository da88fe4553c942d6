"""Takes docs/images/page.png: the page of `magicdec serve` with the demo's pair, after two answers.

    python -m benchmarks.pages.page_screenshot          from the repository; Chromium and its driver must be installed
    python -m benchmarks.pages.page_screenshot --dark --output dark.png

The demo's model is downloaded and built by the first run. Take it on an idle machine: the picture shows speeds.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from selenium.webdriver.common.action_chains import ActionChains

from benchmarks.pages.frame import DOCS, ROOT, options_of
from magicdec.bench.demo_pair import prepare_engine
from tests.runtime.openai.page.browser import Page, browser

PROMPT = "Explain in a few sentences why the sky is blue."
SAMPLING = {"max_tokens": 200, "temperature": 0.8, "seed": 6}
DRAFT_LENGTHS = (0, 6)


def main() -> None:
    options = options_of(__doc__)
    options.add_argument("--output", type=Path, default=DOCS / "images" / "page.png")
    options.add_argument("--dark", action="store_true", help="as on a dark system")
    args = options.parse_args()
    engine = prepare_engine(ROOT / ".cache", "bfloat16", 1024, quantize_draft="int4")
    with server(engine) as address, browser(1280, 960, scale=1.5) as page:
        scheme = "dark" if args.dark else "light"
        page.emulate("setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        page.open(address)
        page.wait_status("Ready")
        answer(page)
        page.driver.save_screenshot(str(args.output))
    print(f"{args.output} is written")  # noqa: T201  a script


def answer(page: Page) -> None:
    """Plain and with drafts, after a run that warms up; then point at a round with a refused draft token."""
    page.generate(prompt=PROMPT, max_tokens=8)
    page.driver.refresh()
    page.wait_status("Ready")
    for draft in DRAFT_LENGTHS:
        page.generate(prompt=PROMPT, draft=draft, **SAMPLING)
    span = page.driver.find_elements("css selector", "#answer .recovered")[-1]
    ActionChains(page.driver).move_to_element(span).perform()
    page.wait(page.lit, "no round is shown")


@contextmanager
def server(engine: Path) -> Iterator[str]:
    """`magicdec serve`; yields its address."""
    command = [
        sys.executable,
        "-m",
        "magicdec",
        "serve",
        "--engine",
        str(engine),
        "--port",
        "0",
        "--max-batch-size",
        "1",
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            for line in process.stderr:
                found = re.match(r"Serving .* at (http://\S+)", line)
                if found:
                    yield found[1]
                    return
            raise SystemExit(f"the server did not start: {' '.join(command)}")
        finally:
            process.terminate()


if __name__ == "__main__":
    main()
