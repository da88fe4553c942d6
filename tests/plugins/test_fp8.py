"""E4M3 numbers: rounding, saturation, exact reading, and the linear layer made of them."""

import itertools

import pytest
import torch

from magicdec.plugins.fp8 import FP8, FP8_MAX, from_fp8, to_fp8
from magicdec.plugins.linear import DenseLinear, Fp8Linear, load_linear, product_dtype

ALL = torch.arange(256, dtype=torch.uint8).view(FP8)
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def e4m3_numbers() -> list[float]:
    """All finite E4M3 numbers by the format's definition: sign, 4 exponent bits with bias 7, 3 mantissa bits."""
    positive = [
        (mantissa / 8 + (exponent > 0)) * 2.0 ** (max(exponent, 1) - 7)
        for exponent, mantissa in itertools.product(range(16), range(8))
        if (exponent, mantissa) != (15, 7)  # NaN
    ]
    return sorted({sign * number for sign in (1.0, -1.0) for number in positive})


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_is_read_exactly_and_nan_stays(dtype: torch.dtype) -> None:
    numbers = from_fp8(ALL, dtype)
    assert numbers.dtype == dtype
    assert torch.equal(numbers.nan_to_num(0), ALL.to(dtype).nan_to_num(0))
    assert torch.equal(numbers.isnan(), ALL.to(torch.float32).isnan())
    assert sorted(set(numbers[~numbers.isnan()].tolist())) == e4m3_numbers()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 0.037, 12.5])
def test_quantisation_is_pytorchs_conversion_bit_for_bit(dtype: torch.dtype, scale: float) -> None:
    x = (torch.randn(4096, generator=torch.Generator().manual_seed(0)) * 60 * scale).clamp(-440 * scale, 440 * scale)
    x = torch.cat([x, x * 1e-4, torch.zeros(1)]).to(dtype)
    wide = x.to(torch.promote_types(dtype, torch.float32))
    expected = (wide * (1 / scale)).to(FP8)
    assert torch.equal(to_fp8(x, scale).view(torch.uint8), expected.view(torch.uint8))


def test_rounding_is_to_the_nearest_number_and_to_even_between_two() -> None:
    numbers = torch.tensor(e4m3_numbers(), dtype=torch.float64)
    x = torch.empty(5000, dtype=torch.float64).uniform_(-448, 448, generator=torch.Generator().manual_seed(1))
    nearest = numbers[(x[:, None] - numbers).abs().argmin(1)]
    assert torch.equal(from_fp8(to_fp8(x, 1.0), torch.float64), nearest)
    halfway = torch.tensor([17.0, 19.0, -17.0, 2.0**-10, 3 * 2.0**-10])  # steps are 2 from 16 on, 2^-9 at the bottom
    assert from_fp8(to_fp8(halfway, 1.0), torch.float32).tolist() == [16.0, 20.0, -16.0, 0.0, 2 * 2.0**-9]


def test_what_does_not_fit_saturates_and_only_nan_is_nan() -> None:
    x = torch.tensor([449.0, 465.0, 1e30, torch.inf, -465.0, -torch.inf, torch.nan])
    assert from_fp8(to_fp8(x, 1.0), torch.float32).nan_to_num(7).tolist() == [448.0] * 4 + [-448.0] * 2 + [7.0]
    assert from_fp8(to_fp8(x[:3], 2.0), torch.float32).tolist() == [224.0, 240.0, FP8_MAX]


def layer(dtype: torch.dtype, scale: float = 0.25) -> tuple[Fp8Linear, torch.Tensor, torch.Tensor]:
    """A layer, E4M3 inputs times 0.5, and the exact product with the weights."""
    generator = torch.Generator().manual_seed(2)
    weight = to_fp8(torch.randn(24, 64, generator=generator) * 20, 1.0)
    rows = from_fp8(to_fp8(torch.randn(5, 64, generator=generator) * 20, 1.0), torch.float64) * 0.5
    bias = torch.randn(24, generator=generator).to(dtype)
    exact = rows @ from_fp8(weight, torch.float64).T * scale + bias.double()
    return Fp8Linear(from_fp8(weight, product_dtype(dtype)), scale, 0.5, bias), rows.to(dtype), exact


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 0.0), (torch.float32, 1e-6), (torch.bfloat16, 2**-7), (torch.float16, 2**-10)],
)
def test_linear_layer_multiplies_what_is_stored_by_both_scales(dtype: torch.dtype, tolerance: float) -> None:
    linear, rows, exact = layer(dtype)
    out = linear(rows)
    assert out.dtype == dtype
    assert (out.double() - exact).abs().max() <= tolerance * exact.abs().max()


def test_float64_products_do_not_depend_on_the_rows_beside_them() -> None:
    linear, rows, _ = layer(torch.float64)
    alone = torch.cat([linear(row[None]) for row in rows])
    assert torch.equal(alone, linear(rows))
    order = torch.randperm(64, generator=torch.Generator().manual_seed(3))
    shuffled = Fp8Linear(linear.weight[:, order], linear.weight_scale, linear.input_scale, linear.bias)
    assert torch.equal(shuffled(rows[:, order]), linear(rows))


def test_inputs_are_rounded_and_saturated_before_the_product() -> None:
    linear = Fp8Linear(torch.ones(1, 2), 1.0, 0.5)
    assert linear(torch.tensor([[8.4, 0.0], [1e6, 0.0], [1e6, -1e6]])).tolist() == [[8.0], [224.0], [0.0]]


def test_large_products_do_not_overflow_float16() -> None:
    linear = Fp8Linear(torch.full((1, 16), 448.0), 0.01, 0.01)
    assert linear(torch.full((1, 16), 4.48, dtype=torch.float16)).item() == pytest.approx(16 * 4.48**2, rel=1e-3)


def test_scales_decide_what_a_layer_is() -> None:
    weights = {"a.weight": torch.ones(2, 3)}
    assert isinstance(load_linear(weights, "a."), DenseLinear)
    scales = {"a.weights_scaling_factor": torch.tensor([2.0]), "a.activation_scaling_factor": torch.tensor([3.0])}
    linear = load_linear(weights | scales, "a.")
    assert isinstance(linear, Fp8Linear)
    assert (linear.weight_scale, linear.input_scale) == (2.0, 3.0)
