"""The tensors that answer a request to `tensorrt_llm`, from the engine's cumulative outputs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from magicdec.runtime.outputs import CompletionOutput, RequestOutput
from magicdec.runtime.text.detokenizer import REPLACEMENT
from magicdec.runtime.triton_backend.llm.request import LLMRow

Answer = dict[str, NDArray[Any]]
Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class RowContext:
    """What the answers to one row of a request depend on besides its outputs. arrival_ns: any clock."""

    row: LLMRow
    index: int
    batch_size: int
    arrival_ns: int
    block_size: int
    decode: Decode


@dataclass
class RowStream:
    """Answers for one row piece by piece: of each sequence only what is new."""

    context: RowContext
    _num_tokens: list[int] = field(default_factory=list)  # sent, of each sequence
    _num_characters: list[int] = field(default_factory=list)
    _ended: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._num_tokens = [0] * self.context.row.params.n
        self._num_characters = [0] * self.context.row.params.n

    def answers(self, output: RequestOutput) -> list[tuple[Answer, bool]]:
        """An answer, and whether it is the last one, for each sequence that has grown or ended since the last call."""
        return [
            (self._answer(output, each), each.finish_reason is not None)
            for each in output.outputs
            if each.index not in self._ended and self._has_news(each)
        ]

    def _has_news(self, each: CompletionOutput) -> bool:
        if each.finish_reason is not None:
            return True
        return self.context.row.streaming and len(each.token_ids) > self._num_tokens[each.index]

    def _answer(self, output: RequestOutput, each: CompletionOutput) -> Answer:
        """A sequence's news; without streaming, all of it at its end."""
        context, row, index = self.context, self.context.row, each.index
        answer = Sequences(context, output, [each], self._num_tokens[index], self._num_characters[index]).answer()
        self._num_tokens[index] = len(visible_tokens(row, each))
        self._num_characters[index] = len(each.text)
        if context.batch_size > 1:
            answer["batch_index"] = np.array([[context.index]], np.int32)
        if row.params.n > 1:
            answer["sequence_index"] = np.array([[index]], np.int32)
        if each.finish_reason is not None:
            self._ended.add(index)
        return answer


@dataclass(frozen=True)
class Sequences:
    """Sequences of one row, from a token and a character on.

    Tensors have a batch dimension of 1, but for texts, of which the TensorRT-LLM backend makes one flat list.
    """

    context: RowContext
    output: RequestOutput
    each: Sequence[CompletionOutput]
    first_token: int = 0
    first_character: int = 0

    def answer(self) -> Answer:
        """All that the row asked for; what concerns the whole request comes with ended sequences alone."""
        row, new = self.context.row, [self._tokens(each) for each in self.each]
        answer: Answer = {
            "output_ids": _padded(new, -1, np.int32),
            "sequence_length": np.array([[len(tokens) for tokens in new]], np.int32),
            "output_text": np.array([self._text(each).encode() for each in self.each], np.object_),
        }
        if row.params.logprobs is not None:
            answer |= self._logprobs()
        if row.return_num_input_tokens:
            answer["num_input_tokens"] = np.array([[len(row.token_ids)]], np.int32)
        if row.return_num_output_tokens:
            total = sum(len(visible_tokens(row, each)) for each in self.each)
            answer["num_output_tokens"] = np.array([[total]], np.int32)
        if row.return_perf_metrics and all(each.finish_reason is not None for each in self.each):
            answer |= _perf_metrics(self.context, self.output)
        return answer

    def _tokens(self, each: CompletionOutput) -> list[int]:
        tokens = visible_tokens(self.context.row, each)
        return tokens[self.first_token :] if self.context.row.exclude_input else [*self.context.row.token_ids, *tokens]

    def _text(self, each: CompletionOutput) -> str:
        """With the stop word that ended it, as the TensorRT-LLM backend gives it."""
        row, stop = self.context.row, each.stop_reason if isinstance(each.stop_reason, str) else ""
        if row.exclude_input:
            return each.text[self.first_character :] + stop
        prompt, whole = self.context.decode(row.token_ids), self.context.decode(self._tokens(each))
        if stop:
            start = whole.find(stop, len(prompt) + len(each.text))
            return whole[: start + len(stop)] if start >= 0 else prompt + each.text + stop
        if each.text.endswith(REPLACEMENT):
            return whole
        return prompt + whole[len(prompt) :].rstrip(REPLACEMENT)  # bytes of a character that is not whole

    def _logprobs(self) -> Answer:
        chosen = []
        for each in self.each:
            tokens = visible_tokens(self.context.row, each)
            rows = (each.logprobs or [])[: len(tokens)]
            chosen.append([row[token].logprob for row, token in zip(rows, tokens, strict=True)])
        sums = np.array([[sum(values) for values in chosen]], np.float32)
        new = [values[self.first_token :] for values in chosen]
        return {"cum_log_probs": sums, "output_log_probs": _padded(new, 0, np.float32)}


def visible_tokens(row: LLMRow, each: CompletionOutput) -> list[int]:
    """The output tokens without an end-of-sequence token, which the TensorRT-LLM backend leaves out as well."""
    by_end = each.finish_reason == "stop" and (each.stop_reason is None or each.stop_reason == row.end_id)
    return each.token_ids[:-1] if by_end else each.token_ids


def stack(rows: Sequence[Answer]) -> Answer:
    """One answer for all rows of a batch, which have asked for the same; shorter ones are padded."""
    stacked: Answer = {}
    for name, first in rows[0].items():
        parts = [row[name] for row in rows]
        if name in ("output_ids", "output_log_probs"):
            length = max(part.shape[2] for part in parts)
            padding = -1 if name == "output_ids" else 0
            parts = [
                np.pad(part, ((0, 0), (0, 0), (0, length - part.shape[2])), constant_values=padding) for part in parts
            ]
        stacked[name] = np.concatenate(parts).astype(first.dtype, copy=False)
    return stacked


def _perf_metrics(context: RowContext, output: RequestOutput) -> Answer:
    """Of the whole request; the reused blocks are those of the prompt that were found in the prefix cache."""
    metrics, size = output.metrics, context.block_size
    first = context.arrival_ns + round(1e9 * metrics.prefill_seconds)
    total = sum(-(-(metrics.num_prompt_tokens + len(each.token_ids)) // size) for each in output.outputs)
    reused = metrics.num_cached_tokens // size
    integers = {
        "kv_cache_alloc_total_blocks": total,
        "kv_cache_reused_blocks": reused,
        "kv_cache_alloc_new_blocks": total - reused,
        "total_draft_tokens": metrics.num_draft_tokens,
        "total_accepted_draft_tokens": metrics.num_accepted_tokens,
    }
    times = {
        "arrival_time_ns": context.arrival_ns,
        "first_scheduled_time_ns": context.arrival_ns + round(1e9 * metrics.queue_seconds),
        "first_token_time_ns": first,
        "last_token_time_ns": first + round(1e9 * metrics.decode_seconds),
    }
    return {
        **{name: np.array([[value]], np.int32) for name, value in integers.items()},
        **{name: np.array([[value]], np.int64) for name, value in times.items()},
        "acceptance_rate": np.array([[metrics.acceptance_rate]], np.float32),
    }


def _padded(rows: Sequence[Sequence[float]], padding: float, dtype: Any) -> NDArray[Any]:
    """[1, rows, longest]."""
    padded = np.full((1, len(rows), max(map(len, rows))), padding, dtype)
    for target, values in zip(padded[0], rows, strict=True):
        target[: len(values)] = values
    return padded
