"""What the server tells about itself, and what its log tells about requests."""

import logging
import re
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from magicdec import __version__
from magicdec.runtime.llm import LLM
from tests.runtime.openai.serving import MODEL, Served, wait_until

BODY: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 20, "temperature": 0, "ignore_eos": True}


def test_models(llm: LLM, shared: Served) -> None:
    (model,) = shared.client.models.list()
    assert (model.id, model.object, model.owned_by) == (MODEL, "model", "magicdec")
    assert shared.client.models.retrieve(MODEL) == model
    assert shared.http.get("/v1/models").json()["data"][0]["max_model_len"] == llm.config.max_seq_len


def test_probes(shared: Served) -> None:
    for probe in ("/health", "/ready"):
        answer = shared.http.get(probe)
        assert answer.status_code == 200
        assert answer.json() == {"status": "ready", "error": None}
    assert shared.http.get("/version").json() == {"version": __version__}


def test_metrics(served: Served) -> None:
    for stream in (False, True):
        assert served.post("/v1/completions", {**BODY, "stream": stream}).status_code == 200
    answer = served.http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }
    assert samples[("magicdec:generation_tokens_total",)] == 40
    assert samples[("magicdec:request_success_total", "length")] == 2
    assert samples[("magicdec:num_requests_running",)] == 0


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("mine-1", True),
        ("00-4bf92f3577b34da6:a/b_c.d+e=", True),
        ("x" * 129, False),
        ("two words", False),
        ("\u00e9", False),
    ],
)
def test_request_id(shared: Served, caplog: pytest.LogCaptureFixture, given: str, kept: bool) -> None:
    """The client's own where it is one; in the answer and in the log, of errors too."""
    caplog.set_level(logging.INFO)
    for path, body in (("/v1/completions", BODY), ("/v1/completions", {**BODY, "n": 0}), ("/nothing", BODY)):
        answer = shared.http.post(path, json=body, headers={b"X-Request-Id": given.encode()})
        found = answer.headers["x-request-id"]
        assert (found == given) == kept
        assert re.fullmatch(r"[\w.:/+=-]{1,128}", found)
        line = f"{found} POST {path} {answer.status_code} "
        wait_until(lambda line=line: line in caplog.text, "the log tells")  # type: ignore[misc]


def test_log_line(shared: Served, caplog: pytest.LogCaptureFixture) -> None:
    """Who, how long, how many tokens; never the text."""
    caplog.set_level(logging.INFO)
    answer = shared.post("/v1/completions", {**BODY, "user": "otto\nx"}, **{"X-Request-Id": "told"}).json()
    wait_until(lambda: "told POST" in caplog.text, "the log tells")
    (line,) = [record.getMessage() for record in caplog.records if "told POST" in record.getMessage()]
    usage = answer["usage"]
    assert f"prompt_tokens={usage['prompt_tokens']} output_tokens=20" in line
    assert f"id='{answer['id']}'" in line
    assert "user='otto\\nx'" in line, "on one line"
    assert "acceptance_length=" in line
    assert "upon" not in caplog.text
