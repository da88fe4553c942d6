"""What needs no server: word lists, what a request's tensors mean, parameters, and the repository's files."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from magicdec.cli import app
from magicdec.errors import ConfigError, RequestError
from magicdec.runtime.triton_backend.llm.request import LLMRow, RequestReader
from magicdec.runtime.triton_backend.parameters import LLMParameters
from magicdec.runtime.triton_backend.repository import MODELS, write_repository
from magicdec.runtime.triton_backend.word_lists import pack_words, unpack_words
from tests.runtime.triton_backend.client import arrays

Words = list[list[int]]
TOKENS: dict[str, Any] = {"input_ids": [5, 6, 7, 0], "input_lengths": 3, "request_output_len": 9}
EOS = 2


@given(st.lists(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4), max_size=4), min_size=1, max_size=4))
def test_word_lists_survive_the_way(batch: list[Words]) -> None:
    packed = pack_words(batch)
    assert packed.dtype == np.int32
    assert [unpack_words("words", row) for row in packed] == batch


def test_a_word_list_looks_as_in_the_backend() -> None:
    assert pack_words([[[7, 8], [9]], [[4]]]).tolist() == [[[7, 8, 9], [2, 3, -1]], [[4, 0, 0], [1, -1, -1]]]


@pytest.mark.parametrize("ends", [[0, -1], [2, 2], [3, -1], [2, 1], [-2, 2]])
def test_ends_that_do_not_rise_are_refused(ends: list[int]) -> None:
    with pytest.raises(RequestError, match="words has the ends"):
        unpack_words("words", np.array([[7, 8], ends], np.int32))


def decode(ids: Any) -> str:
    """Letters; 0..3 are special."""
    return "".join(chr(97 + token) for token in ids if token > 3)


def read(*, decoupled: bool = True, exclude_input: bool = False, **values: Any) -> LLMRow:
    reader = RequestReader(frozenset({EOS, 3}), 20, decode, decoupled=decoupled, exclude_input=exclude_input)
    (row,) = reader.rows(arrays(TOKENS | values))
    return row


def test_the_prompt_is_cut_at_its_length() -> None:
    assert read().token_ids == [5, 6, 7]


@pytest.mark.parametrize(
    ("values", "temperature", "top_k", "top_p"),
    [
        ({}, 0.0, 0, 1.0),
        ({"temperature": 0.7}, 0.0, 0, 1.0),
        ({"runtime_top_k": 1, "runtime_top_p": 0.9}, 0.0, 0, 1.0),
        ({"runtime_top_k": 0, "runtime_top_p": 0.0}, 0.0, 0, 1.0),
        ({"runtime_top_k": 5, "temperature": 0.7}, 0.7, 5, 1.0),
        ({"runtime_top_p": 0.9, "temperature": 0.7}, 0.7, 0, 0.9),
        ({"runtime_top_k": 5, "runtime_top_p": -1.0}, 1.0, 5, 1.0),
        ({"runtime_top_k": 5, "temperature": 0.0}, 0.0, 5, 1.0),
    ],
)
def test_what_is_sampled_follows_the_backend(
    values: dict[str, Any], temperature: float, top_k: int, top_p: float
) -> None:
    params = read(**values).params
    assert (params.temperature, params.top_k, params.top_p) == (temperature, top_k, top_p)


def test_ends() -> None:
    own = read(end_id=EOS)
    assert (own.end_id, own.params.ignore_eos, own.params.stop_token_ids) == (None, False, [])
    none = read(end_id=-1)
    assert (none.params.ignore_eos, none.params.stop_token_ids) == (True, [])
    other = read(end_id=9)
    assert (other.end_id, other.params.ignore_eos, other.params.stop_token_ids) == (9, True, [9])


def test_words_become_text_and_special_tokens_ids() -> None:
    params = read(stop_words_list=pack_words([[[4, 5], [1], [6]]]), bad_words_list=pack_words([[[7]]])).params
    assert (params.stop, params.stop_token_ids, params.bad_words) == (["ef", "g"], [1], ["h"])
    with pytest.raises(RequestError, match=re.escape("[1, 2], which is no text")):
        read(stop_words_list=pack_words([[[1, 2]]]))


def test_the_rest_of_a_request() -> None:
    row = read(
        seed=2**63,
        min_tokens=2,
        num_return_sequences=3,
        num_draft_tokens=0,
        use_draft_logits=True,
        return_log_probs=True,
        embedding_bias=[0.0, 1.5, 0.0, -2.0],
        repetition_penalty=1.1,
    )
    params = row.params
    assert (params.seed, params.min_tokens, params.n, params.num_draft_tokens) == (2**63, 2, 3, 0)
    assert (params.acceptance, params.logprobs, params.logit_bias) == ("rejection", 0, {1: 1.5, 3: -2.0})
    assert params.repetition_penalty == 1.1


def test_who_decides_about_the_prompt_in_the_output() -> None:
    assert not read().exclude_input
    assert read(exclude_input=True).exclude_input
    assert not read(exclude_input=True, exclude_input_in_output=False).exclude_input
    assert read(streaming=True, exclude_input_in_output=False).exclude_input
    with pytest.raises(RequestError, match="Streaming is only supported in decoupled mode"):
        read(decoupled=False, streaming=True)


def test_rows_that_do_not_match() -> None:
    with pytest.raises(RequestError, match="input seed has 2 rows, and input_ids has 1"):
        read(seed=np.zeros((2, 1), np.uint64))
    with pytest.raises(RequestError, match="input seed has 2 values for one request"):
        read(seed=[1, 2])
    with pytest.raises(RequestError, match="input request_output_len is missing"):
        RequestReader(frozenset(), 20, decode, decoupled=True, exclude_input=False).rows(arrays({"input_ids": [5]}))


def test_parameters_survive_the_file() -> None:
    given = LLMParameters(Path("/x"), exclude_input_in_output=True, num_draft_tokens="auto", kv_cache_tokens=64)
    filled = {name: text for name, text in given.texts().items() if text}
    assert filled["max_tokens_in_paged_kv_cache"] == "64"
    assert LLMParameters.read(filled) == given
    assert LLMParameters.read(filled | {"FORCE_CPU_ONLY_INPUT_TENSORS": "no"}) == given


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_beam_width": "2"}, "parameter max_beam_width is not supported"),
        ({"max_queue_size": "many"}, "parameter max_queue_size is 'many'"),
        ({"exclude_input_in_output": "perhaps"}, "parameter exclude_input_in_output is 'perhaps'"),
    ],
)
def test_parameters_that_are_none(change: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLMParameters.read({"gpt_model_path": "/x"} | change)
    with pytest.raises(ConfigError, match="parameter gpt_model_path is missing"):
        LLMParameters.read({})


def test_a_repository_is_only_replaced_when_asked(engine: Path, tmp_path: Path) -> None:
    models, parameters = tmp_path / "models", LLMParameters(engine)
    write_repository(models, parameters)
    assert sorted(path.name for path in models.iterdir()) == sorted(MODELS)
    with pytest.raises(ConfigError, match="--overwrite"):
        write_repository(models, parameters)
    write_repository(models, parameters, decoupled=False, overwrite=True)
    assert "decoupled" not in (models / "tensorrt_llm" / "config.pbtxt").read_text()
    (models / "mine").mkdir()
    with pytest.raises(ConfigError, match="holds mine"):
        write_repository(models, parameters, overwrite=True)


def test_the_command_names_its_mistakes(engine: Path, tmp_path: Path) -> None:
    def run(*arguments: object) -> str:
        result = CliRunner().invoke(app, ["triton-repo", "--output", str(tmp_path / "m"), *map(str, arguments)])
        assert result.exit_code != 0
        return " ".join(result.output.split())

    assert "pair.json" in run("--engine", tmp_path / "nowhere")
    assert "not a whole number" in run("--engine", engine, "--num-draft-tokens", "some")
    assert "max-batch-size" in run("--engine", engine, "--max-batch-size", "0")
