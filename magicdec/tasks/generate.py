"""One prompt, answered on stdout; what is said about it goes to stderr."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from magicdec.console import PrefillBar, TextStream, err, read_text, summary
from magicdec.errors import RequestError
from magicdec.tasks.options import draft_length, parse_logit_bias
from magicdec.tasks.ranks import leave_if_not_first

if TYPE_CHECKING:
    from magicdec.runtime.llm import LLM
    from magicdec.runtime.outputs import RequestOutput
    from magicdec.runtime.sampling_params import SamplingParams


@dataclass(frozen=True)
class Asked:
    """The prompt: a text or a file (- is stdin), plain or as a user's message after a system message."""

    prompt: str | None
    prompt_file: str | None
    chat: bool = False
    system: str | None = None


def answer_prompt(
    engine: Path,
    options: dict[str, Any],
    sampling: dict[str, Any],
    asked: Asked,
    *,
    as_json: bool,
    stream: bool | None,
) -> None:
    """Load a pair and print its answer.

    options: of `LLM`, num_draft_tokens as it was typed. sampling: of `SamplingParams`, None where nothing is given,
    logit_bias as it was typed. stream None: on a terminal. Under a launcher of several processes the others serve rank
    0, and end here.
    """
    from magicdec.runtime.sampling_params import SamplingParams

    leave_if_not_first()
    text = _prompt_text(asked)
    given = sampling | {"logit_bias": parse_logit_bias(sampling["logit_bias"] or []) or None}
    params = SamplingParams(**{name: value for name, value in given.items() if value is not None})
    _check_together(params, asked, as_json=as_json, stream=stream)
    from magicdec.runtime.llm import LLM

    llm = LLM(engine, **options | {"num_draft_tokens": draft_length(options["num_draft_tokens"])})
    token_ids = _token_ids(llm, text, asked)
    if stream is None:
        stream = sys.stdout.isatty() and params.n == 1 and not as_json
    output = _stream(llm, token_ids, params) if stream else _generate(llm, token_ids, params)
    _raise_failure(output)
    if as_json:
        typer.echo(json.dumps(as_dict(output), ensure_ascii=False, indent=1))
    elif not stream:
        _print_texts(output)
    err().print(summary(output.metrics), style="dim", soft_wrap=True)


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


def _prompt_text(asked: Asked) -> str:
    prompt, prompt_file = asked.prompt, asked.prompt_file
    if (prompt is None) == (prompt_file is None):
        both = "both --prompt and --prompt-file are given" if prompt is not None else "no prompt is given"
        raise RequestError(f"{both}; give one of --prompt TEXT and --prompt-file FILE (- for stdin)")
    if prompt_file is None:
        return prompt or ""
    if prompt_file == "-":
        return sys.stdin.read()
    return read_text(Path(prompt_file))


def _check_together(params: "SamplingParams", asked: Asked, *, as_json: bool, stream: bool | None) -> None:
    """Refuse options that would otherwise be ignored."""
    if asked.system is not None and not asked.chat:
        raise RequestError(f"--system {asked.system!r} needs --chat; a plain prompt has no system message")
    if params.logprobs is not None and not as_json:
        raise RequestError(f"--logprobs {params.logprobs} is only printed with --json; add it")
    if stream and (as_json or params.n > 1):
        raise RequestError("--stream goes with neither --json nor --n above 1; leave one of them out")


def _token_ids(llm: "LLM", text: str, asked: Asked) -> list[int]:
    if not asked.chat:
        return llm.tokenizer.encode(text)
    messages = [{"role": "system", "content": asked.system}] if asked.system is not None else []
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
