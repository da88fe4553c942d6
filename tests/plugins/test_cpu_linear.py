"""Native linear layers against float64, and a row's result bit by bit in any company."""

import ctypes
from collections.abc import Iterator

import pytest
import torch

from magicdec.errors import EngineError
from magicdec.plugins.cpu.library import ISAS, best_isa, native, set_isa
from magicdec.plugins.cpu.linear import PackedLinear, linear
from magicdec.plugins.fp8 import from_fp8, to_fp8
from magicdec.plugins.linear import DenseLinear, Fp8Linear, Int4Linear, Int8Linear, Linear
from magicdec.plugins.weight_only import from_int4, from_int8, int4_scales, int8_scales, to_int4, to_int8

FLOATS = ("float32", "bfloat16", "float16")
FORMATS = (*FLOATS, "int8", "int4", "fp8")
SHAPES = ((96, 576), (70, 1536), (5, 32))  # outputs, inputs


@pytest.fixture(params=ISAS)
def library(request: pytest.FixtureRequest) -> Iterator[ctypes.CDLL]:
    """The library on each instruction set that this CPU has."""
    library = native()
    if library is None:
        pytest.skip("the native library was not built")
    best = best_isa(library)
    try:
        set_isa(library, request.param)
    except EngineError:
        pytest.skip(f"no {request.param} here")
    yield library
    set_isa(library, best)
    library.magicdec_set_num_threads(torch.get_num_threads())


def layer(form: str, outputs: int, inputs: int, seed: int = 0) -> Linear:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, inputs, generator=generator) * inputs**-0.5
    bias = torch.randn(outputs, generator=generator)
    if form == "int8":
        scale = int8_scales(weight)
        return Int8Linear(to_int8(weight, scale), scale, bias)
    if form == "int4":
        scale, offset = int4_scales(weight)
        return Int4Linear(to_int4(weight, scale, offset), scale, offset, bias)
    if form == "fp8":
        scale = weight.abs().max().item() / 448
        return Fp8Linear(from_fp8(to_fp8(weight, scale), torch.bfloat16), scale, 0.01, bias)
    return DenseLinear(weight.to(getattr(torch, form)), bias.to(getattr(torch, form)))


def weights(layer: Linear) -> torch.Tensor:
    """What the layer's numbers stand for, in float64."""
    if isinstance(layer, Int8Linear):
        return from_int8(layer.weight, layer.scale, torch.float64)
    if isinstance(layer, Int4Linear):
        return from_int4(layer.weight, layer.scale, layer.offset, torch.float64)
    if isinstance(layer, Fp8Linear):
        return layer.weight.double() * layer.weight_scale * layer.input_scale
    assert isinstance(layer, DenseLinear)
    return layer.weight.double()


def product(layer: Linear, x: torch.Tensor, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """The layer's result in this type."""
    assert isinstance(layer, (DenseLinear, Fp8Linear, Int4Linear, Int8Linear))
    assert layer.bias is not None
    return x.to(dtype) @ weights(layer).to(dtype).T + layer.bias.to(dtype)


def rows(form: str, count: int, inputs: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    x = torch.randn(count, inputs, generator=torch.Generator().manual_seed(7))
    if form == "fp8":
        return from_fp8(to_fp8(x, 0.01), torch.bfloat16)
    return x.to(dtype or (getattr(torch, form) if form in FLOATS else torch.bfloat16))


def rms(x: torch.Tensor) -> float:
    return x.double().square().mean().sqrt().item()


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_errors_are_those_of_float32_sums(library: ctypes.CDLL, form: str, outputs: int, inputs: int) -> None:
    reference = layer(form, outputs, inputs)
    x = rows(form, 17, inputs)
    expected = product(reference, x)
    allowed = rms(product(reference, x, torch.float32) - expected)
    # A sum of bfloat16 products is one chain over all inputs; what follows rounds it to 8 bits.
    allowed *= 4 if form in ("bfloat16", "fp8") else 2
    assert rms(linear(library, PackedLinear([reference]), x) - expected) <= allowed


@pytest.mark.parametrize("form", FORMATS)
def test_a_row_has_its_bits_in_any_company(library: ctypes.CDLL, form: str) -> None:
    for outputs, inputs in SHAPES:
        matrix = PackedLinear([layer(form, outputs, inputs)])
        x = rows(form, 200, inputs)
        library.magicdec_set_num_threads(1)
        alone = torch.cat([linear(library, matrix, x[i : i + 1]) for i in range(30)])
        for threads in (1, 2, 3):
            library.magicdec_set_num_threads(threads)
            assert torch.equal(linear(library, matrix, x)[:30], alone)
            for count in (2, 5, 12, 13, 25):
                parts = [linear(library, matrix, part) for part in torch.split(x[:30], count)]
                assert torch.equal(torch.cat(parts), alone), (outputs, inputs, threads, count)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("form", ["bfloat16", "int8", "int4"])
def test_inputs_of_any_type(library: ctypes.CDLL, form: str, dtype: torch.dtype) -> None:
    reference = layer(form, 70, 96)
    x = rows(form, 14, 96, dtype)
    result = linear(library, PackedLinear([reference]), x)
    torch.testing.assert_close(result.double(), product(reference, x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", ["float32", "bfloat16", "int4"])
@pytest.mark.parametrize("outputs", [48, 40])
def test_gate_and_up_as_one(library: ctypes.CDLL, form: str, outputs: int) -> None:
    gate, up = layer(form, outputs, 64), layer(form, outputs, 64, seed=1)
    x = 3 * rows(form, 5, 64)
    x[0] *= 50  # where e^x overflows
    expected = torch.nn.functional.silu(product(gate, x)) * product(up, x)
    result = linear(library, PackedLinear([gate, up], gated=True), x)
    assert result.dtype == x.dtype
    tolerance = 1e-5 if form == "float32" else 2**-8
    torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance)


def test_layers_side_by_side(library: ctypes.CDLL) -> None:
    parts = [layer("bfloat16", outputs, 64, seed) for seed, outputs in enumerate((40, 8, 8))]
    x = rows("bfloat16", 3, 64)
    together = linear(library, PackedLinear(parts), x)
    assert torch.equal(together, torch.cat([linear(library, PackedLinear([part]), x) for part in parts], dim=1))


def test_what_cannot_be_laid_out_is_named() -> None:
    with pytest.raises(EngineError, match="different formats"):
        PackedLinear([layer("int8", 32, 32), layer("float32", 32, 32)])
    with pytest.raises(EngineError, match="odd number"):
        PackedLinear([DenseLinear(torch.zeros(4, 5, dtype=torch.bfloat16))])
