"""Feeds an engine by hand: the shortest code that fills every tensor of a step, for tests of networks and builds."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from magicdec.plugins.dtypes import TORCH_DTYPES
from magicdec.plugins.model.inputs import SequenceInput


class HandMemory:
    """Ordinary memory, known to the stand-in by place."""

    def __init__(self) -> None:
        self.allocations: list[tuple[int, int, str]] = []
        self.kept: list[torch.Tensor] = []

    def place(self, tensor: torch.Tensor, where: str) -> torch.Tensor:
        tensor = tensor.contiguous()
        self.kept.append(tensor)
        self.allocations.append((tensor.data_ptr(), tensor.nbytes, where))
        return tensor


class Driver:
    """One rank of an engine folder, with a pool of `num_blocks`. tensorrt: the (stand-in) module."""

    def __init__(self, tensorrt: Any, directory: Path, num_blocks: int, rank: int = 0) -> None:
        config = json.loads((directory / "config.json").read_text())
        build = json.loads((directory / "build_config.json").read_text())["build_config"]
        self.layers, self.capacity = config["num_hidden_layers"], build["max_seq_len"]
        self.block = build["plugin_config"]["tokens_per_block"]
        self.tp = config["mapping"]["tp_size"]
        kv_heads = -(-config["num_key_value_heads"] // self.tp)
        fp8 = config["quantization"]["kv_cache_quant_algo"] == "FP8"
        self.memory = HandMemory()
        tensorrt.standin_memory(self.memory)
        shape = (num_blocks, self.layers, 2, kv_heads, self.block, config["head_size"])
        kv_dtype = torch.float8_e4m3fn if fp8 else TORCH_DTYPES[config["dtype"]]
        self.pool = self.memory.place(torch.zeros(shape).to(kv_dtype), "device")
        runtime = tensorrt.Runtime(tensorrt.Logger())
        self.engine = runtime.deserialize_cuda_engine((directory / f"rank{rank}.engine").read_bytes())
        self.context = self.engine.create_execution_context()

    def run(self, sequences: Sequence[SequenceInput], **changes: torch.Tensor) -> torch.Tensor:
        """Logits of the wanted rows [N, padded vocabulary]. changes: tensors to bind instead (planted faults)."""
        generation = [len(s.token_ids) == 1 and s.cache_len > 0 for s in sequences]
        order = sorted(range(len(sequences)), key=lambda index: generation[index])
        ordered = [sequences[index] for index in order]
        tensors = self.tensors(ordered, [generation[index] for index in order]) | changes
        self.context.set_optimization_profile_async(self._profile(len(tensors["input_ids"])), 0)
        wanted = max(len(tensors["last_token_ids"]), 1)
        width = self.engine.get_tensor_shape("logits")[-1]
        logits = self.memory.place(torch.full((wanted, width), torch.nan), "device")
        self.bind(tensors | {"logits": logits})
        assert self.context.execute_async_v3(0)
        counts = [max(s.num_logits, 1) for s in ordered]
        parts = dict(zip(order, torch.split(logits, counts), strict=True))
        return torch.cat([parts[index][: s.num_logits] for index, s in enumerate(sequences)])

    def bind(self, tensors: dict[str, torch.Tensor]) -> None:
        """Shapes and addresses; tensors named host_* go to host memory, all others to the device."""
        for name, tensor in tensors.items():
            if name != "logits":
                tensor = self.memory.place(tensor, "host" if name.startswith("host_") else "device")
                self.context.set_input_shape(name, tuple(tensor.shape))
            self.context.set_tensor_address(name, tensor.data_ptr())

    def tensors(self, sequences: Sequence[SequenceInput], generation: Sequence[bool]) -> dict[str, torch.Tensor]:
        """All inputs of a step for sequences in the engine's order."""
        lengths = [len(s.token_ids) for s in sequences]
        totals = [s.cache_len + length for s, length in zip(sequences, lengths, strict=True)]
        context = [s.cache_len if is_one else n for s, is_one, n in zip(sequences, generation, lengths, strict=True)]
        ends = torch.tensor(lengths).cumsum(0).tolist()
        last = [
            row + 1 for end, s in zip(ends, sequences, strict=True) for row in range(end - max(s.num_logits, 1), end)
        ]
        width = max(-(-total // self.block) for total in totals)
        offsets = torch.zeros(1, len(sequences), 2, width, dtype=torch.int32)
        for index, s in enumerate(sequences):
            for place, block in enumerate(list(s.block_table)[:width]):
                offsets[0, index, 0, place] = block * self.layers * 2
                offsets[0, index, 1, place] = block * self.layers * 2 + 1
        past = [n - 1 if is_one else n for n, is_one in zip(totals, generation, strict=True)]
        found = {
            "input_ids": _ints(token for s in sequences for token in s.token_ids),
            "position_ids": _ints(position for s in sequences for position in s.positions),
            "last_token_ids": _ints(last),
            "host_request_types": _ints(generation),
            "context_lengths": _ints(context),
            "host_context_lengths": _ints(context),
            "sequence_length": _ints(totals),
            "host_past_key_value_lengths": _ints(past),
            "host_max_attention_window_sizes": torch.full((self.layers,), self.capacity, dtype=torch.int32),
            "host_sink_token_length": _ints([0]),
            "cache_indirection": torch.zeros(len(sequences), 1, self.capacity, dtype=torch.int32),
            "kv_cache_block_offsets": offsets,
            "host_kv_cache_block_offsets": offsets.clone(),
            "host_kv_cache_pool_pointers": torch.tensor([[self.pool.data_ptr(), 0]]),
            "host_kv_cache_pool_mapping": _ints([0, 1]).new_tensor([[0, layer] for layer in range(self.layers)]),
            "host_runtime_perf_knobs": torch.full((16,), -1),
            "host_context_progress": torch.zeros(1, dtype=torch.int64),
        }
        if self.tp > 1:
            found["all_reduce_workspace"] = torch.zeros(7 * self.tp + 3, dtype=torch.int64)
        return found

    def _profile(self, num_tokens: int) -> int:
        """The first that takes so many rows."""
        for index in range(self.engine.num_optimization_profiles):
            low, _, high = self.engine.get_tensor_profile_shape("input_ids", index)
            if low[0] <= num_tokens <= high[0]:
                return index
        raise AssertionError(f"no profile takes {num_tokens} rows")


def _ints(values: Any) -> torch.Tensor:
    return torch.tensor([int(value) for value in values], dtype=torch.int32)
