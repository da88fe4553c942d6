"""One request at a time: every way in, and every output."""

import json
import queue
import urllib.request
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc

from magicdec.runtime.llm import LLM
from magicdec.runtime.sampling_params import SamplingParams
from tests.runtime.triton_backend.cases import TEXT, case, expected_text
from tests.runtime.triton_backend.client import Response, call, infer_inputs, text, token_ids
from tests.runtime.triton_backend.conftest import VOCAB_SIZE
from tests.runtime.triton_backend.server import TritonServer
from tests.runtime.triton_backend.test_streams import output_tokens, wait_until_idle

TEXT_MODELS = ("ensemble", "tensorrt_llm_bls")
ENDLESS = {"text_input": TEXT, "max_tokens": 800, "stream": True, "end_id": -1}


def post(server: TritonServer, model: str, way: str, values: dict[str, Any]) -> Any:
    body = json.dumps(values).encode()
    return urllib.request.urlopen(f"http://{server.http}/v2/models/{model}/{way}", body, timeout=20)


@pytest.mark.parametrize("index", [1, 5, 13, 21])
@pytest.mark.parametrize("model", TEXT_MODELS)
def test_generate_puts_the_prompt_in_front(server: TritonServer, offline: LLM, model: str, index: int) -> None:
    each = case(index)
    wanted = each.expected(offline)
    for exclude, prompt in ((False, each.prompt), (True, "")):
        inputs = each.text_inputs() | {"stream": False, "exclude_input_in_output": exclude}
        with post(server, model, "generate", inputs) as answer:
            assert json.load(answer)["text_output"] == prompt + expected_text(wanted)
    assert index == 1 or wanted.stop_reason, "some must end by a stop word"


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_generate_stream_sends_an_event_a_step(server: TritonServer, offline: LLM, model: str) -> None:
    each = case(5, max_tokens=60)
    with post(server, model, "generate_stream", each.text_inputs()) as answer:
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        events = [json.loads(line.removeprefix(b"data: ")) for line in answer if line.startswith(b"data: ")]
    assert len(events) > 1
    assert "".join(event["text_output"] for event in events) == expected_text(each.expected(offline))


def test_the_blocking_grpc_client_streams(server: TritonServer, offline: LLM) -> None:
    each = case(2, max_tokens=40)
    answers: queue.Queue[Any] = queue.Queue()
    with grpc.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        inputs = infer_inputs(each.text_inputs())
        client.async_stream_infer("tensorrt_llm_bls", inputs, request_id="7", enable_empty_final_response=True)
        pieces = []
        while True:
            result, error = answers.get(timeout=20)
            assert error is None
            response = result.get_response()
            assert response.id == "7"
            if response.outputs:
                pieces.append(Response({"text_output": result.as_numpy("text_output")}))
            if response.parameters["triton_final_response"].bool_param:
                break
        client.stop_stream()
    assert text(pieces) == expected_text(each.expected(offline))


def test_log_probabilities_and_counts(server: TritonServer, offline: LLM) -> None:
    each = case(3, max_tokens=30)
    asked = {name: True for name in ("return_log_probs", "return_num_input_tokens", "return_num_output_tokens")}
    params = SamplingParams(temperature=0, max_tokens=30, logprobs=0, ignore_eos=True)
    wanted = offline.generate([each.prompt], params)[0].outputs[0]
    logprobs = [row[token].logprob for row, token in zip(wanted.logprobs or [], wanted.token_ids, strict=True)]
    inputs = {"text_input": each.prompt, "max_tokens": 30, "end_id": -1, **asked}
    pieces = call(server, "tensorrt_llm_bls", inputs | {"stream": True})
    got = np.concatenate([piece.tensors["output_log_probs"][0, 0] for piece in pieces])
    assert got == pytest.approx(logprobs, rel=1e-5)
    last = pieces[-1].tensors
    assert last["cum_log_probs"].item() == pytest.approx(sum(logprobs), rel=1e-5)
    assert last["num_output_tokens"].item() == 30
    assert last["num_input_tokens"].item() == len(offline.tokenizer.encode(each.prompt))
    (whole,) = call(server, "ensemble", inputs)
    assert whole.tensors["output_log_probs"][0, 0] == pytest.approx(logprobs, rel=1e-5)


def test_speculation_is_counted_in_the_last_piece(server: TritonServer) -> None:
    inputs = {"text_input": TEXT * 2, "max_tokens": 60, "end_id": -1, "stream": True, "return_perf_metrics": True}
    pieces = call(server, "ensemble", inputs)
    assert not any("acceptance_rate" in piece.tensors for piece in pieces[:-1])
    last = {name: array.item() for name, array in pieces[-1].tensors.items() if name != "text_output"}
    assert 0 < last["total_accepted_draft_tokens"] <= last["total_draft_tokens"]
    assert last["acceptance_rate"] == pytest.approx(last["total_accepted_draft_tokens"] / last["total_draft_tokens"])
    assert last["arrival_time_ns"] <= last["first_scheduled_time_ns"] < last["first_token_time_ns"]
    assert last["first_token_time_ns"] < last["last_token_time_ns"]
    assert last["kv_cache_alloc_new_blocks"] + last["kv_cache_reused_blocks"] == last["kv_cache_alloc_total_blocks"]
    plain = call(server, "ensemble", inputs | {"num_draft_tokens": 0})
    assert plain[-1].tensors["total_draft_tokens"].item() == 0
    assert text(plain) == text(pieces)
    again = call(server, "ensemble", inputs)
    assert again[-1].tensors["kv_cache_reused_blocks"].item() > 0, "the prompt is in the prefix cache"


