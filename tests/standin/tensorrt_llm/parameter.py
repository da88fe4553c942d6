"""A weight of a module."""

from typing import Any

import numpy as np
import torch

from ._common import default_net
from ._utils import TORCH, str_dtype_to_trt


class Parameter:
    """Made with a shape (to be loaded) or with a value (a buffer)."""

    def __init__(
        self,
        value: Any = None,
        shape: Any = None,
        dtype: Any = None,
        is_buffer: bool = False,
        prefer_managed: bool = False,
    ) -> None:
        self.dtype = str_dtype_to_trt(dtype) if isinstance(dtype, str) else dtype
        self.is_buffer = is_buffer
        self.name = ""
        self._value: torch.Tensor | None = None
        self._shape = tuple(shape) if shape is not None else tuple(value.shape)
        if value is not None:
            self._value = torch.from_numpy(np.ascontiguousarray(value)).to(TORCH[self.dtype])

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    def is_inited(self) -> bool:
        return self._value is not None

    @property
    def raw_value(self) -> torch.Tensor:
        assert self._value is not None, f"{self.name} is not loaded"
        return self._value

    @property
    def value(self) -> Any:
        """The parameter as a tensor of the network."""
        from .functional import Tensor

        network = default_net()
        return Tensor._made(network.add_weight(self.name, self.raw_value), self.dtype, list(self._shape))

    @value.setter
    def value(self, data: torch.Tensor) -> None:
        if tuple(data.shape) != self._shape:
            raise ValueError(f"{self.name}: expected shape {self._shape}, got {tuple(data.shape)}")
        if data.dtype != TORCH[self.dtype]:
            raise ValueError(f"{self.name}: expected {self.dtype}, got {data.dtype}")
        self._value = data
