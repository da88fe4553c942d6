"""Requests as the clients of NVIDIA's TensorRT-LLM backend make them, and answers as those clients read them."""

import queue
from typing import Any

import numpy as np
import tritonclient.grpc as grpc

from magicdec.runtime.llm import LLM
from magicdec.runtime.sampling_params import SamplingParams
from tests.runtime.triton_backend.cases import TEXT
from tests.runtime.triton_backend.client import infer_inputs
from tests.runtime.triton_backend.server import TritonServer

PERF_OUTPUTS = (
    *("kv_cache_alloc_new_blocks", "kv_cache_reused_blocks", "kv_cache_alloc_total_blocks"),
    *("arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns", "last_token_time_ns"),
    *("acceptance_rate", "total_accepted_draft_tokens", "total_draft_tokens"),
)


def send(server: TritonServer, model: str, values: dict[str, Any], outputs: list[str]) -> list[Any]:
    """Open a stream, send one request, close the stream, then read what came."""
    answers: queue.Queue[Any] = queue.Queue()
    with grpc.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: answers.put(error or result))
        wanted = [grpc.InferRequestedOutput(name) for name in outputs]
        client.async_stream_infer(model, infer_inputs(values), outputs=wanted or None, request_id="1")
        client.stop_stream()
    return [answers.get_nowait() for _ in range(answers.qsize())]


def end_to_end(streaming: bool) -> dict[str, Any]:
    """What the backend's end_to_end_grpc_client.py sends by default, of which much says nothing."""
    return {
        "text_input": TEXT,
        "max_tokens": 30,
        "stream": streaming,
        "beam_width": 1,
        "temperature": 1.0,
        "num_return_sequences": 1,
        "exclude_input_in_output": False,
        "end_id": -1,
        "pad_id": 0,
        "num_draft_tokens": 4,
        "return_perf_metrics": True,
        "return_log_probs": True,
    }


def test_the_end_to_end_client(server: TritonServer, offline: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    wanted = offline.generate([TEXT], params)[0].outputs[0].text
    names = ["text_output", "cum_log_probs", "output_log_probs", "sequence_index", "batch_index", *PERF_OUTPUTS]
    for model in ("ensemble", "tensorrt_llm_bls"):
        for streaming in (False, True):
            text = ""
            for result in send(server, model, end_to_end(streaming), names):
                assert result.as_numpy("batch_index") is None
                assert result.as_numpy("sequence_index") is None
                text += result.as_numpy("text_output")[0].decode("utf-8")
            assert text == (wanted if streaming else TEXT + wanted)
            assert all(result.as_numpy(name).shape == (1, 1) for name in PERF_OUTPUTS)


def test_the_token_client_and_its_stop_signal(server: TritonServer, offline: LLM) -> None:
    ids = offline.tokenizer.encode(TEXT)
    inputs = {
        "input_ids": np.array([ids], np.int32),
        "input_lengths": np.array([[len(ids)]], np.int32),
        "request_output_len": np.array([[16]], np.int32),
        "beam_width": np.array([[1]], np.int32),
        "temperature": np.array([[1.0]], np.float32),
        "runtime_top_k": np.array([[1]], np.int32),
        "runtime_top_p": np.array([[0.0]], np.float32),
        "len_penalty": np.array([[1.0]], np.float32),
        "repetition_penalty": np.array([[1.0]], np.float32),
        "seed": np.array([[0]], np.uint64),
        "end_id": np.array([[-1]], np.int32),
        "pad_id": np.array([[0]], np.int32),
        "streaming": np.array([[True]]),
    }
    tokens: list[int] = []
    for result in send(server, "tensorrt_llm", inputs, []):
        sequence_length = result.as_numpy("sequence_length")[0][0]
        tokens += result.as_numpy("output_ids")[0][0][:sequence_length].tolist()
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    assert tokens == offline.generate([ids], params)[0].outputs[0].token_ids
    signal = {
        "input_ids": np.empty((1, 1), np.int32),
        "input_lengths": np.zeros((1, 1), np.int32),
        "request_output_len": np.zeros((1, 1), np.int32),
        "stop": np.array([[True]]),
    }
    answers = send(server, "tensorrt_llm", signal, [])
    assert len(answers) == 1, "the client waits for this one"
    assert answers[0].as_numpy("output_ids") is None
