"""What rank 0 tells the other ranks. `doing` is how a failure in the middle of it is reported."""

from dataclasses import dataclass, fields
from typing import Any, ClassVar

import numpy as np
import torch

from magicdec.plugins.model.inputs import ModelInput
from magicdec.runtime.runners.opening import RunnerSpec


@dataclass(frozen=True)
class Call:
    """Base of all calls."""

    doing: ClassVar[str]


@dataclass(frozen=True)
class Load(Call):
    """Open a runner on ranks 0 .. tp_size - 1. exchange: "cpu" or "cuda", where the tensors lie that they exchange."""

    doing: ClassVar[str] = "loading a model"
    runner: int
    spec: RunnerSpec
    tp_size: int
    exchange: str


@dataclass(frozen=True)
class Forward(Call):
    """Compute a pass. fields: a ModelInput's, its tensors as arrays, which travel faster."""

    doing: ClassVar[str] = "computing a pass"
    runner: int
    fields: tuple[Any, ...]

    @classmethod
    def of(cls, runner: int, inputs: ModelInput) -> "Forward":
        """The call for these inputs."""
        values = (getattr(inputs, field.name) for field in fields(inputs))
        return cls(runner, tuple(v.numpy() if isinstance(v, torch.Tensor) else v for v in values))

    @property
    def inputs(self) -> ModelInput:
        """The inputs again."""
        values: list[Any] = [torch.from_numpy(v) if isinstance(v, np.ndarray) else v for v in self.fields]
        return ModelInput(*values)


@dataclass(frozen=True)
class ReadKeys(Call):
    """Keep the keys of this rank's own heads under the number `keys`."""

    doing: ClassVar[str] = "reading keys"
    runner: int
    keys: int
    slots: list[int]
    positions: list[int]


@dataclass(frozen=True)
class WriteKeys(Call):
    """Write the keys that were kept under the number `keys`."""

    doing: ClassVar[str] = "writing keys"
    runner: int
    keys: int
    slots: list[int]
    positions: list[int]


@dataclass(frozen=True)
class Forget(Call):
    """Free runners and keys of these numbers."""

    doing: ClassVar[str] = "freeing memory"
    numbers: list[int]


@dataclass(frozen=True)
class Stop(Call):
    """Rank 0 ends."""

    doing: ClassVar[str] = "stopping the other ranks"
