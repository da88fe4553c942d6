"""Plain and speculative decoding of one prompt, measured side by side in one process."""

import os
import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from magicdec.console import StageBars, decode_rate, format_bytes

if TYPE_CHECKING:
    from magicdec.pair.config import PairConfig
    from magicdec.runtime.llm import LLM
    from magicdec.runtime.outputs import RequestOutput
    from magicdec.runtime.sampling_params import SamplingParams

# Twice each, mirrored, so that a machine that warms up or slows down favours neither.
ORDER = ("plain", "speculative", "speculative", "plain")
# What rounding may add to the difference of two log-probabilities: a few units in the last place of a logit of 32.
ROUNDING = {"float32": 1e-3, "bfloat16": 0.5, "float16": 0.1}


@dataclass(frozen=True)
class Comparison:
    """The measured runs of one prompt by the way they were decoded; greedy, the prompt read before."""

    plain: "tuple[RequestOutput, ...]"
    speculative: "tuple[RequestOutput, ...]"

    @property
    def speedup(self) -> float:
        """Speculative over plain tokens a second; 0 where nothing could be measured."""
        plain = total_rate(self.plain)
        return total_rate(self.speculative) / plain if plain else 0.0


def compare(llm: "LLM", prompt: list[int], params: "SamplingParams") -> Comparison:
    """Decode the prompt in the order of ORDER. The prompt should be in the prefix cache already."""
    runs: dict[str, list[RequestOutput]] = {"plain": [], "speculative": []}
    with StageBars() as bars:
        for index, way in enumerate(ORDER):

            def on_progress(outputs: "Sequence[RequestOutput]", _done: int, _total: int, before: int = index) -> None:
                done = before * params.max_tokens + (outputs[0].metrics.num_output_tokens if outputs else 0)
                bars("measuring plain and speculative decoding", done, len(ORDER) * params.max_tokens)

            own = params if way == "speculative" else plain(params)
            runs[way] += llm.generate([prompt], own, on_progress=on_progress)
    return Comparison(tuple(runs["plain"]), tuple(runs["speculative"]))


def plain(params: "SamplingParams") -> "SamplingParams":
    """The same without drafts."""
    return params.model_copy(update={"num_draft_tokens": 0})


def total_rate(outputs: "Sequence[RequestOutput]") -> float:
    """Decoded tokens a second over all runs; prefill does not count."""
    tokens = sum(output.metrics.num_output_tokens - 1 for output in outputs)
    seconds = sum(output.metrics.decode_seconds for output in outputs)
    return tokens / seconds if seconds > 0 else 0.0


def result_rows(
    llm: "LLM", params: "SamplingParams", first: "RequestOutput", runs: Comparison, kv_bytes: int
) -> list[tuple[str, str]]:
    """The closing table. first: the run that read the prompt; kv_bytes: target KV of the sequence, as allocated."""
    metrics, memory, config = first.metrics, llm.memory(), llm.config
    view = config.draft_view_tokens or 0
    return [
        ("prompt tokens", f"{metrics.num_prompt_tokens:,}"),
        ("output tokens", f"{metrics.num_output_tokens:,}"),
        ("draft", f"{config.draft.kind}{_weights(config)}; sees at most {view} tokens, whatever the context"),
        ("draft KV bytes", f"{memory['draft_kv_bytes']:,} (it reads blocks of the target's)"),
        ("target KV bytes", f"{kv_bytes:,} ({format_bytes(kv_bytes).split(' (')[0]}, this sequence)"),
        ("acceptance length", _acceptance(runs)),
        ("prefill", f"{metrics.prefill_seconds:.1f} s (once; the measured runs find it in the prefix cache)"),
        ("tokens/s plain", _rates(runs.plain)),
        ("tokens/s speculative", f"{_rates(runs.speculative)}, {runs.speedup:.2f} times plain"),
        ("outputs identical", _identical(llm, params, first, runs)),
        ("dtype", str(llm.runner.dtype).removeprefix("torch.")),
    ]


def _weights(config: "PairConfig") -> str:
    kind = config.quantization_of("draft")
    return "" if kind == "none" else f" with weights in {kind}"


def machine() -> str:
    """CPU, cores and PyTorch, for whoever reads the figures later."""
    import torch

    return (
        f"{_cpu_name()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, {platform.system()}, "
        f"Python {platform.python_version()}, PyTorch {torch.__version__}"
    )


def _acceptance(runs: Comparison) -> str:
    metrics = runs.speculative[0].metrics
    return (
        f"{metrics.acceptance_length:.2f} tokens a round "
        f"({metrics.num_accepted_tokens} of {metrics.num_draft_tokens} draft tokens accepted)"
    )


def _rates(outputs: "Sequence[RequestOutput]") -> str:
    each = ", ".join(f"{decode_rate(output.metrics):.1f}" for output in outputs)
    return f"{total_rate(outputs):.1f} (decode only; runs: {each})"


def _identical(llm: "LLM", params: "SamplingParams", first: "RequestOutput", runs: Comparison) -> str:
    """Whether every run gave the same tokens; if not, where they part and by how much it was decided there."""
    wanted = runs.plain[0].outputs[0].token_ids
    for other in (*runs.plain, *runs.speculative, first):
        tokens = other.outputs[0].token_ids
        if tokens != wanted:
            return _difference(llm, params, first.prompt_token_ids, wanted, tokens)
    return f"yes, all {len(wanted)} tokens in all {1 + len(ORDER)} runs"


def _difference(llm: "LLM", params: "SamplingParams", prompt: list[int], wanted: list[int], other: list[int]) -> str:
    same = next(
        (index for index, (a, b) in enumerate(zip(wanted, other, strict=False)) if a != b),
        min(len(wanted), len(other)),
    )
    margin, dtype = _margin(llm, params, prompt, same), str(llm.runner.dtype).removeprefix("torch.")
    why = (
        "a pass over several rows rounds differently from a pass over one, which turned this close decision"
        if margin < ROUNDING[dtype]
        else "that is more than rounding can do: please report it as a bug"
    )
    return f"NO: they part at token {same + 1}, where the two best are {margin:.1e} apart in log-probability; {why}"


def _margin(llm: "LLM", params: "SamplingParams", prompt: list[int], index: int) -> float:
    """By how much plain decoding decides output token `index`, greedy with a frequency penalty."""
    again = plain(params).model_copy(update={"max_tokens": index + 1, "logprobs": 20})
    output = llm.generate([prompt], again)[0].outputs[0]
    assert output.logprobs is not None, "they were asked for"
    counts = Counter(output.token_ids[:index])
    scores = [
        entry.logprob - params.frequency_penalty * counts[token] for token, entry in output.logprobs[index].items()
    ]
    best, second = sorted(scores, reverse=True)[:2]
    return best - second


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
