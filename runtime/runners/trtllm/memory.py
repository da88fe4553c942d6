"""Memory that a TensorRT engine is bound to: allocated once, on the host or the device, all on one stream."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from magicdec.errors import EngineError

Place = str  # "device" | "host"
ALIGNMENT = 256  # bytes; TensorRT's own demand on addresses


class Memory:
    """Allocates for one runner. On a CPU (allow_cpu, for a stand-in) both places are ordinary memory, nothing is async.

    `allocations` lists (address, bytes, "device" or "host") of everything allocated, which may never be freed before
    the runner is.
    """

    def __init__(self, device: str = "cuda", *, allow_cpu: bool = False) -> None:
        if torch.device(device).type != "cuda" and not allow_cpu:
            raise EngineError(
                f"device={device!r}: TensorRT engines run on NVIDIA GPUs; leave device out or use 'cuda', or build the "
                "pair with --backend torch"
            )
        self.device_name = torch.device(device)
        self.is_cuda = self.device_name.type == "cuda"
        self.allocations: list[tuple[int, int, Place]] = []
        self._stream = torch.cuda.Stream(self.device_name) if self.is_cuda else None  # type: ignore[no-untyped-call]

    def device(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Zeros on the device."""
        with self.on_stream():
            tensor = torch.zeros(*shape, dtype=dtype, device=self.device_name)
        self.register(tensor, "device")
        return tensor

    def host(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Zeros on the host, pinned so that copies can run beside the CPU."""
        tensor = torch.zeros(*shape, dtype=dtype, pin_memory=self.is_cuda)
        self.register(tensor, "host")
        return tensor

    def register(self, tensor: torch.Tensor, place: Place) -> None:
        """Note a tensor that someone else allocated."""
        self.allocations.append((tensor.data_ptr(), tensor.nbytes, place))

    @property
    def stream(self) -> int:
        """Handle of the stream that all work runs on; 0 on a CPU."""
        return int(self._stream.cuda_stream) if self._stream is not None else 0

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """Work that is issued inside runs on the stream, in order."""
        if self._stream is None:
            yield
            return
        with torch.cuda.device(self.device_name), torch.cuda.stream(self._stream):
            yield

    def mark(self) -> "Mark":
        """A point on the stream that can be waited for."""
        return Mark(self._stream)

    def take_over(self) -> None:
        """Work on our stream from here on comes after what PyTorch's current stream has been given so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device_name))

    def hand_over(self) -> None:
        """Work on PyTorch's current stream from here on comes after what our stream has been given so far."""
        if self._stream is not None:
            torch.cuda.current_stream(self.device_name).wait_stream(self._stream)

    def synchronize(self) -> None:
        """Wait until everything on the stream is done: for tokens that the host has to know."""
        if self._stream is not None:
            self._stream.synchronize()


class Mark:
    """A point on a stream, set again and again; waiting for one that was never set returns at once."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._stream = stream
        self._event = torch.cuda.Event() if stream is not None else None  # type: ignore[no-untyped-call]

    def set(self) -> None:
        """The point is after all that has been issued so far."""
        if self._event is not None:
            self._event.record(self._stream)

    def wait(self) -> None:
        """Block the host until the stream has come to the point."""
        if self._event is not None:
            self._event.synchronize()


class Staging:
    """Hands integers of one step to the device in a single copy, without waiting and without allocating.

    Each tensor is written to pinned host memory and has the same place in the device's mirror of it. There are two
    host buffers: the next step is written while the last one may still be read. A step is `begin`, `put` for each
    tensor, `upload`, and `end` when all that reads the host's part has been issued. size: int32 elements.
    """

    def __init__(self, memory: Memory, size: int) -> None:
        self._memory = memory
        self._hosts = [memory.host((size,), torch.int32) for _ in range(2)]
        self._marks = [memory.mark() for _ in range(2)]
        self._device = memory.device((size,), torch.int32)
        self._turn = 0
        self._used = 0

    def begin(self) -> None:
        """Start a step in the buffer that was used the step before last."""
        self._turn ^= 1
        self._marks[self._turn].wait()
        self._used = 0

    def put(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write an int32 tensor; returns its (host, device) homes. The device's is filled by `upload`."""
        start, stop = self._used, self._used + tensor.numel()
        assert stop <= self._hosts[0].numel(), "the staging memory was sized for less than the engine's limits"
        self._used = aligned(stop)
        home = self._hosts[self._turn][start:stop].view(tensor.shape)
        home.copy_(tensor)
        return home, self._device[start:stop].view(tensor.shape)

    def upload(self) -> None:
        """Copy all that was put since `begin`."""
        with self._memory.on_stream():
            self._device[: self._used].copy_(self._hosts[self._turn][: self._used], non_blocking=True)

    def end(self) -> None:
        """The host buffer is free again once the stream has come here."""
        self._marks[self._turn].set()


def aligned(count: int) -> int:
    """The next int32 element that may begin a tensor."""
    step = ALIGNMENT // 4
    return -(-count // step) * step
