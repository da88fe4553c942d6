"""The load client against a scripted server, the tables, and (slow) the whole benchmark against the real one."""

import asyncio
import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.paths import ROOT
from tests.support.smollm2 import smollm2_engine

SERVING = ROOT / "benchmarks" / "serving"
MODULES = ("client", "server", "load", "soak", "public_tool", "table", "run")


@pytest.fixture(scope="module")
def serving() -> Iterator[dict[str, ModuleType]]:
    """The script's modules, which import each other as a script's do."""
    sys.path.insert(0, str(SERVING))
    try:
        yield {name: __import__(name) for name in MODULES}
    finally:
        sys.path.remove(str(SERVING))
        for name in MODULES:
            sys.modules.pop(name, None)


def piece(text: str, finish_reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"text": text, "finish_reason": finish_reason}]}


GOOD = [piece("a"), 0.2, piece("bc"), piece("", "length"), {"choices": [], "usage": {"completion_tokens": 5}}, "[DONE]"]
# By the prompt: status and what is sent; a number is a pause in seconds.
SCRIPTS: dict[str, tuple[int, list[Any]]] = {
    "good": (200, GOOD),
    "refused": (400, [{"error": {"message": "no such model"}}]),
    "broken": (200, [piece("a"), {"error": {"message": "the engine has failed"}}, "[DONE]"]),
    "cut": (200, [piece("a"), piece("", "length")]),
    "endless": (200, [piece("a"), "[DONE]"]),
    "garbage": (200, [piece("a"), "{no json"]),
    "slow": (200, [piece("a"), 1.0, *GOOD]),
    "long": (200, [*(piece("x") for _ in range(9)), 1.0, piece("", "length"), "[DONE]"]),
}
COUNTED = ("good", "cut")  # no client leaves these early


class Scripted(BaseHTTPRequestHandler):
    """Answers by SCRIPTS, and knows how many of COUNTED it answered at a time."""

    lock = threading.Lock()
    num_open = most_open = 0

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["stream"] is True
        assert body["stream_options"] == {"include_usage": True}
        status, script = SCRIPTS[body["prompt"]]
        counted = body["prompt"] in COUNTED
        self.change(counted)
        self.send_response(status)
        self.end_headers()
        try:
            for index, each in enumerate(script):
                if index == len(script) - 1:
                    self.change(-counted)  # before the client can know that it has ended
                if isinstance(each, float):
                    time.sleep(each)
                    continue
                text = each if isinstance(each, str) else json.dumps(each)
                self.wfile.write(f"data: {text}\n\n".encode() if status == 200 else text.encode())
                self.wfile.flush()
        except ConnectionError:
            pass  # the client has left

    def change(self, number: int) -> None:
        with self.lock:
            Scripted.num_open += number
            Scripted.most_open = max(Scripted.most_open, Scripted.num_open)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Scripted)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join(10)


def ask(serving: dict[str, ModuleType], url: str, prompt: str, **options: Any) -> Any:
    client = serving["client"]
    (answer,), _ = asyncio.run(client.ask_all(url, [client.Ask({"prompt": prompt}, **options)], 1))
    return answer


def test_an_answer_has_its_text_and_the_times_of_its_pieces(serving: dict[str, ModuleType], url: str) -> None:
    answer = ask(serving, url, "good")
    assert (answer.text, answer.num_tokens, answer.finish_reason, answer.error) == ("abc", 5, "length", None)
    assert len(answer.arrivals) == 2
    (gap,) = serving["client"].gaps([answer])
    assert 0.2 <= gap <= answer.seconds
    assert answer.time_per_token == gap / 4


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        ("refused", "status 400: .*no such model"),
        ("broken", "the engine has failed"),
        ("cut", "ended without"),
        ("endless", "no finish reason"),
        ("garbage", "JSONDecodeError"),
    ],
)
def test_whatever_is_wrong_is_an_error(serving: dict[str, ModuleType], url: str, prompt: str, error: str) -> None:
    with pytest.raises(AssertionError, match=error):
        raise AssertionError(ask(serving, url, prompt).error)


def test_a_server_that_is_not_there_is_an_error(serving: dict[str, ModuleType]) -> None:
    assert "ConnectorError" in ask(serving, "http://127.0.0.1:9", "good").error


