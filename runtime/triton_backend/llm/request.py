"""What a request to `tensorrt_llm` asks for: its rows and their sampling parameters, read from its tensors."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from magicdec.errors import RequestError
from magicdec.runtime.sampling_params import SamplingParams
from magicdec.runtime.triton_backend.llm import tensors as llm_tensors
from magicdec.runtime.triton_backend.llm.stop_words import StopWords
from magicdec.runtime.triton_backend.word_lists import unpack_words

Tensors = Mapping[str, NDArray[Any]]

_REFUSED: Final = {tensor.name for tensor in llm_tensors.REFUSED_INPUTS}
_WHY: Final = {
    "draft": "the engine drafts by itself; leave it out, and give num_draft_tokens for the number of drafts",
    "decoder": "this is no encoder-decoder model",
    "prompt": "prompt tuning is not supported",
    "lora": "LoRA is not supported",
    "guided": "constrained output is not supported",
    "retention": "the prefix cache drops what is unused longest",
    "lookahead": "the engine drafts by itself",
}
# Values that change nothing.
_NEUTRAL: Final[dict[str, tuple[float, ...]]] = {
    "beam_width": (1,),
    "len_penalty": (0, 1),
    "early_stopping": (0,),
    "beam_search_diversity_rate": (0,),
    "runtime_top_p_min": (0, 1e-6),
    "runtime_top_p_decay": (1,),
    "runtime_top_p_reset_ids": (-1,),
    "return_context_logits": (0,),
    "return_generation_logits": (0,),
}
_SAMPLING: Final = {
    "temperature": "temperature",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "min_tokens": "min_tokens",
    "request_output_len": "max_tokens",
    "num_return_sequences": "n",
    "seed": "seed",
    "num_draft_tokens": "num_draft_tokens",
}


@dataclass(frozen=True)
class LLMRow:
    """One prompt of a request. end_id: the token that ends it in place of the model's own ones."""

    token_ids: list[int]
    params: SamplingParams
    end_id: int | None = None
    streaming: bool = False
    exclude_input: bool = False
    return_perf_metrics: bool = False
    return_num_input_tokens: bool = False
    return_num_output_tokens: bool = False


@dataclass(frozen=True)
class RequestReader:
    """Reads requests for one engine.

    eos_token_ids: the model's own ends. vocab_size: of the model. decode: text of token ids. exclude_input: whether
    outputs leave the prompt out unless a request says otherwise.
    """

    eos_token_ids: frozenset[int]
    vocab_size: int
    decode: Callable[[Sequence[int]], str]
    decoupled: bool
    exclude_input: bool

    def rows(self, tensors: Tensors) -> list[LLMRow]:
        """All rows of a batch; RequestError names the input that cannot be served."""
        for name in tensors:
            if name in _REFUSED:
                raise RequestError(f"input {name} is not supported: {_WHY[name.split('_')[0]]}")
        for name in ("input_ids", "request_output_len"):
            if name not in tensors:
                raise RequestError(f"input {name} is missing")
        size = len(tensors["input_ids"])
        rows = [self._row(_Row(tensors, size, index)) for index in range(size)]
        if not self.decoupled:
            _check_alike(rows)
        return rows

    def _row(self, row: "_Row") -> LLMRow:
        for name, values in _NEUTRAL.items():
            value = row.scalar(name)
            if value is not None and not any(np.isclose(value, neutral, atol=0) for neutral in values):
                only = " or ".join(f"{neutral:g}" for neutral in values)
                raise RequestError(f"input {name} is {value}, which is not supported; leave it out or give {only}")
        streaming = bool(row.scalar("streaming"))
        if streaming and not self.decoupled:
            raise RequestError("Streaming is only supported in decoupled mode.")
        exclude = row.scalar("exclude_input_in_output")
        return LLMRow(
            token_ids=row.prompt(),
            params=SamplingParams(**self._sampling(row)),
            end_id=self._end_id(row),
            streaming=streaming,
            exclude_input=streaming or (self.exclude_input if exclude is None else bool(exclude)),
            return_perf_metrics=bool(row.scalar("return_perf_metrics")),
            return_num_input_tokens=bool(row.scalar("return_num_input_tokens")),
            return_num_output_tokens=bool(row.scalar("return_num_output_tokens")),
        )

    def _end_id(self, row: "_Row") -> int | None:
        """None where the model's own ends hold: no end_id, or one of them."""
        value = row.scalar("end_id")
        return None if value is None or value in self.eos_token_ids else int(value)

    def _sampling(self, row: "_Row") -> dict[str, Any]:
        given = {own: row.scalar(name) for name, own in _SAMPLING.items()}
        options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        options |= _cut_offs(row)
        if row.scalar("return_log_probs"):
            options["logprobs"] = 0
        if row.scalar("use_draft_logits"):
            options["acceptance"] = "rejection"
        end_id, stop = self._end_id(row), StopWords.of(row.words("stop_words_list"), self.decode)
        options["stop"] = stop.texts
        options["stop_token_ids"] = [*stop.token_ids, *([end_id] if end_id is not None and end_id >= 0 else [])]
        options["ignore_eos"] = end_id is not None
        options["bad_words"] = [self.decode(word) for word in row.words("bad_words_list")]
        bias = row.embedding_bias(self.vocab_size)
        if bias:
            options["logit_bias"] = bias
        return options


