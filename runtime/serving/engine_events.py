"""What may be told of an engine while it serves."""

from collections.abc import Sequence
from typing import Literal

from magicdec.runtime.outputs import RequestOutput

Refusal = Literal["bad_request", "queue_full", "not_ready"]


class EngineEvents:
    """A listener that does nothing. `submitted` and `refused` come from any thread, the others from the engine's."""

    def submitted(self, request_id: str) -> None:
        """A request was taken; its times count from now."""

    def refused(self, reason: Refusal) -> None:
        """A request was not taken."""

    def stepped(self, outputs: Sequence[RequestOutput], seconds: float) -> None:
        """The engine made a step of so many seconds, which gave these outputs."""

    def finished(self, output: RequestOutput) -> None:
        """A request ended between steps, e.g. by an abort."""

    def failed(self, request_id: str) -> None:
        """A request ended without an output, since the engine broke down or would not have it."""
