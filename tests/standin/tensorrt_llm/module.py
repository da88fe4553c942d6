"""Modules: parameters and children by attribute."""

from collections.abc import Iterator
from typing import Any

from .parameter import Parameter


class Module:
    """A tree of parameters; calling it records its part of the network."""

    def __init__(self) -> None:
        self._parameters: dict[str, Any] = {}
        self._modules: dict[str, Any] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        for kind, group in ((Parameter, "_parameters"), (Module, "_modules")):
            if isinstance(value, kind):
                self.__dict__[group][name] = value
                return
        if name in self.__dict__.get("_parameters", {}) or name in self.__dict__.get("_modules", {}):
            self.__dict__["_parameters"].pop(name, None)
            self.__dict__["_modules"].pop(name, None)
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        for group in ("_parameters", "_modules"):
            if name in self.__dict__.get(group, {}):
                return self.__dict__[group][name]
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def register_parameter(self, name: str, param: Any) -> None:
        self.__dict__["_parameters"][name] = param

    def named_parameters(self, prefix: str = "") -> Iterator[tuple[str, Parameter]]:
        for name, parameter in self.__dict__["_parameters"].items():
            if parameter is not None:
                yield prefix + name, parameter
        for name, child in self.__dict__["_modules"].items():
            yield from child.named_parameters(f"{prefix}{name}.")

    def named_modules_with_parent(self, name: str = "", parent: Any = None) -> Iterator[tuple[str, Any, Any]]:
        yield name, self, parent
        for key, child in list(self.__dict__["_modules"].items()):
            yield from child.named_modules_with_parent(f"{name}.{key}" if name else key, self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)


class ModuleList(Module):
    """Children by number."""

    def __init__(self, modules: list[Module]) -> None:
        super().__init__()
        for index, module in enumerate(modules):
            self.__dict__["_modules"][str(index)] = module

    def __iter__(self) -> Iterator[Any]:
        return iter(self.__dict__["_modules"].values())

    def __getitem__(self, index: int) -> Any:
        return list(self)[index]

    def __len__(self) -> int:
        return len(self.__dict__["_modules"])
