"""Models that are not decoupled: one response a request, over unary gRPC and HTTP as well."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc
import tritonclient.http as http
from tritonclient.utils import InferenceServerException
from typer.testing import CliRunner

from magicdec.cli import app
from magicdec.runtime.llm import LLM
from magicdec.runtime.sampling_params import SamplingParams
from tests.runtime.triton_backend.cases import TEXT, case, expected_text
from tests.runtime.triton_backend.client import infer_inputs
from tests.runtime.triton_backend.conftest import DTYPE
from tests.runtime.triton_backend.server import TritonServer, serving
from tests.runtime.triton_backend.test_streams import num_active, output_tokens, wait_until_idle

TEXT_MODELS = ("ensemble", "tensorrt_llm_bls")


@pytest.fixture(scope="module")
def unary(tmp_path_factory: pytest.TempPathFactory, engine: Path) -> Iterator[TritonServer]:
    """Of a repository that the command wrote, with what it wrote changed as a user would: the type is for exactness."""
    work = tmp_path_factory.mktemp("unary")
    command = ["triton-repo", "--engine", str(engine), "--output", str(work / "models"), "--no-decoupled"]
    result = CliRunner().invoke(app, [*command, "--exclude-input-in-output", "--dtype", "float32"])
    assert result.exit_code == 0, result.output
    config = work / "models" / "tensorrt_llm" / "config.pbtxt"
    config.write_text(config.read_text().replace('"float32"', f'"{DTYPE}"'))
    with serving(work / "models", work) as running:
        yield running


def infer(server: TritonServer, model: str, values: dict[str, Any], way: str, **options: Any) -> dict[str, Any]:
    module: Any = {"grpc": grpc, "http": http}[way]
    with module.InferenceServerClient(getattr(server, way)) as client:
        result = client.infer(model, infer_inputs(values, module), **options)
        response = result.get_response(as_json=True) if way == "grpc" else result.get_response()
        return {each["name"]: result.as_numpy(each["name"]) for each in response["outputs"]}


@pytest.mark.parametrize("way", ["grpc", "http"])
@pytest.mark.parametrize("model", TEXT_MODELS)
def test_a_batch_is_one_response(unary: TritonServer, offline: LLM, model: str, way: str) -> None:
    cases = [case(index, max_tokens=8 + index) for index in (1, 9, 17)]
    inputs = {
        "text_input": np.array([[each.prompt.encode()] for each in cases], np.object_),
        "max_tokens": np.array([[each.max_tokens] for each in cases], np.int32),
        "seed": np.array([[each.seed] for each in cases], np.uint64),
        "top_k": np.array([[40]] * 3, np.int32),
        "temperature": np.array([[0.8]] * 3, np.float32),
        "return_log_probs": np.array([[True]] * 3),
        "return_perf_metrics": np.array([[True]] * 3),
        "num_return_sequences": np.array([[2]] * 3, np.int32),
    }
    outputs = infer(unary, model, inputs, way)
    wanted = [each.expected(offline) for each in cases]
    assert outputs["text_output"].shape == (6,), "row by row, as clients of the backend expect it"
    assert [each.decode() for each in outputs["text_output"][::2]] == [expected_text(each) for each in wanted]
    assert outputs["output_log_probs"].shape == (3, 2, 25)
    assert (outputs["total_draft_tokens"] > 0).all()
    assert outputs["acceptance_rate"].shape == (3, 1)


def test_many_at_a_time(unary: TritonServer, offline: LLM) -> None:
    cases = [case(index, max_tokens=20) for index in range(16)]

    def answer(index: int) -> str:
        inputs = cases[index].text_inputs() | {"stream": False}
        outputs = infer(unary, TEXT_MODELS[index % 2], inputs, ("grpc", "http")[index // 2 % 2])
        return str(outputs["text_output"].item().decode())

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(answer, range(16)))
    assert answers == [expected_text(each.expected(offline)) for each in cases]


def test_what_is_refused(unary: TritonServer) -> None:
    for change, message in (
        ({"stream": True}, "Streaming is only supported in decoupled mode."),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"beam_width": 2}, "input beam_width is 2"),
    ):
        for model in TEXT_MODELS:
            with pytest.raises(InferenceServerException, match=message.rstrip(".")) as caught:
                infer(unary, model, {"text_input": TEXT, "max_tokens": 5} | change, "grpc")
            if model == "ensemble":
                assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
    rows = {"text_input": np.array([[b"a"]] * 2, np.object_), "max_tokens": np.full((2, 1), 3, np.int32)}
    differ = rows | {"return_log_probs": np.array([[True], [False]])}
    with pytest.raises(InferenceServerException, match="return_log_probs differs between the rows"):
        infer(unary, "ensemble", differ, "http")


@pytest.mark.parametrize("model", ["tensorrt_llm", "tensorrt_llm_bls"])
def test_a_client_that_gives_up_ends_its_request(unary: TritonServer, model: str) -> None:
    before = output_tokens(unary)
    text = {"text_input": TEXT, "max_tokens": 900, "end_id": -1}
    tokens = {"input_ids": [5, 6, 7], "input_lengths": 3, "request_output_len": 900, "end_id": -1}
    start_time = time.monotonic()
    with pytest.raises(InferenceServerException, match="Deadline Exceeded"):
        infer(unary, model, tokens if model == "tensorrt_llm" else text, "grpc", client_timeout=0.2)
    assert time.monotonic() - start_time < 10
    wait_until_idle(unary)
    assert output_tokens(unary) - before < 900


def test_a_deadline_is_an_error(unary: TritonServer) -> None:
    with pytest.raises(InferenceServerException, match=r"time limit of 0.1 s is over"):
        infer(unary, "ensemble", {"text_input": TEXT, "max_tokens": 900, "end_id": -1}, "grpc", timeout=100_000)
    wait_until_idle(unary)


def test_unload_and_reload(unary: TritonServer, offline: LLM) -> None:
    each = case(3)
    with grpc.InferenceServerClient(unary.grpc) as client:
        with ThreadPoolExecutor(1) as pool:
            long = {"text_input": TEXT, "max_tokens": 500, "end_id": -1, "num_draft_tokens": 0}
            running = pool.submit(infer, unary, "tensorrt_llm_bls", long, "grpc")
            _wait(lambda: num_active(unary) == 1)
            client.unload_model("tensorrt_llm_bls")  # and what is open is answered in full
            params = SamplingParams(temperature=0, max_tokens=500, ignore_eos=True)
            wanted = offline.generate([TEXT], params)[0].outputs[0]
            assert running.result()["text_output"].item().decode() == wanted.text
        for model in ("ensemble", "tensorrt_llm"):
            client.unload_model(model)
            _wait(lambda model=model: not client.is_model_ready(model))
        with pytest.raises(InferenceServerException):
            infer(unary, "ensemble", {"text_input": TEXT, "max_tokens": 5}, "grpc")
        for model in ("tensorrt_llm", "ensemble", "tensorrt_llm_bls"):
            client.load_model(model)
            assert client.is_model_ready(model)
    for model in TEXT_MODELS:
        outputs = infer(unary, model, each.text_inputs() | {"stream": False}, "http")
        assert outputs["text_output"].item().decode() == expected_text(each.expected(offline))
    wait_until_idle(unary)


def _wait(happened: Any) -> None:
    end = time.monotonic() + 20
    while not happened():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.05)