def _check_alike(rows: Sequence[LLMRow]) -> None:
    """One response has the same tensors for all rows of a batch."""
    asked: dict[str, set[Any]] = {
        "num_return_sequences": {row.params.n for row in rows},
        "return_log_probs": {row.params.logprobs for row in rows},
        "return_perf_metrics": {row.return_perf_metrics for row in rows},
        "return_num_input_tokens": {row.return_num_input_tokens for row in rows},
        "return_num_output_tokens": {row.return_num_output_tokens for row in rows},
    }
    for name, values in asked.items():
        if len(values) > 1:
            raise RequestError(f"input {name} differs between the rows of a batch; without decoupled mode it must not")


def _cut_offs(row: "_Row") -> dict[str, Any]:
    """As in TensorRT-LLM: neither top_k nor top_p is greedy, whatever the temperature; top_p of 0 or less is unset."""
    top_k, top_p = row.scalar("runtime_top_k") or 0, row.scalar("runtime_top_p") or 0.0
    if top_k == 1 or (top_k == 0 and top_p <= 0):
        return {"temperature": 0.0}
    return {"top_k": top_k} | ({"top_p": top_p} if not top_p <= 0 else {})


@dataclass(frozen=True)
class _Row:
    tensors: Tensors
    size: int
    index: int

    def array(self, name: str) -> NDArray[Any] | None:
        """This row's part of an input, without the batch dimension."""
        tensor = self.tensors.get(name)
        if tensor is None:
            return None
        if len(tensor) != self.size:
            raise RequestError(f"input {name} has {len(tensor)} rows, and input_ids has {self.size}; give one for each")
        part: NDArray[Any] = np.asarray(tensor[self.index])
        return part

    def scalar(self, name: str) -> Any:
        """A single value, as Python's own type; None if it is not given."""
        part = self.array(name)
        if part is None:
            return None
        if part.size != 1:
            raise RequestError(f"input {name} has {part.size} values for one request; give one")
        value = part.item()
        # Through float32 a client's 0.7 becomes 0.699999988: what it wrote is the shortest number that gives the same.
        return float(str(np.float32(value))) if isinstance(value, float) else value

    def prompt(self) -> list[int]:
        """The token ids, cut at input_lengths."""
        part = self.array("input_ids")
        assert part is not None, "input_ids is required"
        length = self.scalar("input_lengths")
        token_ids: list[int] = part.tolist()
        if length is None:
            return token_ids
        if not 0 < length <= len(token_ids):
            raise RequestError(f"input_lengths is {length}, and input_ids has {len(token_ids)} tokens; give 1 or more")
        return token_ids[:length]

    def words(self, name: str) -> list[list[int]]:
        """A list of words; none if it is not given or has no columns."""
        part = self.array(name)
        return [] if part is None or part.size == 0 else unpack_words(name, part)

    def embedding_bias(self, vocab_size: int) -> dict[int, float]:
        """What is added to which logits."""
        part = self.array("embedding_bias")
        if part is None or part.size == 0:
            return {}
        if part.size > vocab_size:
            raise RequestError(f"embedding_bias has {part.size} values; the model has {vocab_size} token ids")
        ids = np.flatnonzero(part)
        return dict(zip(ids.tolist(), part.ravel()[ids].astype(float).tolist(), strict=True))
