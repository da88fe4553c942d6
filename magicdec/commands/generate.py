"""`magicdec generate`: one prompt, answered on stdout."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from magicdec.commands.options import SPECULATION, DrafterOption, WindowOption
from magicdec.console import PrefillBar, TextStream, err, shows_errors, summary
from magicdec.errors import RequestError

if TYPE_CHECKING:
    from magicdec.runtime.llm import LLM
    from magicdec.runtime.outputs import RequestOutput
    from magicdec.runtime.sampling_params import SamplingParams

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
    leave_if_not_first()
    text = _prompt_text(prompt, prompt_file)
    params = _sampling_params(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=parse_logit_bias(logit_bias or []) or None,
        bad_words=bad_words,
        seed=seed,
        n=n,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop=stop,
        stop_token_ids=stop_token_ids,
        ignore_eos=ignore_eos,
        logprobs=logprobs,
        acceptance=acceptance,
    )
    _check_together(params, chat=chat, system=system, as_json=as_json, stream=stream)
    from magicdec.runtime.llm import LLM

    length = draft_length(num_draft_tokens)
    llm = LLM(engine, num_draft_tokens=length, drafter=drafter, window_size=window_size, dtype=dtype, device=device)
    token_ids = _token_ids(llm, text, chat=chat, system=system)
    if stream is None:
        stream = sys.stdout.isatty() and params.n == 1 and not as_json
    output = _stream(llm, token_ids, params) if stream else _generate(llm, token_ids, params)
    _raise_failure(output)
    if as_json:
        typer.echo(json.dumps(as_dict(output), ensure_ascii=False, indent=1))
    elif not stream:
        _print_texts(output)
    err().print(summary(output.metrics), style="dim", soft_wrap=True)


def leave_if_not_first() -> None:
    """Of the processes that mpiexec started, rank 0 reads the prompt and prints; the others serve it and end here."""
    from magicdec.runtime.parallel.mpi import num_launched

    if num_launched() > 1:
        from magicdec.runtime.parallel.leader import join_ranks

        join_ranks()


def parse_logit_bias(entries: Sequence[str]) -> dict[int, float]:
    """`["5=-2.5"]` -> {5: -2.5}; RequestError names the entry that is none."""
    biases = {}
    for entry in entries:
        token_id, _, value = entry.partition("=")
        try:
            biases[int(token_id)] = float(value)
        except ValueError:
            raise RequestError(f"--logit-bias {entry!r} is not ID=VALUE; write for example 42=-1.5") from None
    return biases


def as_dict(output: "RequestOutput") -> dict[str, Any]:
    """What --json prints."""
    metrics = output.metrics
    return {
        "outputs": [
            {
                "text": item.text,
                "token_ids": item.token_ids,
                "finish_reason": item.finish_reason,
                "stop_reason": item.stop_reason,
                "logprobs": item.logprobs
                and [{token: entry._asdict() for token, entry in row.items()} for row in item.logprobs],
            }
            for item in output.outputs
        ],
        "metrics": {
            **vars(metrics),
            "acceptance_length": metrics.acceptance_length,
            "acceptance_rate": metrics.acceptance_rate,
        },
    }


def _prompt_text(prompt: str | None, prompt_file: str | None) -> str:
    if (prompt is None) == (prompt_file is None):
        both = "both --prompt and --prompt-file are given" if prompt is not None else "no prompt is given"
        raise RequestError(f"{both}; give one of --prompt TEXT and --prompt-file FILE (- for stdin)")
    if prompt_file is None:
        return prompt or ""
    if prompt_file == "-":
        return sys.stdin.read()
    return read_text(Path(prompt_file))


def read_text(path: Path) -> str:
    """A UTF-8 file of the user's."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{path} is not UTF-8 text ({error}); convert it first") from error
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}; give a text file") from error


def _sampling_params(**options: Any) -> "SamplingParams":
    from magicdec.runtime.sampling_params import SamplingParams

    return SamplingParams(**{name: value for name, value in options.items() if value is not None})


def draft_length(text: str | None) -> int | Literal["auto"] | None:
    """The value of --num-draft-tokens."""
    if text is None:
        return None
    if text == "auto":
        return "auto"
    if not text.isdecimal():
        raise RequestError(f"--num-draft-tokens {text!r} is not a whole number; give 0, 1, 2, ... or auto")
    return int(text)


def _check_together(
    params: "SamplingParams", *, chat: bool, system: str | None, as_json: bool, stream: bool | None
) -> None:
    """Refuse options that would otherwise be ignored."""
    if system is not None and not chat:
        raise RequestError(f"--system {system!r} needs --chat; a plain prompt has no system message")
    if params.logprobs is not None and not as_json:
        raise RequestError(f"--logprobs {params.logprobs} is only printed with --json; add it")
    if stream and (as_json or params.n > 1):
        raise RequestError("--stream goes with neither --json nor --n above 1; leave one of them out")


def _token_ids(llm: "LLM", text: str, *, chat: bool, system: str | None) -> list[int]:
    if not chat:
        return llm.tokenizer.encode(text)
    messages = [{"role": "system", "content": system}] if system is not None else []
    return llm.chat_prompt([*messages, {"role": "user", "content": text}])


def _generate(llm: "LLM", token_ids: list[int], params: "SamplingParams") -> "RequestOutput":
    with PrefillBar(len(token_ids)) as bar:
        return llm.generate([token_ids], params, on_progress=bar)[0]


def _stream(llm: "LLM", token_ids: list[int], params: "SamplingParams") -> "RequestOutput":
    show, output = TextStream(), None
    with PrefillBar(len(token_ids)) as bar:
        for output in llm.generate_stream(token_ids, params, on_progress=bar):
            show(output.outputs[0].text)
    typer.echo()
    assert output is not None, "a request ends with an output"
    return output


def _raise_failure(output: "RequestOutput") -> None:
    for item in output.outputs:
        if item.finish_reason == "error":
            raise RequestError(f"generation failed: {item.error}")


def _print_texts(output: "RequestOutput") -> None:
    for item in output.outputs:
        if len(output.outputs) > 1:
            err().rule(f"output {item.index}")
        typer.echo(item.text)
