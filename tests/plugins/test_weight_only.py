"""int8 and int4 weights: what is stored, how far it is from what it stands for, and layers that multiply with it."""

import pytest
import torch

from magicdec.plugins.linear import DenseLinear, Embedding, Int4Linear, Int8Linear, load_linear
from magicdec.plugins.weight_only import GROUP, from_int4, from_int8, int4_scales, int8_scales, to_int4, to_int8

WEIGHT = torch.randn(48, 96, generator=torch.Generator().manual_seed(0))
ROWS = torch.randn(5, 96, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
BIAS = torch.randn(48, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def int4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    scales, offsets = int4_scales(weight)
    return to_int4(weight, scales, offsets), scales, offsets


def test_int8_errs_by_at_most_half_a_step() -> None:
    scales = int8_scales(WEIGHT)
    data = to_int8(WEIGHT, scales)
    assert (data.dtype, data.shape, scales.dtype, scales.shape) == (torch.int8, (48, 96), torch.float32, (48,))
    assert (data.abs().amax(dim=1) == 127).all(), "each row uses the whole range"
    error = (from_int8(data, scales, torch.float32) - WEIGHT).abs()
    assert (error <= scales[:, None] / 2 * 1.0001).all()


def test_int4_errs_by_at_most_half_a_step() -> None:
    data, scales, offsets = int4(WEIGHT)
    assert (data.dtype, data.shape) == (torch.uint8, (48, 48))
    assert (scales.dtype, scales.shape, offsets.dtype, offsets.shape) == (torch.float16, (48, 3)) * 2
    error = (from_int4(data, scales, offsets, torch.float32) - WEIGHT).view(48, 3, GROUP).abs()
    # The largest number of a group may lie beyond 15 steps by the rounding of scale and offset to float16.
    assert (error <= scales[:, :, None].float() / 2 + offsets[:, :, None].abs() * 2.0**-10).all()


def test_int4_numbers_lie_two_in_a_byte_the_even_column_low() -> None:
    data = torch.tensor([[0x21, 0xF0] + [0] * 14], dtype=torch.uint8)
    out = from_int4(data, torch.tensor([[0.5]]).half(), torch.tensor([[-2.0]]).half(), torch.float32)
    assert out[0, :4].tolist() == [0.5 - 2, 1.0 - 2, -2.0, 7.5 - 2]
    assert out.shape == (1, 32)


def test_a_groups_scale_serves_its_own_32_columns() -> None:
    data = torch.full((2, 32), 0x11, dtype=torch.uint8)
    scales = torch.tensor([[1, 2], [3, 4]]).half()
    offsets = torch.tensor([[10, 20], [30, 40]]).half()
    out = from_int4(data, scales, offsets, torch.float32)
    assert out[:, ::GROUP].tolist() == out[:, GROUP - 1 :: GROUP].tolist() == [[11, 22], [33, 44]]


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_what_is_stored_is_stored_again_as_it_is(kind: str) -> None:
    """Q4_1 blocks, whose scale and offset are float16, and any int8 row come through unchanged."""
    generator = torch.Generator().manual_seed(3)
    if kind == "int8":
        data = torch.randint(-127, 128, (8, 64), dtype=torch.int8, generator=generator)
        data[:, 5] = -127
        weight = from_int8(data, 2.0 ** -torch.arange(8.0), torch.float32)
        assert torch.equal(to_int8(weight, int8_scales(weight)), data)
    else:
        numbers = torch.randint(0, 256, (8, 32), dtype=torch.uint8, generator=generator)
        numbers[:, 3], numbers[:, 19] = 0xF0, 0xF0  # every group has a 0 and a 15
        scales, offsets = torch.rand(8, 2, generator=generator).half(), -torch.rand(8, 2, generator=generator).half()
        weight = from_int4(numbers, scales, offsets, torch.float64).float()
        assert all(torch.equal(*pair) for pair in zip(int4(weight), (numbers, scales, offsets), strict=True))


def test_rows_of_one_value_are_that_value() -> None:
    weight = torch.cat([torch.zeros(1, 32), torch.full((1, 32), 0.75)])
    assert torch.equal(from_int8(to_int8(weight, int8_scales(weight)), int8_scales(weight), torch.float32), weight)
    assert torch.equal(from_int4(*int4(weight), torch.float32), weight)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("biased", [False, True])
def test_a_layer_multiplies_with_what_its_numbers_stand_for(kind: str, dtype: torch.dtype, biased: bool) -> None:
    scales = int8_scales(WEIGHT)
    tensors = {"fc.weight": to_int8(WEIGHT, scales), "fc.weights_scaling_factor": scales}
    matrix = tensors["fc.weight"].double() * scales.double()[:, None]
    if kind == "int4":
        data, scales, offsets = int4(WEIGHT)
        tensors = {"fc.weight": data, "fc.weights_scaling_factor": scales, "fc.weights_offset": offsets}
        numbers = torch.stack([data % 16, data // 16], dim=-1).reshape(48, 96).double()
        matrix = numbers * scales.double().repeat_interleave(32, 1) + offsets.double().repeat_interleave(32, 1)
    if biased:
        tensors["fc.bias"] = BIAS.to(dtype)
    linear = load_linear(tensors, "fc.")
    assert isinstance(linear, Int8Linear if kind == "int8" else Int4Linear)
    out = linear(ROWS.to(dtype))
    expected = ROWS.to(dtype).double() @ matrix.T + (BIAS.to(dtype).double() if biased else 0)
    assert out.dtype == dtype
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]
    assert torch.allclose(out.double(), expected, rtol=tolerance, atol=10 * tolerance)


def test_layers_are_told_apart_by_how_they_are_stored() -> None:
    assert isinstance(load_linear({"fc.weight": WEIGHT}, "fc."), DenseLinear)


def test_an_embedding_gives_rows_in_the_type_of_the_computation() -> None:
    ids, scales = torch.tensor([3, 0, 3]), int8_scales(WEIGHT)
    assert torch.equal(Embedding(WEIGHT)(ids, torch.float64), WEIGHT[ids].double())
    table = to_int8(WEIGHT, scales)
    rows = Embedding(table, scales)(ids, torch.bfloat16)
    assert torch.equal(rows, (table[ids].float() * scales[ids][:, None]).bfloat16())
