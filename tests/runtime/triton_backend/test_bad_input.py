"""Whatever a client sends, it gets an error that names what is wrong, and the server serves on."""

import asyncio
import json
import urllib.error
import urllib.request
from typing import Any

import numpy as np
import pytest

from magicdec.runtime.llm import LLM
from tests.runtime.triton_backend.cases import TEXT, case, expected_text
from tests.runtime.triton_backend.client import Response, call, collect, error_of, text
from tests.runtime.triton_backend.conftest import MAX_QUEUE_SIZE
from tests.runtime.triton_backend.server import TritonServer
from tests.runtime.triton_backend.test_requests import post
from tests.runtime.triton_backend.test_streams import wait_until_idle

GOOD = {"text_input": TEXT, "max_tokens": 5}
TOKENS = {"input_ids": [5, 6, 7], "input_lengths": 3, "request_output_len": 5}
HALF = np.zeros((1, 1, 1), np.float16)

# Changes to a good request to a text model, and what its error says.
TEXT_MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"text_input": ""}, "the prompt is empty"),
    ({"text_input": np.array([[b"\xff\xfe"]], np.object_)}, "QUERY is not UTF-8"),
    ({"text_input": TEXT * 50}, "leaves no room for an output token"),
    ({"max_tokens": 0}, "max_tokens is 0"),
    ({"max_tokens": -3}, "max_tokens is -3"),
    ({"top_p": 1.5}, "top_p is 1.5"),
    ({"top_p": float("nan")}, "top_p is nan"),
    ({"top_k": -5}, "top_k is -5"),
    ({"top_k": 5, "temperature": -1.0}, "temperature is -1.0"),
    ({"top_k": 5, "temperature": float("inf")}, "temperature is inf"),
    ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
    ({"presence_penalty": 3.0}, "presence_penalty is 3.0"),
    ({"min_tokens": 9}, "min_tokens is 9, above max_tokens"),
    ({"end_id": 100_000}, "token id 100000"),
    ({"num_draft_tokens": 99}, "num_draft_tokens=99"),
    ({"num_return_sequences": 0}, "n is 0"),
    ({"bad_words": ["<s>"]}, "bad_words[0] is ''"),
    ({"embedding_bias_words": ["a"]}, "EMBEDDING_BIAS_WORDS and EMBEDDING_BIAS_WEIGHTS"),
    ({"embedding_bias_words": ["a"], "embedding_bias_weights": [float("inf")]}, "logit_bias"),
    ({"beam_width": 4}, "input beam_width is 4, which is not supported"),
    ({"length_penalty": 0.5}, "input len_penalty is 0.5, which is not supported"),
    ({"return_context_logits": True}, "input return_context_logits is True, which is not supported"),
    ({"return_generation_logits": True}, "input return_generation_logits is True, which is not supported"),
    ({"decoder_text_input": "a"}, "input DECODER_QUERY is not supported"),
    ({"prompt_table_extra_id": np.ones((1, 1), np.uint64)}, "input PROMPT_TABLE_EXTRA_ID is not supported"),
    ({"prompt_vocab_size": 5}, "input prompt_vocab_size is not supported"),
    ({"prompt_embedding_table": HALF}, "input prompt_embedding_table is not supported"),
    ({"lora_task_id": np.ones((1, 1), np.uint64)}, "input lora_task_id is not supported"),
    ({"lora_weights": HALF}, "input lora_weights is not supported"),
    ({"lora_config": np.zeros((1, 1, 3), np.int32)}, "input lora_config is not supported"),
    ({"guided_decoding_guide": np.array([[b"x"]], np.object_)}, "input guided_decoding_guide is not supported"),
    ({"max_tokens": np.array([[5.0]], np.float32)}, "max_tokens"),  # Triton's own: a type
    ({"max_tokens": [5, 6]}, "max_tokens"),  # a shape
    ({"nonsense": 1}, "nonsense"),  # a name
]
TOKEN_MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"input_ids": [5, 100_000, 7]}, "token id 100000"),
    ({"input_ids": [5, -1, 7]}, "token id -1"),
    ({"input_lengths": 9}, "input_lengths is 9"),
    ({"input_lengths": 0}, "input_lengths is 0"),
    ({"draft_input_ids": [1, 2]}, "input draft_input_ids is not supported"),
    ({"draft_logits": np.zeros((1, 2, 3), np.float32)}, "input draft_logits is not supported"),
    ({"lookahead_window_size": 3}, "input lookahead_window_size is not supported"),
    ({"retention_decode_priority": 3}, "input retention_decode_priority is not supported"),
    ({"embedding_bias": [0.0] * 5000}, "embedding_bias has 5000 values"),
    ({"stop_words_list": np.array([[[4, 5], [9, -1]]], np.int32)}, "stop_words_list has the ends [9]"),
    ({"stop_words_list": np.array([[[4, 5], [2, 1]]], np.int32)}, "stop_words_list has the ends [2, 1]"),
    ({"bad_words_list": np.zeros((1, 3, 2), np.int32)}, "bad_words_list"),
    ({"stop": True}, "A request id must be provided for request cancellation"),
    ({"early_stopping": np.array([[True]])}, "input early_stopping is True, which is not supported"),
    ({"runtime_top_p_decay": np.array([[0.5]], np.float32)}, "input runtime_top_p_decay is 0.5"),
]


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_mistakes_in_text_requests(server: TritonServer, model: str) -> None:
    for change, message in TEXT_MISTAKES:
        assert message in error_of(server, model, GOOD | change), change


