"""A TensorRT engine with an execution context of our own: profiles, shapes, addresses, and nothing about models."""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import torch

from magicdec.errors import EngineError
from magicdec.runtime.runners.trtllm.memory import Memory

TRTLLM_VERSION: Final = "1.2.1"
_DTYPES: Final = {
    "INT32": torch.int32,
    "INT64": torch.int64,
    "FLOAT": torch.float32,
    "HALF": torch.float16,
    "BF16": torch.bfloat16,
}

Shape = tuple[int, ...]
Bounds = tuple[Shape, Shape]  # smallest and largest shape


def import_tensorrt() -> tuple[Any, Any]:
    """(tensorrt_llm, tensorrt); importing the first also loads the plugins that the engines are made of."""
    try:
        return import_module("tensorrt_llm"), import_module("tensorrt")
    except ImportError as error:
        raise EngineError(
            f"this engine was compiled by TensorRT-LLM, which cannot be imported here ({error}); on a machine with an "
            f"NVIDIA GPU install tensorrt-llm=={TRTLLM_VERSION} (pip install 'magicdec[trtllm]'), or build the pair "
            "with --backend torch"
        ) from error


class TrtSession:
    """Loads one rank's engine and executes it on the memory's stream."""

    def __init__(self, path: Path, memory: Memory) -> None:
        _, self._trt = import_tensorrt()
        self._path = path
        self._memory = memory
        runtime = self._trt.Runtime(self._trt.Logger(self._trt.Logger.WARNING))
        try:
            data = path.read_bytes()
        except OSError as error:
            raise EngineError(f"{path} cannot be read: {error}; build the pair again with build-engine") from error
        with memory.on_stream():  # on its device
            self._engine = runtime.deserialize_cuda_engine(data)
        if self._engine is None:
            raise EngineError(
                f"{path} is no engine for this machine: TensorRT engines run only on the kind of GPU and with the "
                "versions that they were compiled with; compile the pair here with build-engine --backend trtllm"
            )
        names = [self._engine.get_tensor_name(index) for index in range(self._engine.num_io_tensors)]
        is_input = {name: self._engine.get_tensor_mode(name) == self._trt.TensorIOMode.INPUT for name in names}
        self.inputs = frozenset(name for name in names if is_input[name])
        self.outputs = frozenset(name for name in names if not is_input[name])
        self.profiles = [self._bounds(index) for index in range(self._engine.num_optimization_profiles)]
        with memory.on_stream():
            self._context = self._engine.create_execution_context()
        self._profile: int | None = None

    def largest(self, name: str) -> Shape:
        """An input's largest shape over all profiles."""
        return max(profile[name][1] for profile in self.profiles)

    def smallest(self, name: str) -> Shape:
        """An input's smallest shape over all profiles."""
        return min(profile[name][0] for profile in self.profiles)

    def output_width(self, name: str) -> int:
        """The last dimension of an output."""
        return int(tuple(self._engine.get_tensor_shape(name))[-1])

    def dtype(self, name: str) -> torch.dtype:
        """Type of an input or output."""
        kind = self._engine.get_tensor_dtype(name)
        for label, dtype in _DTYPES.items():
            if kind == getattr(self._trt.DataType, label):
                return dtype
        raise EngineError(f"{self._path}: tensor {name} is of type {kind}, which is not supported")

    def run(self, inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]) -> None:
        """Issue one execution; it is done when the memory's stream is.

        inputs: every input of the engine, in its own place. outputs: tensors at least as large as what is written.
        """
        self._select({name: tuple(tensor.shape) for name, tensor in inputs.items()})
        for name, tensor in inputs.items():
            if not self._context.set_input_shape(name, tuple(tensor.shape)):
                raise EngineError(f"{self._path} refuses the shape {tuple(tensor.shape)} for {name}")
            self._context.set_tensor_address(name, tensor.data_ptr())
        for name, tensor in outputs.items():
            self._context.set_tensor_address(name, tensor.data_ptr())
        if missing := self._context.infer_shapes():
            raise EngineError(f"{self._path}: shapes of {', '.join(missing)} are not known")
        with self._memory.on_stream():
            issued = self._context.execute_async_v3(self._memory.stream)
        if not issued:
            raise EngineError(f"{self._path} could not be executed; TensorRT's log says why")

    def _select(self, shapes: Mapping[str, Shape]) -> None:
        """Switch to the tightest profile that takes these shapes, the one that was tuned for the fewest tokens."""
        fitting = [index for index, profile in enumerate(self.profiles) if _fits(shapes, profile)]
        if not fitting:
            outside = [f"{name} {shape}" for name, shape in shapes.items() if not self._taken(name, shape)]
            raise EngineError(f"no optimisation profile of {self._path} takes this step: {', '.join(outside)}")
        best = min(fitting, key=lambda index: self.profiles[index]["input_ids"][1])
        if best != self._profile:
            self._context.set_optimization_profile_async(best, self._memory.stream)
            self._profile = best

    def _taken(self, name: str, shape: Shape) -> bool:
        return any(_fits({name: shape}, profile) for profile in self.profiles)

    def _bounds(self, index: int) -> dict[str, Bounds]:
        bounds = {}
        for name in self.inputs:
            low, _, high = self._engine.get_tensor_profile_shape(name, index)
            bounds[name] = (tuple(low), tuple(high))
        return bounds


def _fits(shapes: Mapping[str, Shape], profile: Mapping[str, Bounds]) -> bool:
    for name, shape in shapes.items():
        low, high = profile[name]
        if len(shape) != len(low) or any(not a <= n <= b for a, n, b in zip(low, shape, high, strict=True)):
            return False
    return True
