"""Linear layers, plain and in FP8, over tensor-parallel ranks."""

from typing import Any

import tensorrt as trt

from . import functional as F
from ._common import default_net
from ._utils import str_dtype_to_trt
from .functional import Tensor
from .module import Module
from .parameter import Parameter


class _LinearBase(Module):
    def __init__(
        self, in_features: int, out_features: int, bias: bool, dtype: Any, tp_group: Any, tp_size: int
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.dtype = in_features, out_features, dtype
        self.tp_group, self.tp_size = tp_group, tp_size
        self.weight = Parameter(shape=(out_features, in_features), dtype=dtype)
        if bias:
            self.bias = Parameter(shape=(out_features,), dtype=dtype)
        else:
            self.register_parameter("bias", None)

    def multiply(self, x: Tensor) -> Tensor:
        return F.matmul(x, self.weight.value, transb=True)

    def with_bias(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return x
        return x + F.view(F.cast(self.bias.value, x.dtype), [1, self.out_features])


class ColumnLinear(_LinearBase):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dtype: Any = None,
        tp_group: Any = None,
        tp_size: int = 1,
        gather_output: bool = True,
        share_weight: Any = None,
        strict_dtype: bool = False,
        pad_lda: int = 0,
        prefer_managed_weight: bool = True,
        is_qkv: bool = False,
    ) -> None:
        assert out_features % tp_size == 0
        super().__init__(in_features, out_features // tp_size, bias, dtype, tp_group, tp_size)
        self.gather_output, self.is_qkv = gather_output, is_qkv

    def forward(self, x: Tensor) -> Tensor:
        x = self.with_bias(self.multiply(x))
        gathers = self.gather_output and self.tp_size > 1 and self.tp_group is not None
        return F.allgather(x, self.tp_group, gather_dim=-1) if gathers else x


Linear = ColumnLinear


class RowLinear(_LinearBase):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dtype: Any = None,
        tp_group: Any = None,
        tp_size: int = 1,
        strict_dtype: bool = False,
        pad_lda: int = 0,
        prefer_managed_weight: bool = True,
        is_expert: bool = False,
    ) -> None:
        assert in_features % tp_size == 0
        super().__init__(in_features // tp_size, out_features, bias, dtype, tp_group, tp_size)

    def forward(self, x: Tensor) -> Tensor:
        x = self.multiply(x)
        if self.tp_size > 1 and self.tp_group is not None:
            x = F.allreduce(x, self.tp_group)
        return self.with_bias(x)


class _Fp8(_LinearBase):
    """Weights in E4M3, one scale for them and one for the activations."""

    def quantise(self) -> None:
        self.weight = Parameter(shape=(self.out_features, self.in_features), dtype="fp8")
        self.activation_scaling_factor = Parameter(shape=(1,), dtype="float32")
        self.weights_scaling_factor = Parameter(shape=(1,), dtype="float32")

    def multiply(self, x: Tensor) -> Tensor:
        scales = [self.activation_scaling_factor.value.value, self.weights_scaling_factor.value.value]
        wanted = str_dtype_to_trt(self.dtype)
        assert x.dtype in (wanted, trt.fp8)
        inputs = [x.value, self.weight.value.value, *scales]
        value = default_net().add("fp8_matmul", inputs, dtype=wanted.name)[0]
        return Tensor._made(value, wanted, [*x.shape[:-1], self.out_features])


class FP8Linear(_Fp8, ColumnLinear):
    pass


class FP8RowLinear(_Fp8, RowLinear):
    pass


def fp8_linear(linear: Any) -> Any:
    """The FP8 layer in place of a plain one."""
    kind: Any = FP8Linear if isinstance(linear, ColumnLinear) else FP8RowLinear
    made = kind.__new__(kind)
    made.__dict__.update(linear.__dict__)
    made.quantise()
    return made
