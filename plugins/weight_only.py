"""int8 and int4 weights: stored in few bits, multiplied as the numbers that they stand for; inputs stay as they are.

int8: one scale a row (symmetric), q in -127..127, w = q * scale. int4: one scale and one offset for each GROUP
neighbouring columns of a row (asymmetric), q in 0..15, w = q * scale + offset, where offset is the group's smallest
weight: the form of GGUF's Q4_1 blocks, which therefore lose nothing but the rounding of a float16. Two int4 numbers
share a byte: byte j of a row holds column 2j in its low half and column 2j + 1 in its high half.
"""

import torch

GROUP = 32
INT8_MAX = 127
INT4_MAX = 15


def int8_scales(weight: torch.Tensor) -> torch.Tensor:
    """Scales [rows] of a float32 matrix [rows, columns]: its largest magnitudes over 127; 1 where a row is zero."""
    largest = weight.abs().amax(dim=1)
    return torch.where(largest > 0, largest / INT8_MAX, 1.0)


def int4_scales(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and offsets, float16 [rows, columns / GROUP], that spread 0..15 from each group's least to its largest."""
    groups = weight.view(len(weight), -1, GROUP)
    least, largest = groups.aminmax(dim=2)
    return ((largest - least) / INT4_MAX).half(), least.half()


def to_int8(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The nearest int8 numbers [rows, columns]."""
    return (weight / scales[:, None]).round_().clamp_(-INT8_MAX, INT8_MAX).to(torch.int8)


def from_int8(data: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What int8 numbers [rows, columns] stand for, rounded once from at least float32."""
    wide = torch.promote_types(dtype, torch.float32)
    return (data.to(wide) * scales[:, None].to(wide)).to(dtype)


def to_int4(weight: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """The nearest int4 numbers as bytes [rows, columns / 2]."""
    groups = weight.view(len(weight), -1, GROUP) - offsets[:, :, None].float()
    steps = scales[:, :, None].float()
    numbers = torch.where(steps > 0, groups / steps, 0.0).round_().clamp_(0, INT4_MAX).to(torch.uint8).flatten(1)
    return numbers[:, ::2] | numbers[:, 1::2] << 4


def from_int4(data: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What int4 numbers stand for, [rows, columns], rounded once from at least float32."""
    wide = torch.promote_types(dtype, torch.float32)
    numbers = torch.stack([data & 0xF, data >> 4], dim=2).flatten(1)
    groups = numbers.view(len(data), -1, GROUP).to(wide)
    return (groups * scales[:, :, None].to(wide) + offsets[:, :, None].to(wide)).flatten(1).to(dtype)
