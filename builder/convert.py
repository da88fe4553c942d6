"""From a source's tensors to one rank file of a TensorRT-LLM checkpoint, a piece at a time."""

from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from magicdec.builder.safetensors_writer import SafetensorsWriter
from magicdec.builder.shard import OutputTensor, Piece, plan_rank
from magicdec.builder.source import TensorSource
from magicdec.errors import CheckpointError
from magicdec.runtime.manifest import DtypeName, FileRecord

# Elements in memory at a time: 64 MiB of float32. Peak memory is a small multiple of it, whatever the model's size.
CHUNK_ELEMENTS = 1 << 24
TORCH_DTYPES: dict[DtypeName, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


def write_rank(
    source: TensorSource,
    path: Path,
    *,
    rank: int,
    tp_size: int,
    dtype: torch.dtype,
    on_bytes: Callable[[int], None] | None = None,
) -> FileRecord:
    """Write rank{rank}.safetensors in `dtype`; on_bytes is told the size of each piece written.

    CheckpointError where a weight is not a finite number in `dtype`, BuildError where the disk is full.
    """
    plan = plan_rank(source.spec, rank, tp_size)
    with SafetensorsWriter(path, [(tensor.name, tensor.shape) for tensor in plan], dtype) as writer:
        for output in plan:
            for piece in _chunks(output):
                data = _read(source, piece, output, dtype)
                writer.write(data)
                if on_bytes is not None:
                    on_bytes(data.nbytes)
        return writer.close()


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
