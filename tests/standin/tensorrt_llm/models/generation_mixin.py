"""The input tensors of a decoder with a paged cache and packed rows, with their ranges."""

import math
from typing import Any

import tensorrt as trt

from ..api import API
from ..functional import Tensor

Range = list[int]


def basic_inputs(config: Any, plugins: Any, sizes: dict[str, Any]) -> dict[str, Tensor]:
    """By name. The names and types must be those of the interface."""
    assert plugins.paged_kv_cache
    assert plugins.remove_input_padding
    assert plugins.gpt_attention_plugin
    assert sizes["max_beam_width"] == 1
    assert not sizes["opt_batch_size"]
    batch = _range(sizes["max_batch_size"])
    draft = sizes["max_draft_len"]
    tokens = _token_ranges(sizes, plugins.multiple_profiles)
    profiles = len(tokens)
    position_tokens = [[math.ceil(low / (draft + 1)), opt, high] for low, opt, high in tokens] if draft else tokens
    logits = [batch[0], batch[1] * (draft + 1), batch[2] * (draft + 1)]
    blocks = [math.ceil(size / plugins.tokens_per_block) for size in _range(sizes["max_seq_len"])]
    layers = config.num_hidden_layers
    table: dict[str, list[Any]] = {"pools": [1], "batch": [batch], "kv": [2], "blocks": [blocks]}
    declared: dict[str, tuple[list[int], dict[str, list[Any]]]] = {
        "input_ids": ([-1], {"tokens": tokens}),
        "position_ids": ([-1], {"tokens": position_tokens}),
        "last_token_ids": ([-1], {"logits": [logits]}),
        "host_request_types": ([-1], {"batch": [batch]}),
        "context_lengths": ([-1], {"batch": [batch]}),
        "host_context_lengths": ([-1], {"batch": [batch]}),
        "sequence_length": ([-1], {"batch": [batch]}),
        "host_past_key_value_lengths": ([-1], {"batch": [batch]}),
        "host_max_attention_window_sizes": ([layers], {"layers": [layers]}),
        "host_sink_token_length": ([1], {"scalar": [1]}),
        "cache_indirection": (
            [-1, -1, -1],
            {"batch": [batch], "beam": [[1, 1, 1]], "length": [_range(sizes["max_seq_len"])]},
        ),
        "kv_cache_block_offsets": ([1, -1, 2, -1], table),
        "host_kv_cache_block_offsets": ([1, -1, 2, -1], table),
        "host_kv_cache_pool_pointers": ([1, 2], {"pools": [1], "two": [2]}),
        "host_kv_cache_pool_mapping": ([layers, 2], {"layers": [layers], "two": [2]}),
        "host_runtime_perf_knobs": ([16], {"knobs": [16]}),
        "host_context_progress": ([1], {"scalar": [1]}),
    }
    if config.mapping.tp_size > 1:
        words = 7 * config.mapping.tp_size + 3
        declared["all_reduce_workspace"] = ([words], {"words": [words]})
    if sizes["gather_context_logits"]:
        del declared["last_token_ids"]
    if draft and not sizes["speculative_decoding_draft_tokens_external"]:
        raise NotImplementedError("draft tokens in the generation phase are not in the stand-in")
    made = {}
    for name, (shape, ranges) in declared.items():
        dtype = {"int32": trt.int32, "int64": trt.int64}[API["engine_inputs"][name][0]]
        made[name] = Tensor(name, dtype, shape, {key: _repeat(value, profiles) for key, value in ranges.items()})
    return made


def _range(high: int) -> Range:
    return [1, (high + 1) // 2, high]


def _repeat(value: list[Any], profiles: int) -> list[Any]:
    return value if len(value) == profiles else value * profiles


def _token_ranges(sizes: dict[str, Any], multiple_profiles: bool) -> list[Range]:
    high = sizes["max_num_tokens"]
    if not multiple_profiles:
        opt = sizes["opt_num_tokens"] or min(high, sizes["max_batch_size"])
        return [[1, opt, high]]
    points = [64, 128, 256, 512, 1024]
    if high <= points[0]:
        raise RuntimeError("multiple_profiles with at most 64 tokens: the real one fails here")
    ranges, low = [], 1
    for point in points:
        top = min(point, high)
        ranges.append([low, top, top])
        if high <= point:
            return ranges
        low = point
    return [*ranges, [low, high, high]]
