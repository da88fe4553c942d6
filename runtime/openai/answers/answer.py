"""From the engine's outputs to the JSON objects of an answer, whole or in chunks."""

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from magicdec.runtime.openai.answers.formats import Format
from magicdec.runtime.openai.answers.pieces import Piece, PieceReader
from magicdec.runtime.openai.generation import Generation
from magicdec.runtime.openai.requests.protocol import GenerationRequest
from magicdec.runtime.outputs import RequestMetrics, RequestOutput


class Answer:
    """The answer to one HTTP request.

    log: what the server's log tells of the request, filled here. echo: for each prompt, what its choices begin with.
    """

    def __init__(
        self,
        generation: Generation,
        request: GenerationRequest,
        shape: Format,
        *,
        model: str,
        log: dict[str, Any],
        echo: Sequence[str] | None = None,
    ) -> None:
        self._generation, self._format, self._log = generation, shape, log
        log.update(user=request.user, id=generation.request_id)
        self._details = request.magicdec_details
        self._with_usage = request.stream_options is not None and request.stream_options.include_usage
        self._head = {"id": generation.request_id, "created": int(time.time()), "model": model}
        n = generation.params.n
        self._readers = [
            [PieceReader(index * n + i, prefix) for i in range(n)]
            for index, prefix in enumerate(echo or [""] * len(generation.prompts))
        ]

    async def whole(self) -> dict[str, Any]:
        """When all is done."""
        final = {index: output async for index, output in self._generation.outputs()}
        choices = []
        for index in sorted(final):
            for piece in self._pieces(index, final[index]):
                choice = self._format.choice(piece)
                if self._details:
                    choice["magicdec"] = _details(piece, final[index].metrics)
                choices.append(choice)
        return {
            **self._head,
            "object": self._format.whole,
            "choices": choices,
            "usage": self._usage(final),
        }

    async def chunks(self) -> AsyncGenerator[Mapping[str, Any], None]:
        """The answer as it comes: one choice a chunk; the usage, if it is asked for, in a last one without choices."""
        head = {**self._head, "object": self._format.part}
        usage = {"usage": None} if self._with_usage else {}
        final: dict[int, RequestOutput] = {}
        async for index, output in self._generation.outputs():
            final[index] = output
            for piece in self._pieces(index, output):
                details = {"magicdec": _details(piece, output.metrics)} if self._details else {}
                yield {**head, "choices": [self._format.delta(piece)], **usage, **details}
        totals = self._usage(final)
        if self._with_usage:
            yield {**head, "choices": [], "usage": totals}

    def _pieces(self, index: int, output: RequestOutput) -> list[Piece]:
        pieces = [reader.read(item) for reader, item in zip(self._readers[index], output.outputs, strict=True)]
        return [piece for piece in pieces if piece is not None]

    def _usage(self, final: dict[int, RequestOutput]) -> dict[str, Any]:
        """Token counts over all prompts; a prompt counts once, however many choices it has."""
        metrics = [output.metrics for output in final.values()]
        prompt, completion = sum(m.num_prompt_tokens for m in metrics), sum(m.num_output_tokens for m in metrics)
        self._note(metrics, prompt, completion)
        usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        if self._generation.params.n > 1:  # the choices find each other's prompt in the cache
            return usage
        return {**usage, "prompt_tokens_details": {"cached_tokens": sum(m.num_cached_tokens for m in metrics)}}

    def _note(self, metrics: list[RequestMetrics], prompt: int, completion: int) -> None:
        rounds = sum(m.num_rounds for m in metrics)
        accepted = sum(m.num_accepted_tokens for m in metrics)
        self._log.update(prompt_tokens=prompt, output_tokens=completion)
        if rounds:
            self._log["acceptance_length"] = f"{1 + accepted / rounds:.2f}"


def _details(piece: Piece, metrics: RequestMetrics) -> dict[str, Any]:
    """What speculation did: for the tokens of this piece, and so far for its prompt (all n choices together)."""
    return {
        "token_origins": piece.token_origins,
        "token_lengths": piece.token_lengths,
        "metrics": {
            **asdict(metrics),
            "acceptance_length": metrics.acceptance_length,
            "acceptance_rate": metrics.acceptance_rate,
        },
    }
