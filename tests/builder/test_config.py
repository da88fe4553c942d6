"""YAML configurations: those that come with the package, and errors that name file, key, value and mend."""

from pathlib import Path

import pytest

from magicdec.builder.checkpoints.model_spec import ModelSpec
from magicdec.builder.config import config_names, load_config, resolve_config
from magicdec.builder.memory import GPU_BYTES, USABLE_FRACTION, memory_need
from magicdec.builder.pair import Side, check_pair
from magicdec.builder.tokenizer import TokenizerInfo
from magicdec.errors import ConfigError
from magicdec.pair.config import ROLES, PairConfig, Role
from tests.builder.published import PUBLISHED

MINIMAL = "name: tiny\ntarget: random\ndraft: {kind: self}\n"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "pair.yaml"
    path.write_text(text)
    return path


def test_minimal_file_takes_the_defaults(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, MINIMAL))
    assert (config.draft.kind, config.draft.window_size, config.block_size, config.tp_size) == ("self", 512, 16, 1)


def test_the_seven_configurations_come_with_the_package() -> None:
    assert config_names() == [
        "llama-2-70b-tinyllama",
        "llama-2-7b-llama-68m",
        "llama-3.1-8b-llama-3.2-1b",
        "llama-3.1-8b-self",
        "qwen2.5-32b-qwen2.5-7b",
        "smollm2-135m-self",
        "smollm2-135m-self-int4",
    ]


@pytest.mark.parametrize("name", config_names())
def test_packaged_configuration_passes_every_check_with_its_models(name: str, tmp_path: Path) -> None:
    config = load_config(name)
    assert config.name == name
    tokens = {0: "<s>", 1: "a"}

    def side(role: Role, model: str) -> Side:
        return Side(role, Path(model), PUBLISHED[model].spec, TokenizerInfo(Path(model), tokens, frozenset({0}), 0))

    target = side("target", config.target)
    assert (config.draft_model is not None) == (config.draft.kind == "model")
    draft = side("draft", config.draft_model or config.target) if config.has_draft_weights else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("magicdec.builder.pair.disk_bytes", lambda *_: 0)
        check_pair(config, target, draft, tmp_path / "engine")


@pytest.mark.parametrize("name", [name for name in config_names() if load_config(name).gpu is not None])
def test_packaged_configuration_fits_its_gpu_with_several_sequences(name: str) -> None:
    config = load_config(name)
    draft: ModelSpec | None = PUBLISHED[config.draft_model].spec if config.draft_model is not None else None
    need = memory_need(config, PUBLISHED[config.target].spec, draft)
    assert config.gpu is not None
    assert need.sequences_in(int(GPU_BYTES[config.gpu] * USABLE_FRACTION)) >= 12


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (MINIMAL + "window: 3\n", r"pair\.yaml: window: unknown key \(value 3\); known keys: name, target"),
        (MINIMAL + "max_seqlen: 3\n", r"max_seqlen: unknown key \(value 3\); did you mean max_seq_len\?"),
        ("name: a\ntarget: b\ndraft: {kind: self, sinks: 4}\n", r"draft\.sinks: unknown key \(value 4\)"),
        ("name: a\ndraft: {kind: self}\n", r"target: missing; add it"),
        (MINIMAL + "max_seq_len: '8192'\n", r"max_seq_len: '8192': Input should be a valid integer"),
        (MINIMAL + "dtype: fp8\n", r"dtype: 'fp8': Input should be 'bfloat16', 'float16' or 'float32'"),
        (MINIMAL + "kv_cache_dtype: int8\n", r"kv_cache_dtype: 'int8': Input should be 'auto', 'bfloat16', 'float16'"),
        (MINIMAL + "quantization: {targets: fp8}\n", r"quantization\.targets: unknown key.*did you mean target\?"),
        (MINIMAL + "kv_cache_dtype: fp8\ngpu: a100-80gb\n", r"An FP8 KV cache.*no FP8 arithmetic"),
        (MINIMAL + "gpu: tpu\n", r"gpu: 'tpu': Input should be 'a100-80gb', 'h100-80gb' or 'h200'"),
        ("name: a\ntarget: b\ndraft: {kind: self, window_size: 100}\n", r"window_size 100 is not a multiple.*use 112"),
        (MINIMAL + "name: twice\n", r"key 'name' is given twice"),
        (MINIMAL + "x: [1\n", "not valid YAML"),
        ("- a\n", "holds a list where keys"),
        ("", "holds nothing where keys"),
    ],
)
def test_errors_name_the_key_the_value_and_the_mend(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        load_config(write(tmp_path, text))
    assert "pair.yaml" in str(error.value)


def test_every_error_of_a_file_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(write(tmp_path, MINIMAL + "block_size: 12\nmax_seq_len: -1\n"))
    assert "block_size: 12" in str(error.value)
    assert "max_seq_len: -1" in str(error.value)


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"no-such-pair does not exist.*smollm2-135m-self"):
        load_config("no-such-pair")


