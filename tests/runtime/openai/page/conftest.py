"""A browser, and the page of a server with a tiny pair."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from magicdec.runtime.llm import LLM
from tests.runtime.openai.page.browser import NoBrowserError, Page, browser
from tests.runtime.openai.serving import serving
from tests.support.engines import tiny_pair


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft model that is often right, and a vocabulary that covers every byte."""
    return tiny_pair(tmp_path_factory.mktemp("page"), "in_cache", vocab_size=276)


@pytest.fixture(scope="session")
def llm(engine: Path) -> Iterator[LLM]:
    """Four draft tokens a round; for tests that leave it whole."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield LLM(engine, num_draft_tokens=4)
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def chrome() -> Iterator[Page]:
    """One browser for all tests."""
    try:
        with browser() as page:
            yield page
    except NoBrowserError as error:
        pytest.skip(str(error))


@pytest.fixture
def page(chrome: Page, llm: LLM) -> Iterator[Page]:
    """The page, ready; at the end the browser must have had nothing to complain about."""
    with serving(llm) as server:
        chrome.open(server.url)
        chrome.wait_status("Ready")
        yield chrome
        assert chrome.complaints() == []
