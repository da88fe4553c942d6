"""From a source's tensors to one rank file of a TensorRT-LLM checkpoint, a piece at a time."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

import torch

from magicdec.builder.checkpoints.source import TensorSource
from magicdec.builder.safetensors_writer import SafetensorsWriter
from magicdec.builder.shard import OutputTensor, Piece
from magicdec.builder.storage import Storage, StoredName, stored_tensors
from magicdec.errors import CheckpointError
from magicdec.pair.manifest import FileRecord
from magicdec.plugins.fp8 import FP8

# Elements in memory at a time: 64 MiB of float32. Peak memory is a small multiple of it, whatever the model's size.
CHUNK_ELEMENTS = 1 << 24
_STORED: dict[StoredName, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "fp8": FP8,
    "int8": torch.int8,
    "uint8": torch.uint8,
}


class Fp8Model(Protocol):
    """Scales by their names in a checkpoint, and what calibration made by the source's names."""

    @property
    def scales(self) -> Mapping[str, float]: ...

    def read(self, name: str, rows: tuple[int, int], columns: tuple[int, int] | None) -> torch.Tensor: ...


def write_rank(
    source: TensorSource,
    path: Path,
    *,
    rank: int,
    tp_size: int,
    storage: Storage,
    fp8: Fp8Model | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> FileRecord:
    """Write rank{rank}.safetensors as `storage` says; on_bytes is told the size of each piece written.

    fp8: scales and weights of the whole model, where something is stored in FP8. CheckpointError where a weight is not
    a finite number in its dtype, BuildError where the disk is full.
    """
    plan = stored_tensors(source.spec, rank, tp_size, storage)
    entries = [(tensor.name, tensor.shape, _STORED[tensor.dtype]) for tensor in plan]
    with SafetensorsWriter(path, entries) as writer:
        for tensor in plan:
            if tensor.data is None:
                assert fp8 is not None
                pieces = iter([torch.tensor([fp8.scales[tensor.name]], dtype=torch.float32)])
            elif tensor.calibrated:
                assert fp8 is not None
                pieces = _calibrated(fp8, tensor.data, _STORED[tensor.dtype])
            else:
                pieces = _pieces(source, tensor.data, _STORED[tensor.dtype])
            for data in pieces:
                writer.write(data)
                if on_bytes is not None:
                    on_bytes(data.nbytes)
        return writer.close()


def read_tensor(source: TensorSource, output: OutputTensor, dtype: torch.dtype) -> torch.Tensor:
    """One whole tensor of a rank file, in `dtype`."""
    return torch.cat(list(_pieces(source, output, dtype)))


def _pieces(source: TensorSource, output: OutputTensor, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    return (_read(source, piece, output, dtype) for piece in _chunks(output))


def _calibrated(fp8: Fp8Model, output: OutputTensor, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    for piece in _chunks(output):
        if piece.source is None:
            yield torch.zeros(piece.rows[1] - piece.rows[0], *output.shape[1:], dtype=dtype)
        else:
            yield fp8.read(piece.source, piece.rows, piece.columns).to(dtype)


def _chunks(output: OutputTensor) -> Iterator[Piece]:
    """The pieces of a tensor, cut into blocks of rows that fit in memory."""
    columns = output.shape[1] if len(output.shape) == 2 else 1
    step = max(CHUNK_ELEMENTS // columns, 1)
    for piece in output.pieces:
        start, stop = piece.rows
        for first in range(start, stop, step):
            yield Piece(piece.source, (first, min(first + step, stop)), piece.columns)


def _read(source: TensorSource, piece: Piece, output: OutputTensor, dtype: torch.dtype) -> torch.Tensor:
    if piece.source is None:
        return torch.zeros(piece.rows[1] - piece.rows[0], *output.shape[1:], dtype=dtype)
    tensor = source.read(piece.source, piece.rows, piece.columns)
    assert tensor.shape == (piece.rows[1] - piece.rows[0], *output.shape[1:]), (piece, tensor.shape)
    data = tensor.to(dtype)
    if not torch.isfinite(data).all():
        if torch.isfinite(tensor).all():
            largest = tensor.abs().max().item()
            mend = f"its largest weight {largest:g} is out of {dtype}'s range; use --dtype bfloat16 or float32."
        else:
            mend = "it holds NaN or infinity, so the checkpoint is damaged; copy or download it again."
        raise CheckpointError(f"{source.path}: tensor {piece.source}: {mend}")
    return data
