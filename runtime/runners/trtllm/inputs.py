"""One forward pass in TensorRT-LLM's words: the tensors that an engine with the attention plugin is fed at each step.

Its rules (TensorRT-LLM 1.2, paged cache, packed rows): context sequences come first, then generations; a context reads
`context_lengths` new rows behind `sequence_length - context_lengths` cached ones, a generation reads one new row at
index `sequence_length - 1`; keys and values are written right behind the cached ones, through the block offsets.
Verification is a context with a past. A rewind is a smaller `sequence_length` at the next step.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from magicdec.plugins.model.inputs import ModelInput

CONTEXT, GENERATION = 0, 1  # request types


@dataclass(frozen=True)
class EngineLimits:
    """What an engine was built for; the largest shapes over all of its optimisation profiles."""

    num_layers: int
    block_size: int  # tokens_per_block
    max_batch_size: int
    max_num_tokens: int
    max_num_logits: int  # entries of last_token_ids
    max_blocks_per_seq: int
    max_seq_len: int  # KV capacity of a sequence: cache_indirection's last dimension
    min_blocks_per_seq: int = 1


@dataclass(frozen=True)
class StepTensors:
    """tensors: int32 by their TensorRT-LLM names; those called host_* stay on the host, the others go to the device.

    logits_rows [N]: for each wanted row of the ModelInput, in its order, the row of the engine's logits.
    """

    tensors: Mapping[str, torch.Tensor]
    logits_rows: torch.Tensor


def step_tensors(inputs: ModelInput, limits: EngineLimits) -> StepTensors:
    """All tensors that change from step to step, for B sequences and T rows.

    A sequence of one row with a past is a generation, any other a context. Every sequence has at least one row of
    logits, since the engine's last_token_ids needs it; what nobody wants is not in `logits_rows`.
    """
    lengths = inputs.query_start_loc.diff()  # [B]
    is_generation = (lengths == 1) & (inputs.cache_lens > 0)
    order = torch.argsort(is_generation.to(torch.int8), stable=True)  # contexts first
    rows = _rows_in_order(inputs.query_start_loc, lengths, order)
    last_token_ids, logits_rows = _last_token_ids(inputs, rows)
    lengths, past, is_generation = lengths[order], inputs.cache_lens[order], is_generation[order]
    totals = past + lengths
    _check(inputs, limits, totals)
    # In a generation the plugin reads no context length; by its meaning it is what stood there before.
    context_lengths = torch.where(is_generation, past, lengths)
    offsets = _block_offsets(inputs.block_table[order], totals, limits)
    tensors = {
        "input_ids": inputs.input_ids[rows],
        "position_ids": inputs.positions[rows],
        "last_token_ids": last_token_ids,
        "context_lengths": context_lengths,
        "sequence_length": totals,
        "kv_cache_block_offsets": offsets,
        "host_request_types": torch.where(is_generation, GENERATION, CONTEXT),
        "host_context_lengths": context_lengths,
        "host_past_key_value_lengths": torch.where(is_generation, totals - 1, totals),
        "host_kv_cache_block_offsets": offsets,
    }
    return StepTensors({name: tensor.to(torch.int32) for name, tensor in tensors.items()}, logits_rows)


def constant_tensors(limits: EngineLimits, pool_address: int) -> dict[str, torch.Tensor]:
    """The host tensors that never change: no attention window, no sinks of the plugin's own, one pool."""
    layers = limits.num_layers
    knobs = torch.full((16,), -1, dtype=torch.int64)
    knobs[0] = 1  # several thread blocks may share a long sequence
    return {
        "host_max_attention_window_sizes": torch.full((layers,), limits.max_seq_len, dtype=torch.int32),
        "host_sink_token_length": torch.zeros(1, dtype=torch.int32),
        "host_kv_cache_pool_pointers": torch.tensor([[pool_address, 0]], dtype=torch.int64),  # no secondary pool
        "host_kv_cache_pool_mapping": torch.tensor([[0, layer] for layer in range(layers)], dtype=torch.int32),
        "host_runtime_perf_knobs": knobs,
        "host_context_progress": torch.zeros(1, dtype=torch.int64),
    }


