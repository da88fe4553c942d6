"""What FP8 does to the real model: perplexity and likeliest tokens on text that calibration has not seen."""

import math
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch

from magicdec.builder.build import build_pair
from magicdec.builder.calibrate import CALIBRATION_TOKENS
from magicdec.builder.config import load_config, resolve_config
from magicdec.plugins.model.inputs import SequenceInput, pack
from magicdec.runtime.runners.torch_runner import TorchRunner
from magicdec.runtime.text.tokenizer import HFTokenizer
from tests.support.smollm2 import smollm2_gguf

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("all_threads")]
LENGTH, BLOCK = 2048, 16


def engine(directory: Path, *, weights: bool = False, kv: bool = False) -> Path:
    config = resolve_config(
        load_config("smollm2-135m-self"),
        kind="self",
        quantize_target="fp8" if weights else None,
        kv_cache_dtype="fp8" if kv else None,
    )
    return build_pair(smollm2_gguf(), "self", config, directory) / "target"


def evaluate(target: Path) -> tuple[float, torch.Tensor]:
    """Mean negative log-likelihood, and the likeliest token at every position."""
    text = "\n\n".join(topics[name].strip() for name in sorted(topics))
    tokens = HFTokenizer(target).encode_plain(text)[CALIBRATION_TOKENS:]
    runner = TorchRunner(target, num_blocks=LENGTH // BLOCK, block_size=BLOCK)
    losses, top = [], []
    for start in range(0, 8 * LENGTH, LENGTH):
        ids, rows = tokens[start : start + LENGTH], list(range(LENGTH))
        logits = runner.forward(pack([SequenceInput(ids, rows, 0, list(range(LENGTH // BLOCK)), rows, LENGTH)]))
        losses.append(torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:])).item())
        top.append(logits.argmax(-1))
    return sum(losses) / len(losses), torch.cat(top)


@pytest.fixture(scope="module")
def bf16(tmp_path_factory: pytest.TempPathFactory) -> tuple[float, torch.Tensor]:
    return evaluate(engine(tmp_path_factory.mktemp("bf16") / "pair"))


@pytest.mark.parametrize("form", [{"weights": True}, {"kv": True}, {"weights": True, "kv": True}])
def test_perplexity_is_within_two_percent_of_bf16(
    bf16: tuple[float, torch.Tensor], tmp_path: Path, form: dict[str, bool]
) -> None:
    """Measured: docs/fp8.md."""
    loss, top = evaluate(engine(tmp_path / "pair", **form))
    assert abs(math.exp(loss - bf16[0]) - 1) < 0.02
    assert (top == bf16[1]).float().mean() > 0.9