def test_leaving_early_is_no_error(serving: dict[str, ModuleType], url: str) -> None:
    """After some text, and after some time."""
    for prompt, options in (("long", {"stop_reading": 3}), ("slow", {"give_up": 0.3})):
        answer = ask(serving, url, prompt, **options)
        assert (answer.left_early, answer.error, answer.finish_reason) == (True, None, None)
        assert answer.seconds < 0.9
    assert not ask(serving, url, "good", stop_reading=9, give_up=9).left_early


def test_so_many_at_a_time_and_answers_in_order(serving: dict[str, ModuleType], url: str) -> None:
    client, done = serving["client"], list[int]()
    asks = [client.Ask({"prompt": "good" if index % 3 else "cut"}) for index in range(9)]
    Scripted.num_open = Scripted.most_open = 0
    answers, _ = asyncio.run(client.ask_all(url, asks, 3, done.append))
    assert [answer.error is None for answer in answers] == [bool(index % 3) for index in range(9)]
    assert done == list(range(1, 10))
    assert Scripted.most_open == 3


def test_figures(serving: dict[str, ModuleType]) -> None:
    """Failed requests give no times and no tokens."""
    answer = serving["client"].Answer
    answers = [
        answer("ab", [1.0, 3.0], 5, "length", 3.5),
        answer("c", [2.0], 1, "length", 2.0),
        answer("d", [9.0], 1, error="cut"),
    ]
    found = serving["load"].client_figures(answers, 4.0)
    assert found["errors"] == ["cut"]
    assert (found["tokens_per_second"], found["requests_per_second"]) == (1.5, 0.5)
    assert found["time_to_first_token"] == pytest.approx([1.5, 1.99])
    assert found["inter_token_latency"] == [2.0, 2.0]
    assert found["time_per_output_token"] == [0.5, 0.5]
    assert serving["load"].percentiles([]) is None


def test_the_soak_gives_up_some_of_every_kind(serving: dict[str, ModuleType]) -> None:
    asks = list(serving["soak"].short_requests("m", 500, random.Random(0)))
    assert 50 < sum(each.stop_reading is not None for each in asks) < 150
    assert 50 < sum(each.give_up is not None for each in asks) < 150
    assert {each.body["temperature"] for each in asks} == {0, 0.8}
    assert asks == list(serving["soak"].short_requests("m", 500, random.Random(0)))


def run_of(rate: float, **values: Any) -> dict[str, Any]:
    times = dict.fromkeys(("time_to_first_token", "inter_token_latency", "time_per_output_token", "request_latency"))
    return {
        **times,
        "tokens_per_second": rate,
        "requests_per_second": 1.0,
        "time_to_first_token": [0.5, 2.0],
        "inter_token_latency": [0.01, 0.02],
        "errors": [],
        "prefix_hits": 0,
        "preemptions": 0,
        "acceptance_length": None,
        "acceptance_rate": None,
        "draft_lengths": {"0": 3.0, "4": 1.0},
        **values,
    }


def result() -> dict[str, Any]:
    about = {"quick": False, "options": "--x 1", "where": "a machine"}
    return {
        "load": {
            "requests": 4,
            "prompt_tokens": 2048,
            "concurrency": 2,
            "output_tokens": 8,
            "same_texts": 4,
            "runs": {"plain": [run_of(10.0), run_of(12.0), run_of(20.0)], "speculative": [run_of(15.0)] * 3},
            "free_blocks": [9.0, 9.0],
            **about,
        },
        "soak": {
            "requests": 2000,
            "concurrency": 16,
            "seconds": 60.0,
            "cancelled": 700,
            "aborted": 600.0,
            "errors": [],
            "tokens": 3e4,
            "free_blocks": [9.0, 9.0],
            "memory": [(100 + min(index, 5)) << 20 for index in range(21)],
            **about,
        },
        "aiperf": {
            "tool": "aiperf==1",
            "requests": 4,
            "concurrency": 2,
            "errors": 0.0,
            "metrics": {"TTFT": [1.0, 2.0, 3.0, "ms"]},
            "totals": {"output tokens/s": 50.0, "requests": 4.0},
            **about,
        },
    }


