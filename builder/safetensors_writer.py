"""Writing a safetensors file tensor by tensor, so that no more than one piece of one tensor is ever in memory."""

import errno
import hashlib
import json
import math
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import torch

from magicdec.errors import BuildError
from magicdec.pair.manifest import FileRecord

_CODES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int8: "I8",
    torch.uint8: "U8",
}
Entry = tuple[str, tuple[int, ...], torch.dtype]  # name, shape, dtype


class SafetensorsWriter:
    """Writes the header from the planned names, shapes and dtypes, then takes the data in that order, hashing it.

    A context manager, which writes the header as it is entered. `write` takes the next elements of the file, in
    whatever pieces; `close` returns size and SHA-256, and asserts that exactly what was planned has been written.
    Readers want each tensor at a multiple of its dtype's size: give the widest first. BuildError when the disk is full.
    """

    def __init__(self, path: Path, tensors: Sequence[Entry]) -> None:
        self._path = path
        self._hash = hashlib.sha256()
        self._written = 0
        self._header = _header(tensors)
        self._size = len(self._header) + sum(math.prod(shape) * dtype.itemsize for _, shape, dtype in tensors)

    def write(self, tensor: torch.Tensor) -> None:
        """Append a tensor's elements, row by row."""
        if tensor.numel():
            self._write(tensor.contiguous().view(torch.uint8).reshape(-1).numpy().data)

    def close(self) -> FileRecord:
        assert self._written == self._size, f"{self._path}: {self._written} bytes written, {self._size} planned"
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        except OSError as error:
            raise write_error(self._path, error) from error
        return FileRecord(bytes=self._size, sha256=self._hash.hexdigest())

    def __enter__(self) -> "SafetensorsWriter":
        try:
            self._file = self._path.open("wb")
        except OSError as error:
            raise write_error(self._path, error) from error
        try:
            self._write(memoryview(self._header))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        # After a failed write closing would fail once more, and hide the first error.
        with suppress(OSError):
            self._file.close()

    def _write(self, data: memoryview) -> None:
        try:
            write_bytes(self._file, data)
        except OSError as error:
            raise write_error(self._path, error) from error
        self._hash.update(data)
        self._written += data.nbytes


def write_bytes(file: BinaryIO, data: memoryview) -> None:
    """The one place where weights go to disk."""
    file.write(data)


def write_error(path: Path, error: OSError) -> BuildError:
    """The error to raise when writing `path` failed."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return BuildError(f"The disk is full: {path} could not be written. Free some space, or give another --output.")
    return BuildError(f"{path} could not be written: {error}")


def _header(tensors: Sequence[Entry]) -> bytes:
    """Eight bytes with the header's length, then JSON padded with spaces so that the data starts 8-byte aligned."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape, dtype in tensors:
        assert offset % dtype.itemsize == 0, (name, offset)
        end = offset + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
