"""TensorRT-LLM engines on the stand-in: compiled pairs, and memory that the stand-in knows."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from magicdec.runtime import trtllm_runner
from magicdec.runtime.manifest import load_pair
from magicdec.runtime.trtllm_memory import Memory
from tests.standin import standin_packages


class StandinMemory(Memory):
    """Memory of a runner that executes on the stand-in."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        import_module("tensorrt").standin_memory(self)


@contextmanager
def standin() -> Iterator[None]:
    """The stand-in packages, and runners whose memory they know."""
    with standin_packages(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(trtllm_runner, "Memory", StandinMemory)
        try:
            yield
        finally:
            import_module("tensorrt").forget_memories()


def compile_pair(source: Path, output: Path) -> Path:
    """A copy of a pair that was built for PyTorch, with engines; float32 too, which no GPU has attention kernels for.

    The build plan refuses float32, so the network is recorded without it. Call inside `standin()`.
    """
    shutil.copytree(source, output)
    config = load_pair(output).config
    shared = {"max_batch_size": config.max_batch_size, "max_num_tokens": config.max_num_tokens}
    drafts = {"max_draft_len": config.draft.max_draft_len, "speculative_decoding_mode": "DRAFT_TOKENS_EXTERNAL"}
    _compile(output / "target", config.block_size, max_seq_len=config.max_seq_len, **shared, **drafts)
    if (output / "draft").is_dir():
        _compile(output / "draft", config.block_size, max_seq_len=config.draft_budget, **shared)
    return output


def _compile(directory: Path, block_size: int, **options: Any) -> None:
    builder, models = import_module("tensorrt_llm.builder"), import_module("tensorrt_llm.models.modeling_utils")
    networks = import_module("magicdec.plugins.trtllm_models")
    config = json.loads((directory / "config.json").read_text())
    if mode := options.pop("speculative_decoding_mode", None):
        options["speculative_decoding_mode"] = models.SpeculativeDecodingMode[mode]
    plugins = import_module("tensorrt_llm.plugin").PluginConfig(tokens_per_block=block_size)
    build = builder.BuildConfig(plugin_config=plugins, output_timing_cache=None, max_input_len=64, **options)
    for rank in range(config["mapping"]["tp_size"]):
        pretrained = models.PretrainedConfig(**config, num_positions=config["max_position_embeddings"])
        model = networks.ExplicitForCausalLM.from_checkpoint(str(directory), rank=rank, config=pretrained)
        (directory / f"rank{rank}.engine").write_bytes(builder.build(model, build).engine)
    manifest = json.loads((directory / "engine.json").read_text())
    (directory / "engine.json").write_text(json.dumps(manifest | {"backend": "trtllm"}))