def test_the_caller_decides_on_kind_dtype_and_ranks(tmp_path: Path) -> None:
    text = "name: a\ntarget: b\ndraft_model: c\ndraft: {kind: model, sink_positions: in_cache}\n"
    config = resolve_config(load_config(write(tmp_path, text)), kind="self", dtype="float32", tp_size=2)
    assert (config.draft.kind, config.draft.sink_positions, config.draft_model) == ("self", None, None)
    assert (config.dtype, config.tp_size) == ("float32", 2)
    with pytest.raises(ConfigError, match="tp_size: 0"):
        resolve_config(config, kind="self", tp_size=0)


def test_a_draft_model_may_have_fewer_ranks_than_its_target() -> None:
    values = {"name": "a", "target": "b", "tp_size": 4, "draft": {"kind": "model"}}
    config = PairConfig.model_validate(values)
    assert (config.tp_size_of("target"), config.tp_size_of("draft")) == (4, 4)
    fewer = resolve_config(config, kind="model", draft_tp_size=2)
    assert (fewer.tp_size_of("target"), fewer.tp_size_of("draft")) == (4, 2)
    assert resolve_config(fewer, kind="self").tp_size_of("draft") == 4
    with pytest.raises(ConfigError, match=r"draft.tp_size 2 is more than tp_size 1.*use at most 1"):
        resolve_config(fewer, kind="model", tp_size=1)
    with pytest.raises(ConfigError, match=r"draft.tp_size 2 with kind 'ngram'.*leave it out"):
        resolve_config(config, kind="ngram", draft_tp_size=2)


def test_precision_switches_of_another_kind_of_draft_are_dropped_and_the_callers_hold() -> None:
    text = {"draft": {"kind": "model", "kv_cache_dtype": "fp8"}, "quantization": {"draft": "fp8"}}
    config = PairConfig.model_validate({"name": "a", "target": "b", **text})
    alone = resolve_config(config, kind="self")
    assert (alone.draft.kv_cache_dtype, alone.quantization.draft) == ("auto", None)
    given = resolve_config(
        config, kind="model", quantize_target="fp8", kv_cache_dtype="fp8", draft_kv_cache_dtype="auto"
    )
    assert (given.quantization_of("target"), given.quantization_of("draft")) == ("fp8", "fp8")
    assert (given.kv_cache_dtype_of("target"), given.kv_cache_dtype_of("draft")) == ("fp8", "bfloat16")
    with pytest.raises(ConfigError, match=r"a: quantization\.draft 'fp8' differs from the target's 'none'"):
        resolve_config(config, kind="self", quantize_draft="fp8")
    int4 = resolve_config(config, kind="self", quantize_draft="int4")
    assert (int4.roles, int4.quantization_of("draft"), int4.quantization_of("target")) == (ROLES, "int4", "none")
    assert resolve_config(int4, kind="ngram").quantization.draft is None