@pytest.mark.parametrize("model", TEXT_MODELS)
@pytest.mark.parametrize("streamed", [False, True])
def test_a_batch_is_answered_row_by_row(server: TritonServer, offline: LLM, model: str, streamed: bool) -> None:
    cases = [case(index, max_tokens=8 + 9 * index) for index in (1, 9, 17)]  # the same kind of sampling
    inputs = {
        "text_input": np.array([[each.prompt.encode()] for each in cases], np.object_),
        "max_tokens": np.array([[each.max_tokens] for each in cases], np.int32),
        "seed": np.array([[each.seed] for each in cases], np.uint64),
        "top_k": np.array([[40]] * 3, np.int32),
        "temperature": np.array([[0.8]] * 3, np.float32),
        "stream": np.array([[streamed]] * 3),
        "exclude_input_in_output": np.array([[True]] * 3),
    }
    responses = call(server, model, inputs)
    assert streamed == (len(responses) > 3)
    for index, each in enumerate(cases):
        mine = [response for response in responses if response.tensors["batch_index"].item() == index]
        assert text(mine) == expected_text(each.expected(offline))


def test_several_sequences_of_one_prompt(server: TritonServer, offline: LLM) -> None:
    each = case(1, max_tokens=25)
    params = SamplingParams(seed=each.seed, n=3, max_tokens=25, temperature=0.8, top_k=40)
    wanted = offline.generate([each.prompt], params)[0].outputs
    responses = call(server, "ensemble", each.text_inputs() | {"num_return_sequences": 3})
    for index in range(3):
        mine = [response for response in responses if response.tensors["sequence_index"].item() == index]
        assert text(mine) == expected_text(wanted[index])


def test_biases_and_ends_of_ones_own(server: TritonServer, offline: LLM) -> None:
    (end,) = offline.tokenizer.encode_plain("e")
    bias = {"embedding_bias_words": [" t", "e"], "embedding_bias_weights": [3.0, 6.0]}
    ids = offline.tokenizer.encode_plain(" t")
    params = SamplingParams(
        temperature=0,
        max_tokens=50,
        ignore_eos=True,
        stop_token_ids=[end],
        logit_bias={**dict.fromkeys(ids, 3.0), end: 6.0},
    )
    wanted = offline.generate([TEXT], params)[0].outputs[0]
    inputs = {"text_input": TEXT, "max_tokens": 50, "end_id": end, "stream": True, **bias}
    assert text(call(server, "ensemble", inputs)) == wanted.text
    assert wanted.finish_reason == "stop"


@pytest.mark.parametrize("streaming", [False, True])
def test_an_end_of_sequence_token_is_no_output(server: TritonServer, offline: LLM, streaming: bool) -> None:
    ids, eos = offline.tokenizer.encode(TEXT), offline.engine.eos_token_ids[0]
    params = SamplingParams(seed=3, max_tokens=200, logit_bias={eos: 4.0})
    wanted = offline.generate([ids], params)[0].outputs[0].token_ids
    assert wanted[-1] == eos
    bias = np.zeros((1, VOCAB_SIZE), np.float32)
    bias[0, eos] = 4.0
    inputs = {
        "input_ids": ids,
        "input_lengths": len(ids),
        "request_output_len": 200,
        "runtime_top_p": 1.0,
        "seed": 3,
        "embedding_bias": bias,
        "streaming": streaming,
        "exclude_input_in_output": True,
        "return_num_output_tokens": True,
    }
    responses = call(server, "tensorrt_llm", inputs)
    assert token_ids(responses) == wanted[:-1]
    assert responses[-1].tensors["num_output_tokens"].item() == len(wanted) - 1


