"""FP8 in its E4M3 form: per-tensor scaled, one byte an element, as TensorRT-LLM and NVIDIA's FP8 units define it.

A tensor x is stored as round(x / scale) with scale = amax / 448, round to nearest even; what does not fit saturates at
+-448 (E4M3 has no infinity), NaN stays NaN (Micikevicius et al., arXiv 2209.05433).
"""

import torch

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0


def to_fp8(x: torch.Tensor, scale: float) -> torch.Tensor:
    """x / scale in E4M3, saturated. The division is a product with 1 / scale, as kernels do it."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * (1.0 / scale)).clamp_(-FP8_MAX, FP8_MAX).to(FP8)


def from_fp8(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """E4M3 numbers in a wider dtype, which holds each of them exactly; scales are the caller's.

    On a CPU by their bits, several times faster than PyTorch's conversion: E4M3 is a float16 with four exponent bits
    and seven mantissa bits fewer, so shifted by seven it is that float16 divided by 2^8.
    """
    if x.device.type != "cpu":
        return x.to(dtype)
    bits = x.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(-0x4080)
    nans = bits.bitwise_and(0x7F << 7) == 0x7F << 7  # before `bits`, which may be the result's own memory, is scaled
    return bits.view(torch.float16).to(dtype).mul_(256).masked_fill_(nans, torch.nan)