def test_tables(serving: dict[str, ModuleType]) -> None:
    tables = serving["table"].markdown(result())
    assert "| output tokens/s | 12.0 (10.0-20.0) | 15.0 |" in tables["load"]
    assert "| time to first token p99, s | 2.00 | 2.00 |" in tables["load"]
    assert "| inter-token latency p50, ms | 10.0 | 10.0 |" in tables["load"]
    assert "| draft tokens a step, mean | 1.00 | 1.00 |" in tables["load"]
    assert "| acceptance length |  |  |" in tables["load"]
    assert "The same text in all runs: 4 of 4. KV blocks free before and after: 9, 9." in tables["load"]
    assert "| resident MiB at 0, 25, 50, 75, 100 % | 100.0, 105.0, 105.0, 105.0, 105.0 |" in tables["soak"]
    assert "| TTFT, ms | 1.0 | 2.0 | 3.0 |" in tables["aiperf"]
    assert "4 requests, 2 at a time: 50.00 output tokens/s, 0 errors." in tables["aiperf"]
    assert all(text.endswith("\n\nServer: `--x 1`. a machine.") for text in tables.values())
    assert list(serving["table"].markdown({"soak": result()["soak"]})) == ["soak"]


def test_failures(serving: dict[str, ModuleType]) -> None:
    """Every kind is found, and nothing else."""
    failures_of, good = serving["run"].failures_of, result()
    assert [failures_of(part, found) for part, found in good.items()] == [[], [], []]
    for part, change, text in (
        ("load", {"free_blocks": [9.0, 8.0]}, "9 KV blocks were free before, 8 are now"),
        ("load", {"same_texts": 3}, "1 texts differ"),
        ("load", {"runs": {"plain": [run_of(1.0)], "speculative": [run_of(1.0, errors=["cut"])]}}, "first with cut"),
        ("soak", {"errors": ["cut", "cut"]}, "2 requests, the first with cut"),
        ("soak", {"free_blocks": [9.0, 8.0]}, "8 are now"),
        ("soak", {"memory": [index << 20 for index in range(100, 121)]}, "memory grew"),
        ("aiperf", {"errors": 1.0}, "1 errors"),
    ):
        (failure,) = failures_of(part, good[part] | change)
        assert text in failure


def test_a_server_that_does_not_start_is_told_with_its_log(serving: dict[str, ModuleType], tmp_path: Path) -> None:
    server = serving["server"]
    with (
        pytest.raises(server.ServerError, match=r"(?s)magicdec serve ended with exit code 2.*nowhere"),
        server.Server(tmp_path / "nowhere", [], tmp_path / "log", timeout=60),
    ):
        raise AssertionError("it runs")


def test_aiperf_that_fails_is_told_with_its_words(serving: dict[str, ModuleType]) -> None:
    tool = serving["public_tool"]
    with pytest.raises(tool.ToolError, match="no such option"):
        tool._run([sys.executable, "-c", "raise SystemExit('no such option')"], 60)


@pytest.mark.slow
def test_load_soak_and_aiperf_on_the_real_server(tmp_path: Path) -> None:
    """All three, small: no request fails, plain and speculative texts are equal, and every block comes back."""
    output = tmp_path / "serving.json"
    command = [sys.executable, str(SERVING / "run.py"), "--quick", "--engine", str(smollm2_engine())]
    options = ["--cache-dir", str(ROOT / ".cache"), "--json", str(output)]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=2400, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(output.read_text())
    assert found["load"]["same_texts"] == found["load"]["requests"] == 6
    assert found["load"]["runs"]["3 drafts"][0]["acceptance_length"] > 1
    assert found["load"]["runs"]["plain"][0]["acceptance_length"] is None
    assert found["soak"]["cancelled"] >= found["soak"]["aborted"] > 0
    assert found["aiperf"]["totals"]["requests"] == 6
    assert found["aiperf"]["metrics"]["output tokens"][0] == 12
    assert "| TTFT, ms |" in done.stdout


def test_the_page_is_filled_between_its_marks(
    serving: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the parts that were measured; what else it says stays."""
    assert serving
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks/pages"))
    script = import_module("measure_serving")
    for part in result():
        assert all(script.PAGE.read_text().count(mark) == 1 for mark in script.marks(part))
    page, measured = tmp_path / "page.md", tmp_path / "result.json"
    page.write_text("".join(f"{script.marks(part)[0]}\nold {part}\n{script.marks(part)[1]}\n" for part in result()))
    measured.write_text(json.dumps({part: result()[part] for part in ("load", "soak")}))
    script.write(page, measured)
    text = page.read_text()
    assert "old load" not in text
    assert "old soak" not in text
    assert "\nold aiperf\n" in text
    for part, table in serving["table"].markdown(result()).items():
        assert (table in text) == (part != "aiperf")
