"""`magicdec generate`: one prompt, answered on stdout."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from magicdec.commands.options import SPECULATION, DrafterOption, WindowOption
from magicdec.console import shows_errors
from magicdec.tasks.generate import Asked, answer_prompt

DEFAULT_MAX_TOKENS = 256
PROMPT = "Prompt"
SAMPLING = "Sampling (off unless given; the output's distribution is that of plain decoding)"
STOPPING = "Stopping"
OUTPUT = "Output"
EPILOG = """[bold]Examples[/]

magicdec generate --engine engines/pair --prompt "Once upon a time" --temperature 0

magicdec generate --engine engines/pair --prompt-file report.txt --chat --system "Answer in one sentence."

cat report.txt | magicdec generate --engine engines/pair --prompt-file - --max-tokens 500 --seed 7

magicdec generate --engine engines/pair --prompt "Hello" --num-draft-tokens 0 --json"""


@shows_errors
def generate(
    engine: Annotated[Path, typer.Option(help="Directory made by build-engine.", show_default=False)],
    prompt: Annotated[str | None, typer.Option(help="The prompt itself.", rich_help_panel=PROMPT)] = None,
    prompt_file: Annotated[
        str | None, typer.Option(help="UTF-8 file that holds the prompt; - reads stdin.", rich_help_panel=PROMPT)
    ] = None,
    chat: Annotated[
        bool,
        typer.Option("--chat", help="The prompt is a user's message: apply the chat template.", rich_help_panel=PROMPT),
    ] = False,
    system: Annotated[str | None, typer.Option(help="System message (with --chat).", rich_help_panel=PROMPT)] = None,
    temperature: Annotated[
        float | None, typer.Option(help="Divides the logits; 0 is greedy. Default 1.", rich_help_panel=SAMPLING)
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Keep the k likeliest tokens.", rich_help_panel=SAMPLING)] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Keep the likeliest tokens that reach this mass.", rich_help_panel=SAMPLING)
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(help="Drop tokens below this times the likeliest one's probability.", rich_help_panel=SAMPLING),
    ] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Above 1: fewer tokens of prompt and output again.", rich_help_panel=SAMPLING)
    ] = None,
    presence_penalty: Annotated[
        float | None, typer.Option(help="Taken from tokens that the output has.", rich_help_panel=SAMPLING)
    ] = None,
    frequency_penalty: Annotated[
        float | None, typer.Option(help="Taken for each time that the output has a token.", rich_help_panel=SAMPLING)
    ] = None,
    logit_bias: Annotated[
        list[str] | None, typer.Option(help="ID=VALUE, added to a token's logit; repeatable.", rich_help_panel=SAMPLING)
    ] = None,
    bad_words: Annotated[
        list[str] | None, typer.Option("--bad-word", help="Never complete this; repeatable.", rich_help_panel=SAMPLING)
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Makes the output repeatable, whatever the drafts.", rich_help_panel=SAMPLING)
    ] = None,
    n: Annotated[int | None, typer.Option("--n", help="Outputs for the prompt.", rich_help_panel=SAMPLING)] = None,
    max_tokens: Annotated[
        int, typer.Option(help="Output tokens at most.", rich_help_panel=STOPPING)
    ] = DEFAULT_MAX_TOKENS,
    min_tokens: Annotated[
        int | None, typer.Option(help="Do not stop before this many.", rich_help_panel=STOPPING)
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="Text that ends the output; repeatable.", rich_help_panel=STOPPING)
    ] = None,
    stop_token_ids: Annotated[
        list[int] | None,
        typer.Option("--stop-token-id", help="Token id that ends the output; repeatable.", rich_help_panel=STOPPING),
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on after an end-of-sequence token.", rich_help_panel=STOPPING)
    ] = False,
    num_draft_tokens: Annotated[
        str | None,
        typer.Option(
            metavar="INTEGER|auto",
            help="Draft tokens a round; 0 is plain decoding, auto is what is fastest at each step. Default: the "
            "pair's own.",
            rich_help_panel=SPECULATION,
        ),
    ] = None,
    drafter: DrafterOption = None,
    window_size: WindowOption = None,
    acceptance: Annotated[
        Literal["rejection", "coupled"] | None,
        typer.Option(help="Rule for draft tokens. Default: coupled with --seed.", rich_help_panel=SPECULATION),
    ] = None,
    stream: Annotated[
        bool | None,
        typer.Option(
            help="Show the text as it comes. Default: on a terminal.", rich_help_panel=OUTPUT, show_default=False
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object: outputs and metrics.", rich_help_panel=OUTPUT)
    ] = False,
    logprobs: Annotated[
        int | None, typer.Option(help="With --json: log-probabilities of the k likeliest.", rich_help_panel=OUTPUT)
    ] = None,
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"] | None,
        typer.Option(help="Compute in this type instead of the one that was built."),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="PyTorch device. Default: cpu, or cuda for a pair that TensorRT-LLM compiled.")
    ] = None,
) -> None:
    """Generate text from one prompt with a built pair.

    The text goes to stdout. Progress, and a closing line with the speed and
    the acceptance length, go to stderr.
    """
    sampling = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "logit_bias": logit_bias,
        "bad_words": bad_words,
        "seed": seed,
        "n": n,
        "max_tokens": max_tokens,
        "min_tokens": min_tokens,
        "stop": stop,
        "stop_token_ids": stop_token_ids,
        "ignore_eos": ignore_eos,
        "logprobs": logprobs,
        "acceptance": acceptance,
    }
    options = {
        "num_draft_tokens": num_draft_tokens,
        "drafter": drafter,
        "window_size": window_size,
        "dtype": dtype,
        "device": device,
    }
    answer_prompt(
        engine, options, sampling, Asked(prompt, prompt_file, chat=chat, system=system), as_json=as_json, stream=stream
    )
