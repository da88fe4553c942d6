"""The GPT attention plugin with a paged cache, as far as this project uses it.

Lengths come only from the tensors that the plugin reads: in the context phase the past is sequence_length -
context_lengths, in the generation phase the new token stands at sequence_length - 1. Keys and values are written to and
read from the pool by address: pool + layer * 2 * block_bytes + offset * block_bytes, a block of keys (or values) being
[kv_heads, tokens_per_block, head_size].
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .graph import TORCH_DTYPES
from .memory import StandinError, look

Named = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class _Pool:
    """One layer's keys and values, found through the block offsets of each sequence."""

    address: int
    layer: int
    offsets: torch.Tensor  # [B, 2, max_blocks]
    tokens_per_block: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    quant_scale: float  # stored = value * quant_scale
    dequant_scale: float

    def block(self, sequence: int, kv: int, index: int) -> torch.Tensor:
        """[kv_heads, tokens_per_block, head_size] as it lies in memory."""
        if index >= self.offsets.shape[2]:
            raise StandinError(f"sequence {sequence} needs block {index} of its table of {self.offsets.shape[2]}")
        offset = int(self.offsets[sequence, kv, index])
        if offset < 0 or offset % 2 != kv:
            raise StandinError(
                f"kv_cache_block_offsets[0, {sequence}, {kv}, {index}] = {offset} is no offset of {'KV'[kv]}"
            )
        shape = (self.num_kv_heads, self.tokens_per_block, self.head_size)
        size = self.num_kv_heads * self.tokens_per_block * self.head_size * self.dtype.itemsize
        address = self.address + (self.layer * 2 + offset) * size
        return look(address, shape, self.dtype, "device", "a block of the KV pool")

    def write(self, sequence: int, first: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store rows [n, kv_heads, head_size] as tokens first, first + 1, ..."""
        for kv, rows in enumerate((keys, values)):
            stored = rows.to(self.dtype)
            if self.dtype == torch.float8_e4m3fn:
                stored = (rows.float() * self.quant_scale).clamp(-448, 448).to(self.dtype)
            for row, token in enumerate(range(first, first + len(rows))):
                block = self.block(sequence, kv, token // self.tokens_per_block)
                block[:, token % self.tokens_per_block] = stored[row]

    def read(self, sequence: int, first: int, last: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [kv_heads, last - first, head_size] of tokens first .. last - 1."""
        both = []
        for kv in (0, 1):
            blocks = range(first // self.tokens_per_block, -(-last // self.tokens_per_block))
            data = torch.cat([self.block(sequence, kv, index) for index in blocks], dim=1)
            skip = first - blocks.start * self.tokens_per_block
            data = data[:, skip : skip + last - first]
            if self.dtype == torch.float8_e4m3fn:
                data = data.float() * self.dequant_scale
            both.append(data.to(dtype))
        return both[0], both[1]


def attention_plugin(named: Named, attrs: dict[str, Any]) -> torch.Tensor:
    """Rows [T, heads * head_size] from qkv [T, (heads + 2 * kv_heads) * head_size]."""
    heads, kv_heads, size = attrs["num_heads"], attrs["num_kv_heads"], attrs["hidden_size_per_head"]
    qkv = named["qkv"].view(len(named["qkv"]), -1, size)
    query, key, value = torch.split(qkv, [heads, kv_heads, kv_heads], dim=1)
    pool = _pool(named, attrs)
    window = int(named["host_max_attention_window_sizes"][attrs["layer_idx"]])
    if window < 1:
        raise StandinError(f"host_max_attention_window_sizes[{attrs['layer_idx']}] = {window}")
    out = torch.empty_like(query)
    row = 0
    for sequence, (length, past) in enumerate(_lengths(named, attrs, len(qkv))):
        rows = slice(row, row + length)
        pool.write(sequence, past, key[rows], value[rows])
        seen = past
        if past and length_is_context(named, sequence) and not attrs["use_paged_context_fmha"]:
            seen = 0  # without paged context FMHA the past is not looked at, and nothing says so
        first = 0 if seen == past else past
        keys, values = pool.read(sequence, first, past + length, query.dtype)
        out[rows] = _attend(query[rows], keys, values, seen, window, attrs)
        row += length
    if attrs["use_fp8_context_fmha"] and "attention_output_orig_quant_scale" in named:
        scaled = out.float() * named["attention_output_orig_quant_scale"]
        return scaled.clamp(-448, 448).to(torch.float8_e4m3fn).flatten(1)
    return out.flatten(1)


def length_is_context(named: Named, sequence: int) -> bool:
    """Whether the sequence is in the context phase."""
    return int(named["host_request_types"][sequence]) == 0


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, past: int, window: int, attrs: dict[str, Any]
) -> torch.Tensor:
    """Causal; the window counts the current token. query: [n, heads, size], keys: [kv_heads, past + n, size]."""
    group = attrs["num_heads"] // attrs["num_kv_heads"]
    scale = 1.0 / (attrs["hidden_size_per_head"] ** 0.5 * attrs["q_scaling"])
    keys, values = keys.repeat_interleave(group, dim=0), values.repeat_interleave(group, dim=0)
    scores = (query * scale).transpose(0, 1) @ keys.transpose(1, 2)  # [heads, n, past + n]
    place = torch.arange(len(query))[:, None] + past
    other = torch.arange(keys.shape[1])[None]
    hidden = (other > place) | (other <= place - window)
    probs = scores.float().masked_fill(hidden, -torch.inf).softmax(-1).to(query.dtype)
    return (probs @ values).transpose(0, 1)


def _lengths(named: Named, attrs: dict[str, Any], num_tokens: int) -> list[tuple[int, int]]:
    """(query rows, past) of each sequence, contexts first; everything that the plugin relies on is checked."""
    types = named["host_request_types"].tolist()
    num_contexts = next((index for index, kind in enumerate(types) if kind != 0), len(types))  # leading zeros
    if any(kind != 1 for kind in types[num_contexts:]):
        raise StandinError(f"host_request_types must be contexts (0) first, then generations (1), got {types}")
    host, device = named["host_context_lengths"].tolist(), named["context_lengths"].tolist()
    if host != device:
        raise StandinError(f"host_context_lengths {host} and context_lengths {device} differ")
    totals = named["sequence_length"].tolist()
    lengths = host[:num_contexts] + [1] * (len(types) - num_contexts)
    if sum(lengths) != num_tokens:
        raise StandinError(
            f"{num_tokens} rows, but the contexts have {sum(host[:num_contexts])} and {len(types) - num_contexts} "
            "generations have one each"
        )
    _check_capacity(named, attrs, totals)
    past = [total - length for total, length in zip(totals, lengths, strict=True)]
    if min(past) < 0 or min(lengths) < 1:
        raise StandinError(f"sequence_length {totals} is less than the new tokens {lengths}, or there are none")
    expected = [total if kind == 0 else total - 1 for kind, total in zip(types, totals, strict=True)]
    if named["host_past_key_value_lengths"].tolist() != expected:
        raise StandinError(
            f"host_past_key_value_lengths {named['host_past_key_value_lengths'].tolist()}, expected {expected}: the "
            "total after the step for a context, the total before it for a generation"
        )
    return list(zip(lengths, past, strict=True))


def _check_capacity(named: Named, attrs: dict[str, Any], totals: list[int]) -> None:
    requests, beams, capacity = named["cache_indirection"].shape
    if beams != 1 or requests != len(totals):
        raise StandinError(f"cache_indirection {list(named['cache_indirection'].shape)} for {len(totals)} sequences")
    if max(totals) > capacity:
        raise StandinError(
            f"sequence_length {max(totals)} is more than the KV capacity {capacity} of cache_indirection"
        )
    sinks = int(named["host_sink_token_length"][0])
    if sinks:
        raise StandinError(f"host_sink_token_length {sinks}: this version has no sink tokens, it must be 0")
    if int(named["host_context_progress"][0]):
        raise StandinError("host_context_progress must be 0 (it would be taken as a pointer)")
    if attrs["position_embedding_type"] != "learned_absolute":
        raise StandinError("the stand-in's plugin rotates nothing: position_embedding_type must be learned_absolute")


def _pool(named: Named, attrs: dict[str, Any]) -> _Pool:
    device, host = named["kv_cache_block_offsets"], named["host_kv_cache_block_offsets"]
    if not torch.equal(device, host):
        raise StandinError("kv_cache_block_offsets and host_kv_cache_block_offsets differ")
    mapping = named["host_kv_cache_pool_mapping"].tolist()
    pool_index, layer = mapping[attrs["layer_idx"]]
    if pool_index != 0 or sorted(place for _, place in mapping) != list(range(len(mapping))):
        raise StandinError(f"host_kv_cache_pool_mapping {mapping} does not place each layer once in pool 0")
    return _Pool(
        address=int(named["host_kv_cache_pool_pointers"][0, 0]),
        layer=layer,
        offsets=device[0],
        tokens_per_block=attrs["tokens_per_block"],
        num_kv_heads=attrs["num_kv_heads"],
        head_size=attrs["hidden_size_per_head"],
        dtype=TORCH_DTYPES[attrs["kv_dtype"]],
        quant_scale=float(named["kv_orig_quant_scale"]) if "kv_orig_quant_scale" in named else 1.0,
        dequant_scale=float(named["kv_quant_orig_scale"]) if "kv_quant_orig_scale" in named else 1.0,
    )
