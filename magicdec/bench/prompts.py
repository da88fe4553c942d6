"""Long prompts of real text, read by the model or, past what is worth reading, filled with copies of real KV."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from magicdec.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from magicdec.plugins.model.kv_cache import KVCache
    from magicdec.runtime.llm import LLM

FILL_FROM = 4096  # tokens of the real prefix that is copied


def cut_prompts(tokens: Sequence[int], context: int, batch: int, offset: int) -> list[list[int]]:
    """`batch` stretches of `context` tokens that begin at different places of the text.

    Evenly spread, so they overlap only where the text is too short. offset: shifts all, so that the prompts of one
    context are not the beginnings of another's.
    """
    room = len(tokens) - offset - context
    if room < batch - 1:
        raise ConfigError(
            f"the text has {len(tokens):,} tokens, too few for {batch} different prompts of {context:,}; give a longer "
            "one by --text-file, or lower --context or --batch"
        )
    stride = room // max(batch - 1, 1)
    return [list(tokens[offset + stride * index :][:context]) for index in range(batch)]


def fill_prompts(llm: "LLM", source: Sequence[int], prompts: Sequence[Sequence[int]]) -> None:
    """Make the prompts findable in the prefix cache without reading them.

    source: tokens whose blocks are in the prefix cache; their keys and values are copied to each prompt's own blocks,
    over and over. Attention over them costs what it always costs; what it computes means nothing.
    """
    blocks, size = llm.engine.blocks, llm.config.block_size
    copied = len(source) // size
    reused = blocks.allocate("bench-source", [*source, 0], len(source) + 1)
    if reused is None or reused < copied * size:
        raise EngineError("the KV cache is too small to keep the text that it is filled from; lower --context")
    try:
        origin = blocks.table("bench-source")[:copied]
        for prompt in prompts:
            if blocks.allocate("bench-filled", [], len(prompt)) is None:
                raise EngineError(f"the KV cache is too small for {len(prompts)} prompts of {len(prompt):,} tokens")
            table = blocks.table("bench-filled")
            _copy_blocks(_cache(llm), [origin[index % copied] for index in range(len(table))], list(table), size)
            blocks.publish("bench-filled", prompt, len(prompt))
            blocks.free("bench-filled")
    finally:
        blocks.free("bench-source")


def _cache(llm: "LLM") -> "KVCache":
    from magicdec.runtime.runners.torch_runner import TorchRunner

    if not isinstance(llm.runner, TorchRunner):
        raise EngineError(
            "contexts past the trained length are filled with copied KV, which only a PyTorch engine on one rank can; "
            "leave them out"
        )
    return llm.runner.cache


def _copy_blocks(cache: "KVCache", origins: Sequence[int], targets: Sequence[int], block_size: int) -> None:
    offsets = torch.arange(block_size)
    read, write = ((torch.tensor(ids)[:, None] * block_size + offsets).flatten() for ids in (origins, targets))
    for pool in (cache.keys, cache.values):
        data = pool.view(torch.uint8) if pool.element_size() == 1 else pool  # not every PyTorch can index FP8
        where = data.device
        for layer in data:
            layer.index_copy_(1, write.to(where), layer.index_select(1, read.to(where)))
