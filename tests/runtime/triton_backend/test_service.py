"""The service behind `tensorrt_llm`, without Triton: failures, ends and clients that leave."""

import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from magicdec.errors import EngineFailedError, NotReadyError, RequestError
from magicdec.runtime.llm import LLM
from magicdec.runtime.outputs import RequestOutput
from magicdec.runtime.serving.async_llm import AsyncLLM
from magicdec.runtime.triton_backend.llm.request import RequestReader
from magicdec.runtime.triton_backend.llm.service import LLMService
from magicdec.runtime.triton_backend.sender import DeadlineError, Tensors
from tests.runtime.triton_backend.client import arrays

PERIOD = 0.02


class FakeSender:
    """Keeps what it is given. Triton crashes where this one asserts."""

    def __init__(self) -> None:
        self.answers: list[Tensors] = []
        self.error: Exception | None = None
        self.cancelled = False
        self.ended = threading.Event()

    def send(self, tensors: Tensors, *, final: bool) -> None:
        self._end(final)
        self.answers.append(tensors)

    def fail(self, error: Exception, *, final: bool) -> None:
        self._end(final)
        self.error = error

    def is_cancelled(self) -> bool:
        return self.cancelled

    def wait(self) -> None:
        assert self.ended.wait(20), "the client waits for ever"

    def num_tokens(self) -> int:
        return sum(answer["output_ids"].shape[2] for answer in self.answers)

    def _end(self, final: bool) -> None:
        assert not self.ended.is_set(), "nothing is sent after what was final"
        if final:
            self.ended.set()


class Served:
    """An engine, its service, and requests to it."""

    def __init__(self, engine: Path, *, decoupled: bool = True) -> None:
        self.llm = LLM(engine)
        eos = frozenset(self.llm.engine.eos_token_ids)
        vocab_size = self.llm.runner.vocab_size
        reader = RequestReader(eos, vocab_size, self.llm.tokenizer.decode, decoupled=decoupled, exclude_input=True)
        self.asynchronous = AsyncLLM(self.llm)
        self.service = LLMService(self.asynchronous, reader, period=PERIOD)

    def start(self, *, rows: int = 1, sender: FakeSender | None = None, **values: Any) -> FakeSender:
        """A request of 900 tokens unless it says otherwise."""
        sender = sender or FakeSender()
        given = {"input_ids": [5, 6, 7], "request_output_len": 900, "end_id": -1, "num_draft_tokens": 0} | values
        batch = {name: np.repeat(array, rows, axis=0) for name, array in arrays(given).items()}
        self.service.start("id", batch, sender, timeout=None)
        return sender

    def assert_idle(self) -> None:
        end = time.monotonic() + 10
        while self.asynchronous.num_open_requests:
            assert time.monotonic() < end, "requests are open"
            time.sleep(0.01)
        self.llm.engine.check_integrity()


@pytest.fixture(params=[True, False], ids=["decoupled", "one response"])
def served(engine: Path, request: pytest.FixtureRequest) -> Iterator[Served]:
    served = Served(engine, decoupled=request.param)
    yield served
    served.service.close(0)


def test_an_engine_that_breaks_down_fails_every_request(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    senders = [served.start(rows=rows, num_return_sequences=2) for rows in (1, 2, 3)]

    def broken() -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(served.llm.engine, "step", broken)
    for sender in senders:
        sender.wait()
        assert isinstance(sender.error, EngineFailedError)
        assert "out of luck" in str(sender.error)
    late = served.start()
    late.wait()
    assert isinstance(late.error, NotReadyError)


def test_closing_ends_what_does_not_end_by_itself(served: Served) -> None:
    sender, short = served.start(), served.start(request_output_len=2)
    served.service.close(0.1)
    for each in (sender, short):
        each.wait()
    assert short.error is None
    assert isinstance(sender.error, DeadlineError)
    assert "shutting down" in str(sender.error)


def test_a_client_that_has_left_before_its_first_token(served: Served) -> None:
    gone = FakeSender()
    gone.cancelled = True
    served.start(sender=gone, rows=3)
    gone.wait()
    served.assert_idle()
    assert gone.num_tokens() < 100


def test_a_running_request_ends_within_a_step_of_its_clients_leaving(
    engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the watcher, so that only a step itself can notice."""
    monkeypatch.setattr(sys.modules[__name__], "PERIOD", 3600)
    served = Served(engine)
    step, sender = served.llm.engine.step, FakeSender()

    def slow_step() -> list[RequestOutput]:
        sender.cancelled = sender.cancelled or bool(sender.answers)
        time.sleep(0.03)  # far longer than it takes to notice
        return step()

    monkeypatch.setattr(served.llm.engine, "step", slow_step)
    served.start(sender=sender, streaming=True)
    sender.wait()
    # It leaves as the second step begins; that step's output is where it is noticed, and a third may have begun.
    assert len(sender.answers) == 2
    assert sender.num_tokens() <= 3
    served.assert_idle()
    served.service.close(0)


def test_stop_ends_all_rows_of_the_requests_of_one_id(served: Served) -> None:
    sender, stop = served.start(rows=2), FakeSender()
    served.service.start("", arrays({"stop": True}), stop, timeout=None)
    stop.wait()
    assert isinstance(stop.error, RequestError)
    stop = FakeSender()
    served.service.start("id", arrays({"stop": True}), stop, timeout=None)
    stop.wait()
    assert stop.answers == [{}]
    sender.wait()
    assert sender.error is None
    assert 0 <= sender.num_tokens() < 1000
    served.assert_idle()


def test_a_refused_row_takes_back_the_others(served: Served) -> None:
    sender = FakeSender()
    tensors = arrays({"input_ids": [5, 6, 7], "request_output_len": 900})
    batch = {name: np.repeat(array, 2, axis=0) for name, array in tensors.items()}
    batch["input_ids"][1, 0] = 100_000
    served.service.start("id", batch, sender, timeout=None)
    sender.wait()
    assert isinstance(sender.error, RequestError)
    served.assert_idle()
