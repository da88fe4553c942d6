"""Where the answers to one request go."""

from collections.abc import Mapping
from typing import Any, Protocol

from numpy.typing import NDArray

from magicdec.errors import MagicDecError

Tensors = Mapping[str, NDArray[Any]]


class DeadlineError(MagicDecError):
    """A request was ended before it was answered in full."""


class Sender(Protocol):
    """One client's end of the line; any thread may call it. Nothing is sent after what was final."""

    def send(self, tensors: Tensors, *, final: bool) -> None:
        """An answer, perhaps without tensors."""
        ...

    def fail(self, error: Exception, *, final: bool) -> None:
        """An error in place of an answer."""
        ...

    def is_cancelled(self) -> bool:
        """Whether the client waits no more."""
        ...
