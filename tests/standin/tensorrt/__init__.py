"""Stand-in for `tensorrt` 10: enough to load an engine and to execute it, by address, on CPU memory."""

import enum
from collections.abc import Sequence
from typing import Any

import torch

from .collectives import standin_collective
from .execute import execute
from .graph import TORCH_DTYPES, Graph, Port
from .memory import StandinError, forget_memories, look, standin_memory

__version__ = "10.14.1"
__all__ = ["StandinError", "forget_memories", "standin_collective", "standin_memory"]


class DataType(enum.Enum):
    """Types of tensors."""

    FLOAT = 0
    HALF = 1
    INT8 = 2
    INT32 = 3
    BOOL = 4
    UINT8 = 5
    FP8 = 6
    BF16 = 7
    INT64 = 8


float32, float16, bfloat16 = DataType.FLOAT, DataType.HALF, DataType.BF16
int8, int32, int64, fp8, bool = DataType.INT8, DataType.INT32, DataType.INT64, DataType.FP8, DataType.BOOL


class TensorIOMode(enum.Enum):
    """Direction of a tensor."""

    NONE = 0
    INPUT = 1
    OUTPUT = 2


class TensorLocation(enum.Enum):
    """Where TensorRT itself looks at a tensor: plugins' host_* inputs are DEVICE here, as in the real one."""

    DEVICE = 0
    HOST = 1


class Logger:
    """Takes messages; keeps none."""

    INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = range(5)

    def __init__(self, min_severity: int = WARNING) -> None:
        self.min_severity = min_severity


class Runtime:
    """Loads engines."""

    def __init__(self, logger: Logger) -> None:
        assert isinstance(logger, Logger)

    def deserialize_cuda_engine(self, serialized_engine: bytes) -> "ICudaEngine | None":
        """None, as in the real one, where the bytes are no engine."""
        try:
            return ICudaEngine(Graph.deserialize(bytes(serialized_engine)))
        except ValueError:
            return None


class ICudaEngine:
    """A loaded engine; tensors are found by name."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._ports = {port.name: port for port in [*graph.inputs, *graph.outputs]}
        self._contexts = 0

    @property
    def num_io_tensors(self) -> int:
        return len(self._ports)

    @property
    def num_optimization_profiles(self) -> int:
        return len(self._graph.inputs[0].profiles)

    def get_tensor_name(self, index: int) -> str:
        return list(self._ports)[index]

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        return TensorIOMode.INPUT if self._port(name) in self._graph.inputs else TensorIOMode.OUTPUT

    def get_tensor_dtype(self, name: str) -> DataType:
        return DataType[self._port(name).dtype]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._port(name).shape)

    def get_tensor_location(self, name: str) -> TensorLocation:
        self._port(name)
        return TensorLocation.DEVICE

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[tuple[int, ...]]:
        """[min, opt, max] of an input."""
        return [tuple(shape) for shape in self._input(name).profiles[profile_index]]

    def create_execution_context(self) -> "IExecutionContext":
        self._contexts += 1
        return IExecutionContext(self, first=self._contexts == 1)

    def _port(self, name: str) -> Port:
        if name not in self._ports:
            raise StandinError(f"the engine has no tensor {name!r}; it has {sorted(self._ports)}")
        return self._ports[name]

    def _input(self, name: str) -> Port:
        if self._port(name) not in self._graph.inputs:
            raise StandinError(f"{name} is no input")
        return self._port(name)


class IExecutionContext:
    """Shapes and addresses of one execution. The first context of an engine starts with profile 0, others with none."""

    def __init__(self, engine: ICudaEngine, *, first: Any) -> None:
        self.engine = engine
        self._profile: int | None = 0 if first else None
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> Any:
        """Choose a profile; all input shapes have to be set again."""
        assert isinstance(stream_handle, int)
        if not 0 <= profile_index < self.engine.num_optimization_profiles:
            raise StandinError(f"profile {profile_index} of {self.engine.num_optimization_profiles}")
        self._profile = profile_index
        self._shapes.clear()
        return True

    def set_input_shape(self, name: str, shape: Sequence[int]) -> Any:
        """StandinError where the profile does not hold the shape (the real one returns False and logs)."""
        port = self.engine._input(name)
        if self._profile is None:
            raise StandinError("no optimization profile is selected")
        low, _, high = port.profiles[self._profile]
        shape = tuple(int(size) for size in shape)
        if len(shape) != len(low) or any(not a <= n <= b for n, a, b in zip(shape, low, high, strict=True)):
            raise StandinError(
                f"{name}: shape {list(shape)} is not between {low} and {high} of profile {self._profile}"
            )
        self._shapes[name] = shape
        return True

    def set_tensor_address(self, name: str, memory: int) -> Any:
        """memory: a device address, or a host address for host_* tensors."""
        self.engine._port(name)
        if not isinstance(memory, int) or memory == 0:
            raise StandinError(f"{name}: {memory!r} is no address")
        self._addresses[name] = memory
        return True

    def infer_shapes(self) -> list[str]:
        """Names of the inputs whose shapes are missing; [] if all is known."""
        return [port.name for port in self.engine._graph.inputs if port.name not in self._shapes]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        """As set, or as it follows from the inputs."""
        port = self.engine._port(name)
        if name in self._shapes or self.engine.get_tensor_mode(name) == TensorIOMode.INPUT:
            return self._shapes.get(name, tuple(port.shape))
        rows = "last_token_ids" if "last_token_ids" in self.engine._ports else "input_ids"
        return (self._shapes.get(rows, (-1,))[0], *port.shape[1:])

    def execute_async_v3(self, stream_handle: int) -> Any:
        """Run now; every input and output must have its shape and address."""
        assert isinstance(stream_handle, int)
        graph = self.engine._graph
        missing = self.infer_shapes() or [name for name in self.engine._ports if name not in self._addresses]
        if missing:
            raise StandinError(f"shape or address is missing of {missing}")
        inputs = {port.name: self._tensor(port, self._shapes[port.name]).clone() for port in graph.inputs}
        self._check_sizes()
        outputs = {port.name: self._tensor(port, self.get_tensor_shape(port.name)) for port in graph.outputs}
        with torch.inference_mode():
            for name, result in execute(graph, inputs).items():
                assert outputs[name].shape == result.shape, (name, outputs[name].shape, result.shape)
                outputs[name].copy_(result)
        return True

    def _check_sizes(self) -> None:
        """Dimensions that share one size in the network."""
        batch = {
            name: self._shapes[name][axis]
            for name, axis in (
                ("host_request_types", 0),
                ("context_lengths", 0),
                ("host_context_lengths", 0),
                ("sequence_length", 0),
                ("host_past_key_value_lengths", 0),
                ("kv_cache_block_offsets", 1),
                ("host_kv_cache_block_offsets", 1),
            )
        }
        tokens = {name: self._shapes[name][0] for name in ("input_ids", "position_ids")}
        for sizes in (batch, tokens):
            if len(set(sizes.values())) != 1:
                raise StandinError(f"sizes differ: {sizes}")

    def _tensor(self, port: Port, shape: Sequence[int]) -> torch.Tensor:
        place = "host" if port.name.startswith("host_") else "device"
        return look(self._addresses[port.name], shape, TORCH_DTYPES[port.dtype], place, port.name)
