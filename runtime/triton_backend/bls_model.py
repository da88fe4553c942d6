"""`tensorrt_llm_bls` as Triton's Python backend loads it: text in, text out, by calling the other models.

Unlike an ensemble it passes on that a client has left.
"""

import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray

from magicdec.errors import RequestError
from magicdec.runtime.triton_backend import wire
from magicdec.runtime.triton_backend.text import tensors as text_tensors

LLM: Final = "tensorrt_llm"
MAX_OPEN: Final = 512  # requests at a time, a thread each; more wait
PERIOD: Final = 0.1  # seconds between two looks for clients that have left
_IMAGES: Final = {tensor.name for tensor in text_tensors.IMAGE_INPUTS}


@dataclass(eq=False)
class Call:
    """A request that is being answered. child_id: of the request to `tensorrt_llm`."""

    tensors: Mapping[str, NDArray[Any]]
    timeout: int  # microseconds, 0 for none
    sender: wire.ResponseSender
    child_id: str
    stopped: bool = False

    def stop_if_cancelled(self) -> None:
        """Let `tensorrt_llm` end if the client has left."""
        if not self.stopped and self.sender.is_cancelled():
            self.stopped = True
            one = np.ones((1, 1), np.int32)
            inputs = {"input_lengths": one, "request_output_len": one, "stop": np.ones((1, 1), np.bool_)}
            for _ in _responses(LLM, inputs, ["output_ids"], self.child_id, decoupled=True):
                pass


class BLSModel:
    """A thread for each request that is open, and one that looks for clients that have left."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Called once by Triton. args: JSON of the configuration, and names."""
        self._decoupled = wire.is_decoupled(args)
        self._open: set[Call] = set()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._pool = ThreadPoolExecutor(MAX_OPEN, thread_name_prefix="magicdec-bls")
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def execute(self, requests: Sequence[Any]) -> None:
        """Start on requests; answers are sent as they come."""
        for request in requests:
            sender = wire.ResponseSender(request)
            try:
                call = Call(wire.read_tensors(request), request.timeout(), sender, str(uuid.uuid4()))
            except Exception as error:  # raised from here it would end all requests
                sender.fail(error, final=True)
                continue
            with self._lock:
                self._open.add(call)
            self._pool.submit(self._answer, call)

    def finalize(self) -> None:
        """Called once by Triton, when the model is unloaded and no request is open."""
        self._closing.set()
        self._pool.shutdown()
        self._watcher.join()

    def _answer(self, call: Call) -> None:
        try:
            for response in self._responses(call):
                call.stop_if_cancelled()
                self._pass_on(response, call.sender)
            if self._decoupled:
                call.sender.end()
        except Exception as error:
            call.sender.fail(error, final=True)
        finally:
            with self._lock:
                self._open.discard(call)

    def _responses(self, call: Call) -> Iterator[Any]:
        """Of `tensorrt_llm`."""
        for name in call.tensors:
            if name in _IMAGES:
                raise RequestError(f"input {name} is not supported: this model reads text alone")
        prepared = _preprocess(call.tensors)
        given = {to: prepared[name] for to, name in text_tensors.FROM_PREPROCESSING.items()}
        given |= {to: call.tensors[name] for to, name in text_tensors.TO_LLM.items() if name in call.tensors}
        wanted = [*text_tensors.FROM_LLM, wire.ERROR]
        return _responses(LLM, given, wanted, call.child_id, decoupled=self._decoupled, timeout=call.timeout)

    def _pass_on(self, response: Any, sender: wire.ResponseSender) -> None:
        """The last response of many has no tensors."""
        final = not self._decoupled
        if response.has_error():
            sender.fail_as(response.error(), final=final)
            return
        tensors = {each.name(): each.as_numpy() for each in response.output_tensors()}
        if wire.ERROR in tensors:
            sender.fail(RequestError(tensors[wire.ERROR].item().decode()), final=final)
        elif tensors:
            sender.send({text_tensors.FROM_LLM[name]: array for name, array in tensors.items()}, final=final)

    def _watch(self) -> None:
        while not self._closing.wait(PERIOD):
            with self._lock:
                calls = list(self._open)
            for call in calls:
                call.stop_if_cancelled()


def _preprocess(tensors: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    given = {to: tensors[name] for to, name in text_tensors.TO_PREPROCESSING.items() if name in tensors}
    wanted = [tensor.name for tensor in text_tensors.PREPROCESSING_OUTPUTS]
    (response,) = _responses("preprocessing", given, wanted, "", decoupled=False)
    if response.has_error():
        raise RequestError(response.error().message())
    return {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}


def _responses(
    model: str,
    inputs: Mapping[str, NDArray[Any]],
    outputs: Sequence[str],
    request_id: str,
    *,
    decoupled: bool,
    timeout: int = 0,
) -> Iterator[Any]:
    """Call another model and wait for each of its responses."""
    request = pb_utils.InferenceRequest(
        model_name=model,
        request_id=request_id,
        inputs=[pb_utils.Tensor(name, array) for name, array in inputs.items()],
        requested_output_names=list(outputs),
        timeout=timeout,
        parameters={wire.ERRORS_AS_OUTPUT: decoupled},
    )
    if decoupled:
        yield from request.exec(decoupled=True)
    else:
        yield request.exec()
