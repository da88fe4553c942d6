"""`preprocessing` and `postprocessing` as Triton's Python backend loads them."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from magicdec.pair.manifest import load_engine
from magicdec.runtime.text.tokenizer import HFTokenizer
from magicdec.runtime.triton_backend import wire
from magicdec.runtime.triton_backend.text.postprocessing import Postprocessor
from magicdec.runtime.triton_backend.text.preprocessing import Preprocessor

Compute = Callable[[Mapping[str, NDArray[Any]]], dict[str, NDArray[Any]]]


class _TextModel:
    """Answers each request by a function of its tensors."""

    def __init__(self) -> None:
        self._compute: Compute

    def initialize(self, args: Mapping[str, str]) -> None:
        """Called once by Triton. args: JSON of the configuration, and names."""
        directory = Path(wire.parameters(args["model_config"])["tokenizer_dir"])
        self._compute = self._open(directory)

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """One response a request."""
        return [self._respond(request) for request in requests]

    def _open(self, directory: Path) -> Compute:
        raise NotImplementedError

    def _respond(self, request: Any) -> Any:
        try:
            return wire.response(self._compute(wire.read_tensors(request)), request.requested_output_names())
        except Exception as error:
            return wire.error_response(error)


class PreprocessingModel(_TextModel):
    """Text to token ids."""

    def _open(self, directory: Path) -> Compute:
        tokenizer, manifest = HFTokenizer(directory), load_engine(directory)
        return Preprocessor(
            tokenizer.encode,
            tokenizer.encode_plain,
            vocab_size=manifest.vocab_size,
            end_id=next(iter(manifest.eos_token_ids), -1),
        )


class PostprocessingModel(_TextModel):
    """Token ids to text."""

    def _open(self, directory: Path) -> Compute:
        return Postprocessor(HFTokenizer(directory).decode, load_engine(directory).vocab_size)