def split(inputs: ModelInput, limits: EngineLimits) -> list[ModelInput]:
    """Cut a pass that is larger than the engine's limits into passes that are not; the usual one is returned as it is.

    Sequences are taken in order, a long one in chunks, so that the logits of all passes, one after the other, are
    those of the whole.
    """
    starts = inputs.query_start_loc.tolist()
    wanted = torch.zeros(starts[-1] + 1, dtype=torch.int64)
    wanted[inputs.logits_indices + 1] = 1
    before = wanted.cumsum(0).tolist()  # wanted rows before each row
    passes: list[list[tuple[int, int, int]]] = [[]]  # pieces of each pass: (sequence, first row, last row)
    rows = logits = 0
    for index, (first, end) in enumerate(itertools.pairwise(starts)):
        while first < end:
            room = limits.max_num_tokens - rows
            stop = min(end, first + room)
            count = max(1, before[stop] - before[first])
            if room == 0 or len(passes[-1]) == limits.max_batch_size or logits + count > limits.max_num_logits:
                assert passes[-1], "one sequence wants more logits than the engine gives"
                passes.append([])
                rows = logits = 0
                continue
            passes[-1].append((index, first, stop))
            rows, logits, first = rows + stop - first, logits + count, stop
    return [inputs] if len(passes) == 1 else [_cut(inputs, pieces) for pieces in passes]


def _cut(inputs: ModelInput, pieces: list[tuple[int, int, int]]) -> ModelInput:
    rows = torch.cat([torch.arange(first, stop) for _, first, stop in pieces])
    sequences = torch.tensor([index for index, _, _ in pieces])
    firsts = torch.tensor([first for _, first, _ in pieces])
    lengths = torch.tensor([0] + [stop - first for _, first, stop in pieces])
    return ModelInput(
        input_ids=inputs.input_ids[rows],
        positions=inputs.positions[rows],
        query_start_loc=lengths.cumsum(0),
        cache_lens=inputs.cache_lens[sequences] + firsts - inputs.query_start_loc[sequences],
        block_table=inputs.block_table[sequences],
        slot_mapping=inputs.slot_mapping[rows],
        logits_indices=torch.isin(rows, inputs.logits_indices).nonzero().flatten(),
    )


def _rows_in_order(starts: torch.Tensor, lengths: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """The caller's row of each packed row [T], sequences taken in `order`."""
    lengths = lengths[order]
    packed_starts = lengths.cumsum(0) - lengths
    shift = torch.repeat_interleave(starts[:-1][order] - packed_starts, lengths)
    return shift + torch.arange(len(shift))


def _last_token_ids(inputs: ModelInput, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(last_token_ids: packed rows counted from 1, logits_rows). rows: as from `_rows_in_order`."""
    starts = inputs.query_start_loc
    wanted = torch.zeros(len(rows), dtype=torch.bool)
    wanted[inputs.logits_indices] = True
    before = torch.cat([torch.zeros(1, dtype=torch.int64), wanted.cumsum(0)])
    wanted[starts[1:][before[starts].diff() == 0] - 1] = True  # a prompt chunk wants none, and gets its last row's
    packed = wanted[rows]
    place = torch.empty_like(rows)
    place[rows] = packed.cumsum(0) - 1  # row of logits of each of the caller's rows
    return packed.nonzero().flatten() + 1, place[inputs.logits_indices]


def _block_offsets(table: torch.Tensor, totals: torch.Tensor, limits: EngineLimits) -> torch.Tensor:
    """[1 pool, B, 2 (keys, values), blocks of the longest sequence] in units of one layer's keys of one block.

    Entries that no sequence needs name block 0.
    """
    width = max(-(-int(totals.max()) // limits.block_size), limits.min_blocks_per_seq)
    used = table.new_zeros(len(table), width)
    kept = min(width, table.shape[1])
    used[:, :kept] = table[:, :kept]
    keys = used * (limits.num_layers * 2)
    return torch.stack([keys + 0, keys + 1], dim=1).unsqueeze(0)


def _check(inputs: ModelInput, limits: EngineLimits, totals: torch.Tensor) -> None:
    """The plugin derives each slot from the lengths: the ModelInput must mean the same ones."""
    assert int(totals.max()) <= limits.max_seq_len, "a sequence is longer than the engine was built for"
    lengths = inputs.query_start_loc.diff()
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), lengths)  # [T]
    entry = inputs.cache_lens[sequence] + torch.arange(len(sequence)) - inputs.query_start_loc[sequence]
    block = inputs.block_table[sequence, entry // limits.block_size]
    slots = block * limits.block_size + entry % limits.block_size
    assert torch.equal(slots, inputs.slot_mapping), "a row's slot is not the next one of its view"
