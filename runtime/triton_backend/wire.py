"""Between Triton's Python backend and plain arrays. Imported inside of Triton alone, which provides `pb_utils`."""

import json
import threading
from collections.abc import Container, Mapping
from typing import Any, Final

import numpy as np
import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray

from magicdec.errors import MagicDecError, NotReadyError, QueueFullError, RequestError
from magicdec.runtime.triton_backend.sender import DeadlineError, Tensors

_FINAL: Final[int] = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
_MICROSECONDS: Final = 1e-6
# A model that calls another one gets no error of it but the first response's: with this parameter of the request its
# errors come as an output.
ERRORS_AS_OUTPUT: Final = "errors_as_output"
ERROR: Final = "error"


def read_tensors(request: Any) -> dict[str, NDArray[Any]]:
    """The inputs that a request gives; copies, since Triton's memory is the request's."""
    return {tensor.name(): tensor.as_numpy().copy() for tensor in request.inputs()}


def read_timeout(request: Any) -> float | None:
    """Seconds that a request's `timeout` gives it; None for no limit."""
    return request.timeout() * _MICROSECONDS or None


def response(tensors: Tensors, wanted: Container[str]) -> Any:
    """An answer of those tensors that are wanted.

    What a request does not ask for, Triton would drop in a thread that does not hold Python's lock.
    """
    return pb_utils.InferenceResponse(
        [pb_utils.Tensor(name, array) for name, array in tensors.items() if name in wanted]
    )


def error_response(error: Exception) -> Any:
    """A refusal or a failure."""
    return pb_utils.InferenceResponse([], pb_utils.TritonError(_error_text(error), _code(error)))


def parameters(config: str) -> dict[str, str]:
    """The parameters of a model's configuration that are filled in."""
    given = {name: value["string_value"] for name, value in json.loads(config)["parameters"].items()}
    return {name: value for name, value in given.items() if value and not value.startswith("${")}


def new_metric_family(name: str, description: str, kind: str) -> Any:
    """A family of series on Triton's metrics endpoint; kind: counter, gauge or histogram."""
    return pb_utils.MetricFamily(name, description, getattr(pb_utils.MetricFamily, kind.upper()))


def is_decoupled(args: Mapping[str, str]) -> bool:
    """Whether a model may answer a request with any number of responses."""
    policy = json.loads(args["model_config"]).get("model_transaction_policy", {})
    return bool(policy.get("decoupled", False))


class ResponseSender:
    """A `Sender` for one request. Triton crashes when it is asked about a request that has been answered in full.

    One thread at a time talks to Triton's own process: with several, answers have got lost.
    """

    _lock: Final = threading.Lock()

    def __init__(self, request: Any) -> None:
        self._sender = request.get_response_sender()
        self._wanted = frozenset(request.requested_output_names())
        self._errors_as_output = bool(json.loads(request.parameters() or "{}").get(ERRORS_AS_OUTPUT))
        self._ended = False

    def send(self, tensors: Tensors, *, final: bool) -> None:
        """An answer."""
        self._forward(response(tensors, self._wanted), final=final)

    def end(self) -> None:
        """Say that the last of many answers has gone."""
        self._forward(None, final=True)

    def fail(self, error: Exception, *, final: bool) -> None:
        """An error."""
        if self._errors_as_output:
            self.send({ERROR: _error_tensor(error)}, final=final)
        else:
            self._forward(error_response(error), final=final)

    def fail_as(self, error: Any, *, final: bool) -> None:
        """Another model's error, of Triton's own kind."""
        self._forward(pb_utils.InferenceResponse([], error), final=final)

    def _forward(self, answer: Any, *, final: bool) -> None:
        """A response of Triton's own kind, or None."""
        with self._lock:
            assert not self._ended, "nothing is sent after what was final"
            self._ended = final
            arguments = () if answer is None else (answer,)
            self._sender.send(*arguments, flags=_FINAL if final else 0)

    def is_cancelled(self) -> bool:
        """Whether the client has left before the end."""
        with self._lock:
            return not self._ended and bool(self._sender.is_cancelled())


def _error_text(error: Exception) -> str:
    return str(error) if isinstance(error, MagicDecError) else f"{type(error).__name__}: {error}"


def _error_tensor(error: Exception) -> NDArray[Any]:
    return np.array([[_error_text(error).encode()]], np.object_)


def _code(error: Exception) -> int:
    codes: Mapping[type[Exception], int] = {
        RequestError: pb_utils.TritonError.INVALID_ARG,
        QueueFullError: pb_utils.TritonError.UNAVAILABLE,
        NotReadyError: pb_utils.TritonError.UNAVAILABLE,
        DeadlineError: pb_utils.TritonError.UNAVAILABLE,
    }
    return next((code for kind, code in codes.items() if isinstance(error, kind)), pb_utils.TritonError.INTERNAL)