def test_mistakes_in_token_requests(server: TritonServer) -> None:
    for change, message in TOKEN_MISTAKES:
        assert message in error_of(server, "tensorrt_llm", TOKENS | change), change


def test_images_are_refused(server: TritonServer) -> None:
    given = GOOD | {"image_url_input": np.array([[b"http://x"]], np.object_)}
    assert "input image_url_input is not supported" in error_of(server, "tensorrt_llm_bls", given)


def test_too_many_rows_are_refused(server: TritonServer) -> None:
    rows = {"text_input": np.array([[b"a"]] * 5, np.object_), "max_tokens": np.full((5, 1), 3, np.int32)}
    assert "batch-size" in error_of(server, "ensemble", rows)


def test_a_bad_row_ends_its_whole_request_and_nothing_stays(server: TritonServer) -> None:
    rows = {"text_input": np.array([[b"a"]] * 2, np.object_), "max_tokens": np.array([[900], [0]], np.int32)}
    assert "max_tokens is 0" in error_of(server, "ensemble", rows)
    wait_until_idle(server)


def test_more_requests_than_may_be_open(server: TritonServer) -> None:
    endless = {"request_output_len": 1000, "end_id": -1, "num_draft_tokens": 0}
    too_many = 8

    async def run() -> list[str]:
        tasks = [
            asyncio.create_task(collect(server, "tensorrt_llm", TOKENS | endless, request_id="mine"))
            for _ in range(MAX_QUEUE_SIZE + too_many)
        ]
        done: set[asyncio.Task[list[Response]]] = set()
        while len(done) < too_many:
            ended, _ = await asyncio.wait(set(tasks) - done, return_when=asyncio.FIRST_COMPLETED, timeout=20)
            assert ended, "nothing is refused"
            done |= ended
        await collect(server, "tensorrt_llm", TOKENS | {"stop": True}, request_id="mine")
        await asyncio.gather(*tasks)
        return [task.result()[-1].error or "" for task in done]

    wanted = f"{MAX_QUEUE_SIZE} requests are open, and max_queue_size is {MAX_QUEUE_SIZE}; try again later"
    assert asyncio.run(run()) == [wanted] * too_many
    wait_until_idle(server)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"text_input": 5}', b'{"text_input": "a", "max_tokens": "b"}'])
def test_bad_http_bodies(server: TritonServer, body: bytes) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        post_raw(server, body)
    assert caught.value.code in (400, 500)  # Triton says 500 of a body that is not what it should be
    assert json.loads(caught.value.read())["error"]


def post_raw(server: TritonServer, body: bytes) -> None:
    urllib.request.urlopen(f"http://{server.http}/v2/models/ensemble/generate", body, timeout=20)


def test_generate_streaming_says_what_is_wrong(server: TritonServer) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(server, "tensorrt_llm_bls", "generate_stream", GOOD | {"stream": True, "top_p": 1.5})
    assert caught.value.code == 400
    assert b"top_p is 1.5" in caught.value.read()


def test_the_server_serves_on(server: TritonServer, offline: LLM) -> None:
    wait_until_idle(server)
    each = case(4)
    for model in ("ensemble", "tensorrt_llm_bls"):
        assert text(call(server, model, each.text_inputs())) == expected_text(each.expected(offline))
