"""Pair checks: which target and draft go together, and the reason when they do not."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from magicdec.builder import pair
from magicdec.builder.build import build_pair
from magicdec.builder.config import load_config
from magicdec.builder.memory import memory_need, rank_kv_bytes_per_token
from magicdec.builder.pair import Side, check_pair, check_tokenizers, resolve_eos
from magicdec.builder.tokenizer import TokenizerInfo
from magicdec.errors import BuildError, CheckpointError, ConfigError, PairError
from magicdec.pair.config import Role
from magicdec.pair.manifest import load_engine
from tests.builder.engines import tiny_config
from tests.builder.published import PUBLISHED
from tests.support.tiny_models import write_tiny_checkpoint

LLAMA2, LLAMA2_70B = "meta-llama/Llama-2-7b-hf", "meta-llama/Llama-2-70b-chat-hf"
LLAMA3, LLAMA31, LLAMA32 = (
    f"meta-llama/{name}" for name in ("Meta-Llama-3-8B", "Llama-3.1-8B-Instruct", "Llama-3.2-1B-Instruct")
)
SMALL, TINY = "JackFram/llama-68m", "TinyLlama/TinyLlama-1.1B-Chat-v1.0"


def side(role: Role, model: str, ids: int, *, prefix: str = "token") -> Side:
    tokens = {index: f"{prefix}{index}" for index in range(ids)}
    return Side(role, Path(model), PUBLISHED[model].spec, TokenizerInfo(Path(model), tokens, frozenset({0}), 0))


def test_llama_3_with_llama_68m_is_refused_with_the_reason(tmp_path: Path) -> None:
    target = side("target", LLAMA3, 128256, prefix="tiktoken")
    draft = side("draft", SMALL, 32000, prefix="sentencepiece")
    with pytest.raises(PairError) as error:
        check_pair(load_config("llama-2-7b-llama-68m"), target, draft, tmp_path / "engine")
    text = str(error.value)
    assert "Meta-Llama-3-8B has 128256 usable token ids" in text
    assert "llama-68m has 32000" in text
    assert "first difference: special token id 0 is 'tiktoken0' in the target and 'sentencepiece0' in the draft" in text
    assert "Choose a draft of the target's family, or --draft self or ngram" in text


def test_padded_vocabularies_are_the_same_vocabulary() -> None:
    target = side("target", "Qwen/Qwen2.5-32B-Instruct", 151665)
    draft = side("draft", "Qwen/Qwen2.5-0.5B", 151665)
    assert (target.spec.vocab_size, draft.spec.vocab_size) == (152064, 151936)
    check_tokenizers(target, draft)
    assert target.vocab_size == draft.vocab_size == 151665


@pytest.mark.parametrize("index", [0, 7, 31999])
def test_one_other_token_is_found_and_named(index: int) -> None:
    target, draft = side("target", LLAMA2, 32000), side("draft", SMALL, 32000)
    tokens = dict(draft.tokenizer.tokens) | {index: "other"}
    other = Side("draft", draft.path, draft.spec, TokenizerInfo(draft.path, tokens, frozenset({0}), 0))
    kind = "special token id" if index == 0 else "token id"
    with pytest.raises(PairError, match=rf" {kind} {index} is 'token{index}' in the target and 'other' in the draft"):
        check_tokenizers(target, other)


def test_a_token_that_the_draft_lacks_is_refused() -> None:
    target, draft = side("target", LLAMA31, 128256), side("draft", LLAMA32, 128255)
    with pytest.raises(PairError, match=r"has 128256 usable token ids, .*Llama-3\.2-1B-Instruct has 128255"):
        check_tokenizers(target, draft)


def test_ids_without_a_row_in_the_model_do_not_count() -> None:
    # A padding token added to the tokenizer only, as many LLaMA 2 checkpoints have it.
    check_tokenizers(side("target", LLAMA2, 32001), side("draft", SMALL, 32000))


def test_special_and_end_tokens_that_differ_are_noted(caplog: pytest.LogCaptureFixture) -> None:
    target = side("target", LLAMA2, 32000)
    draft = side("draft", SMALL, 32000)
    info = TokenizerInfo(draft.path, draft.tokenizer.tokens, frozenset({0, 1, 5}), 3)
    check_tokenizers(target, Side("draft", draft.path, draft.spec, info))
    assert "token ids 1, 5 are special to only one of the two tokenizers" in caplog.text
    assert "the draft's end token is 3, the target's 0" in caplog.text


def lengths(window: int, **changes: Any) -> Any:
    draft = {"kind": "model", "window_size": window, "max_draft_len": 8, **changes.pop("draft", {})}
    return tiny_config(draft=draft, **{"max_seq_len": 4096, **changes})


def check_lengths(config: Any, target: str = LLAMA2, draft: str | None = TINY) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pair, "_check_disk", lambda *_: None)
        check_pair(
            config,
            side("target", target, 32000),
            side("draft", draft, 32000) if draft is not None else None,
            Path("engine"),
        )


def test_window_must_stay_within_what_the_draft_was_trained_for() -> None:
    # TinyLlama: 2048 positions. Sinks 16 + window 1984 + two spare blocks 32 + draft length 8 = 2040.
    check_lengths(lengths(1984))
    with pytest.raises(
        PairError, match=r"trained for 2048 positions, but sinks 16 \+ window 2000.*make 2056.*at most 1984"
    ):
        check_lengths(lengths(2000))


def test_a_wider_window_is_fine_where_no_sequence_fills_it() -> None:
    check_lengths(lengths(4096, max_seq_len=2048))


def test_absolute_sinks_need_a_draft_trained_for_the_whole_sequence() -> None:
    with pytest.raises(
        PairError, match=r"'absolute'.*up to max_seq_len 4096 positions back. Use sink_positions in_cache"
    ):
        check_lengths(lengths(512, draft={"sink_positions": "absolute"}))
    check_lengths(lengths(512, max_seq_len=2048, draft={"sink_positions": "absolute"}))


def test_sequences_beyond_the_targets_training_need_an_explicit_choice(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match=r"max_seq_len 8192 is more than the 4096.*beyond_trained_len: true"):
        check_lengths(lengths(512, max_seq_len=8192))
    check_lengths(lengths(512, max_seq_len=8192, beyond_trained_len=True))
    assert "max_seq_len 8192 is beyond the target's trained length 4096" in caplog.text


def test_both_models_must_divide_by_the_ranks() -> None:
    with pytest.raises(ConfigError, match=r"tp_size 8: the draft's 12 attention heads.*Set draft.tp_size"):
        check_lengths(lengths(512, tp_size=8), LLAMA2_70B, SMALL)


def test_a_pair_that_does_not_fit_its_gpu_is_refused_with_the_sums() -> None:
    with pytest.raises(ConfigError, match=r"not fit on a100-80gb with tp_size 1: .*weights 128\.48 GiB.*Raise tp_size"):
        check_lengths(lengths(512, gpu="a100-80gb", dtype="bfloat16"), LLAMA2_70B, None)
    check_lengths(lengths(512, gpu="a100-80gb", dtype="bfloat16", tp_size=4), LLAMA2_70B, None)


def test_a_gpu_with_room_for_some_sequences_is_noted(caplog: pytest.LogCaptureFixture) -> None:
    check_lengths(lengths(512, gpu="a100-80gb", dtype="bfloat16", max_batch_size=64), LLAMA2, None)
    assert "a100-80gb holds 29 sequences of max_seq_len 4096 at once" in caplog.text


def test_kv_bytes_are_the_published_ones() -> None:
    kv = {
        model: rank_kv_bytes_per_token(PUBLISHED[model].spec, "bfloat16", 1)
        for model in (LLAMA31, LLAMA32, TINY, SMALL)
    }
    assert kv == {LLAMA31: 131072, LLAMA32: 32768, TINY: 22528, SMALL: 6144}
    assert rank_kv_bytes_per_token(PUBLISHED[LLAMA2_70B].spec, "bfloat16", 16) == 2 * 80 * 128 * 2  # one head a rank


def test_draft_memory_does_not_depend_on_the_context() -> None:
    target, draft = PUBLISHED[LLAMA2].spec, PUBLISHED[TINY].spec
    short, long = (memory_need(lengths(512, max_seq_len=size), target, draft) for size in (1024, 32768))
    assert short.draft_kv == long.draft_kv > 0
    assert long.kv_sequence == 32 * short.kv_sequence
    assert memory_need(lengths(512), target, None).draft_kv == 0


def test_too_little_free_disk_is_told_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = 1 << 30

    monkeypatch.setattr("shutil.disk_usage", lambda _path: Usage())
    with pytest.raises(BuildError, match=r"the engine needs 12\.\d+ GiB and its disk has 1\.00 GiB free"):
        check_pair(lengths(512, dtype="bfloat16"), side("target", LLAMA2, 32000), None, tmp_path / "engine")


def test_end_tokens_fall_back_on_the_tokenizer_and_must_exist() -> None:
    assert resolve_eos(side("target", LLAMA2, 32000)) == [0]
    bad = replace(PUBLISHED[LLAMA2].spec, eos_token_ids=(32000,))
    with pytest.raises(CheckpointError, match="eos_token_id 32000 is not one of the 32000 token ids"):
        resolve_eos(Side("target", Path("x"), bad, side("target", LLAMA2, 32000).tokenizer))


def test_real_tokenizers_that_differ_are_refused_and_nothing_is_left(tmp_path: Path) -> None:
    target = write_tiny_checkpoint(tmp_path / "target", vocab_size=300)
    draft = write_tiny_checkpoint(tmp_path / "draft", vocab_size=128)
    with pytest.raises(PairError, match=r"has 300 usable token ids, .* has 128\. "):
        build_pair(target, draft, tiny_config(), tmp_path / "engine")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["draft", "target"]


def test_real_padded_pair_is_built_with_the_usable_ids(tmp_path: Path) -> None:
    target = write_tiny_checkpoint(tmp_path / "target", vocab_size=160, tokenizer_vocab_size=130)
    draft = write_tiny_checkpoint(tmp_path / "draft", "qwen2", vocab_size=144, tokenizer_vocab_size=130)
    output = build_pair(target, draft, tiny_config(), tmp_path / "engine")
    assert [load_engine(output / role).vocab_size for role in ("target", "draft")] == [130, 130]
