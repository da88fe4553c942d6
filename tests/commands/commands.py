"""Runs commands as a user would, and tells what they said."""

from typer.testing import CliRunner, Result

from magicdec.cli import app

PROMPT = "in the other one the rest are there and then on and on again "
CONFIG = {
    "name": "tiny",
    "target": "random",
    "draft": {"kind": "self", "window_size": 32},
    "dtype": "float32",
    "max_seq_len": 256,
    "max_num_tokens": 128,
}


def run(*args: object, stdin: str | None = None) -> Result:
    wide = {"COLUMNS": "250", "NO_COLOR": "1", "TERM": "dumb"}
    return CliRunner().invoke(app, [str(arg) for arg in args], input=stdin, env=wide)


def succeed(*args: object, stdin: str | None = None) -> Result:
    result = run(*args, stdin=stdin)
    assert result.exit_code == 0, result.output
    return result


def fail(*args: object) -> str:
    """The message of a user's error: one, on stderr, without a traceback."""
    result = run(*args)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return str(result.stderr)
