"""Requests of many kinds, as clients write them and as the offline engine takes them."""

from dataclasses import dataclass
from typing import Any

from magicdec.runtime.llm import LLM
from magicdec.runtime.outputs import CompletionOutput
from magicdec.runtime.sampling_params import SamplingParams

TEXT = "in the other one the rest are there and then on and on again; "
# Names as in the text models, values for client and engine alike.
SAMPLING: list[dict[str, Any]] = [
    {},  # greedy
    {"top_k": 40, "temperature": 0.8},
    {"top_p": 0.9, "temperature": 1.3},
    {"top_k": 100, "top_p": 0.95, "repetition_penalty": 1.2},
    {"top_p": 1.0, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"top_p": 1.0, "min_tokens": 8, "stop_words": ["th", "e"]},
    {"top_k": 50, "bad_words": ["the", "q"]},
    {"top_p": 1.0, "num_draft_tokens": 3},
]


@dataclass(frozen=True)
class Case:
    """A request. options: by the names of the text models."""

    prompt: str
    max_tokens: int
    seed: int
    options: dict[str, Any]

    def text_inputs(self) -> dict[str, Any]:
        """For `ensemble` and `tensorrt_llm_bls`, streamed."""
        given = {"text_input": self.prompt, "max_tokens": self.max_tokens, "seed": self.seed, "stream": True}
        return given | self.options

    def expected(self, llm: LLM) -> CompletionOutput:
        """By the offline engine, alone."""
        renamed = {"stop_words": "stop"}
        options = {renamed.get(name, name): value for name, value in self.options.items() if name != "num_draft_tokens"}
        if not {"top_k", "top_p"} & set(options):
            options["temperature"] = 0
        params = SamplingParams(max_tokens=self.max_tokens, seed=self.seed, **options)
        return llm.generate([self.prompt], params)[0].outputs[0]


def case(index: int, max_tokens: int | None = None) -> Case:
    """The same one whenever it is asked for; prompts and outputs of different lengths."""
    prompt = (TEXT * 3)[index % 7 : 10 + 5 * (index % 30)]
    length = 6 + 7 * (index % 8) if max_tokens is None else max_tokens
    return Case(prompt, length, seed=100 + index, options=SAMPLING[index % len(SAMPLING)])


def expected_text(output: CompletionOutput) -> str:
    """With the stop word, as the TensorRT-LLM backend gives it."""
    return output.text + (output.stop_reason if isinstance(output.stop_reason, str) else "")


def expected_tokens(output: CompletionOutput) -> list[int]:
    """Without the end-of-sequence token, as the TensorRT-LLM backend gives them."""
    ended = output.finish_reason == "stop" and output.stop_reason is None
    return output.token_ids[:-1] if ended else output.token_ids
