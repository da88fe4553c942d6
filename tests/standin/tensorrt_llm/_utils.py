"""Small helpers, by their real names."""

import os
from typing import Any

import tensorrt as trt
import torch

_TYPES = {
    "float32": trt.float32,
    "float16": trt.float16,
    "bfloat16": trt.bfloat16,
    "fp8": trt.fp8,
    "int8": trt.int8,
    "int32": trt.int32,
    "int64": trt.int64,
}
TORCH = {
    trt.float32: torch.float32,
    trt.float16: torch.float16,
    trt.bfloat16: torch.bfloat16,
    trt.fp8: torch.float8_e4m3fn,
    trt.int32: torch.int32,
    trt.int64: torch.int64,
}


def str_dtype_to_trt(dtype: str) -> Any:
    return _TYPES[dtype]


def pad_vocab_size(vocab_size: int, tp_size: int) -> int:
    return -(-vocab_size // tp_size) * tp_size


def get_sm_version() -> int:
    """90 (H100) unless a test says otherwise; child processes inherit it. "die": the process does, as if killed."""
    version = os.environ.get("MAGICDEC_STANDIN_SM", "90")
    if version == "die":
        os._exit(9)
    return int(version)