def test_the_models_one_by_one(server: TritonServer, offline: LLM) -> None:
    """A client that calls preprocessing, tensorrt_llm and postprocessing itself."""
    with grpc.InferenceServerClient(server.grpc) as client:
        query = {"QUERY": np.array([[TEXT.encode()]], np.object_), "STOP_WORDS_DICT": np.array([[b"an"]], np.object_)}
        prepared = client.infer("preprocessing", infer_inputs(query | {"REQUEST_OUTPUT_LEN": 40}))
        ids = prepared.as_numpy("INPUT_ID")
        assert ids[0].tolist() == offline.tokenizer.encode(TEXT)
        inputs = {
            "input_ids": ids,
            "input_lengths": prepared.as_numpy("REQUEST_INPUT_LEN"),
            "request_output_len": prepared.as_numpy("REQUEST_OUTPUT_LEN"),
            "stop_words_list": prepared.as_numpy("STOP_WORDS_IDS"),
            "end_id": prepared.as_numpy("OUT_END_ID"),
            "pad_id": prepared.as_numpy("OUT_PAD_ID"),
            "runtime_top_p": 1.0,
            "seed": 11,
        }
        (whole,) = call(server, "tensorrt_llm", inputs)
        tokens = {"TOKENS_BATCH": whole.tensors["output_ids"], "SEQUENCE_LENGTH": whole.tensors["sequence_length"]}
        output = client.infer("postprocessing", infer_inputs(tokens)).as_numpy("OUTPUT").item().decode()
    wanted = offline.generate([TEXT], SamplingParams(seed=11, max_tokens=40, stop=["an"]))[0].outputs[0]
    assert whole.tensors["output_ids"][0, 0].tolist() == [*ids[0], *wanted.token_ids]
    assert output.startswith(TEXT + expected_text(wanted))


def test_stop_by_request_id(server: TritonServer) -> None:
    stop = {"input_lengths": 1, "request_output_len": 1, "stop": True}
    inputs = {"input_ids": [5, 6, 7], "input_lengths": 3, "request_output_len": 900, "end_id": -1, "streaming": True}

    def stopped(model: str, values: dict[str, Any]) -> int:
        answers: queue.Queue[Any] = queue.Queue()
        with grpc.InferenceServerClient(server.grpc) as client:
            client.start_stream(lambda result, error: answers.put((result, error)))
            client.async_stream_infer(model, infer_inputs(values), request_id="mine", enable_empty_final_response=True)
            answers.get(timeout=20)  # it runs
            assert call(server, "tensorrt_llm", stop, request_id="another's") == []
            while not answers.empty():
                answers.get_nowait()
            result, _ = answers.get(timeout=20)  # it runs on
            assert not result.get_response().parameters["triton_final_response"].bool_param
            assert call(server, "tensorrt_llm", stop, request_id="mine") == []
            return _count_until_final(answers)

    before = output_tokens(server)
    assert stopped("tensorrt_llm", inputs) > 0
    assert stopped("ensemble", ENDLESS) > 0
    wait_until_idle(server)
    assert output_tokens(server) - before < 1000


def _count_until_final(answers: "queue.Queue[Any]") -> int:
    count = 0
    while True:
        result, error = answers.get(timeout=20)
        assert error is None
        count += 1
        if result.get_response().parameters["triton_final_response"].bool_param:
            return count


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_a_deadline_ends_a_request(server: TritonServer, model: str) -> None:
    before = output_tokens(server)
    responses = call(server, model, ENDLESS | {"max_tokens": 900}, timeout=100_000)
    assert "time limit of 0.1 s is over" in (responses[-1].error or "")
    wait_until_idle(server)
    assert output_tokens(server) - before < 900


def left(leave: Callable[[], None], server: TritonServer) -> float:
    """How many tokens were made of a request whose client leaves."""
    before = output_tokens(server)
    leave()
    wait_until_idle(server)
    return output_tokens(server) - before


def test_an_http_client_that_leaves_ends_its_request(server: TritonServer) -> None:
    def leave() -> None:
        with post(server, "tensorrt_llm_bls", "generate_stream", ENDLESS) as answer:
            assert answer.readline().startswith(b"data: ")

    assert 0 < left(leave, server) < 600


def test_an_ensemble_does_not_hear_of_a_client_that_leaves(server: TritonServer) -> None:
    """As the documentation says: Triton tells no step of an ensemble."""

    def leave() -> None:
        with post(server, "ensemble", "generate_stream", ENDLESS | {"max_tokens": 200}) as answer:
            assert answer.readline().startswith(b"data: ")

    assert left(leave, server) == 200


def test_metrics_have_the_names_of_the_backend(server: TritonServer) -> None:
    call(server, "ensemble", {"text_input": TEXT, "max_tokens": 5})
    wait_until_idle(server)
    labels = 'model="tensorrt_llm"'
    metrics = server.metrics()
    for name in (
        *(f'nv_trt_llm_request_metrics{{{labels},request_type="{kind}",version="1"}}' for kind in ("max", "waiting")),
        f'nv_trt_llm_general_metrics{{general_type="iteration_counter",{labels},version="1"}}',
        f'nv_trt_llm_kv_cache_block_metrics{{kv_cache_block_type="tokens_per",{labels},version="1"}}',
        f'nv_trt_llm_runtime_memory_metrics{{memory_type="cpu",{labels},version="1"}}',
        f'nv_llm_input_token_len_count{{{labels},response_metric_type="total_input_tokens",version="1"}}',
        f'nv_llm_output_token_len_bucket{{{labels},response_metric_type="total_output_tokens",version="1",le="500"}}',
        "magicdec:spec_decode_num_accepted_tokens_total",
    ):
        assert name in metrics
