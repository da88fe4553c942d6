"""Calls to a server with the real client library."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any, NamedTuple

import aiohttp
import numpy as np
import tritonclient.grpc as grpc
import tritonclient.grpc.aio as grpc_aio
from numpy.typing import NDArray
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from tests.runtime.triton_backend.server import TritonServer

Value = Any
SECONDS = 60
_FLOATS = (
    *("temperature", "top_p", "runtime_top_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("length_penalty", "len_penalty", "embedding_bias", "embedding_bias_weights"),
)
# Whole numbers are 32-bit unless they are named here.
_TYPES: dict[str, Any] = {"seed": np.uint64, **dict.fromkeys(_FLOATS, np.float32)}


class Response(NamedTuple):
    """One response: its tensors, or its error."""

    tensors: dict[str, NDArray[Any]]
    error: str | None = None


def arrays(values: Mapping[str, Value]) -> dict[str, NDArray[Any]]:
    """Inputs of one request: plain values become [1, 1], lists [1, N]; arrays stay."""
    return {name: _array(name, value) for name, value in values.items()}


def _array(name: str, value: Value) -> NDArray[Any]:
    if isinstance(value, np.ndarray):
        return value
    items = value if isinstance(value, list) else [value]
    if all(isinstance(each, str) for each in items):
        return np.array([[each.encode() for each in items]], np.object_)
    if all(isinstance(each, bool) for each in items):
        return np.array([items])
    return np.array([items], _TYPES.get(name, np.int32))


def infer_inputs(values: Mapping[str, Value], module: Any = grpc) -> list[Any]:
    """As the client library takes them."""
    inputs = []
    for name, array in arrays(values).items():
        tensor = module.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    return inputs


async def stream(
    server: TritonServer, model: str, values: Mapping[str, Value], *, request_id: str = "", timeout: int | None = None
) -> AsyncIterator[Response]:
    """Responses of one request over a gRPC stream of its own; leaving early cancels it. timeout: microseconds."""

    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield {
            "model_name": model,
            "inputs": infer_inputs(values),
            "request_id": request_id,
            "timeout": timeout,
            "enable_empty_final_response": True,
        }

    async with grpc_aio.InferenceServerClient(server.grpc) as client:
        answers = client.stream_infer(requests(), stream_timeout=SECONDS)
        ended = False
        try:
            async for result, error in answers:
                if error is not None:
                    yield Response({}, error.message())
                elif (message := result.get_response()).outputs:
                    yield Response({each.name: result.as_numpy(each.name) for each in message.outputs})
            ended = True
        finally:
            if not ended:
                answers.cancel()


async def left_stream(server: TritonServer, model: str, values: Mapping[str, Value], num_events: int) -> list[Any]:
    """The first events of a stream over HTTP, whose client then closes the connection.

    Not over gRPC: there Triton 2.51 now and then crashes when a stream is cancelled.
    """
    events: list[Any] = []
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(SECONDS)) as session,
        session.post(f"http://{server.http}/v2/models/{model}/generate_stream", json=dict(values)) as answer,
    ):
        while len(events) < num_events:
            line = await answer.content.readline()
            if line.startswith(b"data: "):
                events.append(json.loads(line.removeprefix(b"data: ")))
        answer.close()
    return events


async def collect(server: TritonServer, model: str, values: Mapping[str, Value], **options: Any) -> list[Response]:
    """All responses of a request."""
    return [response async for response in stream(server, model, values, **options)]


def call(server: TritonServer, model: str, values: Mapping[str, Value], **options: Any) -> list[Response]:
    """All responses of a request."""
    return asyncio.run(collect(server, model, values, **options))


def error_of(server: TritonServer, model: str, values: Mapping[str, Value], **options: Any) -> str:
    """The text of the error that a request gets."""
    try:
        responses = call(server, model, values, **options)
    except InferenceServerException as error:
        return str(error.message())
    assert responses[-1].error is not None, f"no error, but {responses}"
    return responses[-1].error


def token_ids(responses: list[Response]) -> list[int]:
    """All tokens of one streamed sequence."""
    _raise(responses)
    return [int(token) for each in responses for token in each.tensors["output_ids"].ravel()]


def text(responses: list[Response], name: str = "text_output") -> str:
    """The whole text of one streamed sequence."""
    _raise(responses)
    return b"".join(each.tensors[name].item() for each in responses).decode()


def _raise(responses: list[Response]) -> None:
    for each in responses:
        if each.error is not None:
            raise AssertionError(each.error)
