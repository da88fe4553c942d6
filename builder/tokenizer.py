"""Tokenizer files of an engine directory: copied from a Hugging Face directory, or made from a GGUF's metadata."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from magicdec.builder.checkpoints.gguf_source import GgufSource
from magicdec.builder.checkpoints.source import TensorSource
from magicdec.errors import CheckpointError

TOKENIZER_FILE = "tokenizer.json"
_OPTIONAL_FILES = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
_SPECIAL_KEYS = ("bos_token", "eos_token", "unk_token", "pad_token")
_LLAMA3_RULES = ("llama3", "llama-v3", "llama-bpe")
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


@dataclass(frozen=True)
class TokenizerInfo:
    """tokens: id -> token as the tokenizer spells it; special: ids of special tokens; eos_id: its own end token."""

    path: Path
    tokens: Mapping[int, str]
    special: frozenset[int]
    eos_id: int | None

    @property
    def size(self) -> int:
        """1 + the highest id."""
        return max(self.tokens) + 1


def stage_tokenizer(source: TensorSource, directory: Path) -> TokenizerInfo:
    """Put the source's tokenizer files into `directory` and read them; CheckpointError without a tokenizer.json."""
    if isinstance(source, GgufSource):
        _convert_gguf(source, directory)
    else:
        _copy(source.path, directory)
    return _read(directory, source.path)


def _copy(source: Path, directory: Path) -> None:
    if not (source / TOKENIZER_FILE).is_file():
        raise CheckpointError(
            f"{source / TOKENIZER_FILE} is missing. Where tokenizer.model or vocab.json is there, transformers makes "
            f"it: AutoTokenizer.from_pretrained({str(source)!r}).save_pretrained({str(source)!r})"
        )
    for name in (TOKENIZER_FILE, *_OPTIONAL_FILES):
        if (source / name).is_file():
            shutil.copyfile(source / name, directory / name)


def _read(directory: Path, source: Path) -> TokenizerInfo:
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(directory / TOKENIZER_FILE))
    except Exception as error:  # tokenizers raises bare Exception for a damaged file
        raise CheckpointError(f"{source}: {TOKENIZER_FILE} cannot be read ({error}). Copy it again.") from error
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    if not vocab:
        raise CheckpointError(f"{source}: {TOKENIZER_FILE} has no tokens. Copy it again.")
    special = frozenset(index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special)
    return TokenizerInfo(source, {index: token for token, index in vocab.items()}, special, _eos_id(directory, vocab))


def _eos_id(directory: Path, vocab: Mapping[str, int]) -> int | None:
    path = directory / "tokenizer_config.json"
    try:
        eos = json.loads(path.read_text(encoding="utf-8")).get("eos_token") if path.is_file() else None
    except (ValueError, AttributeError) as error:
        raise CheckpointError(f"{path.name} cannot be read as a JSON object ({error}). Copy it again.") from error
    if isinstance(eos, dict):
        eos = eos.get("content")
    return vocab.get(eos) if isinstance(eos, str) else None


def _convert_gguf(source: GgufSource, directory: Path) -> None:
    from transformers import AutoTokenizer

    path = source.path
    try:
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
        tokenizer.save_pretrained(directory)
    except Exception as error:  # a third party's converter; whatever stops it, the mend is the same
        raise CheckpointError(
            f"{path}: its tokenizer ({source.tokenizer_model}) cannot be converted ({error}). Give the Hugging Face "
            "checkpoint instead."
        ) from error
    if not (directory / TOKENIZER_FILE).is_file():
        raise CheckpointError(f"{path}: no {TOKENIZER_FILE} could be made of it. Give the Hugging Face checkpoint.")
    _correct(source, directory)


def _correct(source: GgufSource, directory: Path) -> None:
    """Make what transformers' converter wrote say what the GGUF says.

    It adds GPT-2's <|endoftext|> to vocabularies that have none, keeps the tokens that only pad the vocabulary, and
    does not know every rule for splitting text into words (tokenizer.ggml.pre), for which it falls back on GPT-2's.
    """
    path, config_path = directory / TOKENIZER_FILE, directory / "tokenizer_config.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    data["added_tokens"] = [token for token in data["added_tokens"] if token["id"] < source.num_tokens]
    model = data["model"]
    if model["type"] == "BPE":
        model["vocab"] = {token: index for token, index in model["vocab"].items() if index < source.num_tokens}
    if source.tokenizer_model == "gpt2":
        data["pre_tokenizer"] = _pre_tokenizer(source)
        model["ignore_merges"] = source.tokenizer_rule in _LLAMA3_RULES
        if source.tokenizer_rule == "qwen2":
            data["normalizer"] = {"type": "NFC"}
    path.write_text(json.dumps(data, ensure_ascii=False, indent=2), encoding="utf-8")
    known = {*model["vocab"], *(token["content"] for token in data["added_tokens"])}
    config = json.loads(config_path.read_text(encoding="utf-8"))
    unknown = [key for key, value in config.items() if key in _SPECIAL_KEYS and value not in known]
    config = {key: value for key, value in config.items() if key not in unknown}
    config_path.write_text(json.dumps(config, ensure_ascii=False, indent=2), encoding="utf-8")


def _pre_tokenizer(source: GgufSource) -> dict[str, Any]:
    """How text is split into words; the regular expressions are those the models were trained with."""
    rules: dict[str, dict[str, Any]] = {
        "smollm": _sequence({"type": "Digits", "individual_digits": True}, _BYTE_LEVEL),
        **dict.fromkeys(_LLAMA3_RULES, _split(rf"{_ENDINGS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}")),
        "qwen2": _split(rf"{_ENDINGS}|{_WORDS}|\p{{N}}|{_REST}"),
        "gpt-2": _BYTE_LEVEL,
        "default": _BYTE_LEVEL,
    }
    name = source.tokenizer_rule
    if name not in rules:
        raise CheckpointError(
            f"{source.path}: tokenizer.ggml.pre is {name!r}, a way to split text that is not known here (known: "
            f"{', '.join(rules)}). Give the Hugging Face checkpoint instead."
        )
    return rules[name]


def _sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(steps)}


def _split(regex: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    return _sequence(split, {**_BYTE_LEVEL, "use_regex": False})
