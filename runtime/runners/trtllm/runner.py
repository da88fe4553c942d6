"""Executes a pair's engines on TensorRT-LLM's own kernels, under our own scheduler and block tables."""

import json
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from magicdec.errors import EngineError
from magicdec.pair.manifest import EngineManifest, load_engine
from magicdec.plugins.dtypes import TORCH_DTYPES
from magicdec.plugins.model.inputs import ModelInput
from magicdec.plugins.rotary import Rotary
from magicdec.runtime.runners.trtllm.inputs import EngineLimits, constant_tensors, split, step_tensors
from magicdec.runtime.runners.trtllm.memory import Memory, Staging, aligned
from magicdec.runtime.runners.trtllm.pool import KVPool
from magicdec.runtime.runners.trtllm.session import TrtSession, import_tensorrt


@dataclass(frozen=True)
class DeviceLogits:
    """Logits where the engine left them, for work on the runner's stream; valid until the next pass.

    rows: [N] host indices into `logits` [R, padded vocabulary] of the wanted rows, in the caller's order.
    """

    logits: torch.Tensor
    rows: torch.Tensor


class TrtllmRunner:
    """A `ModelRunner` on one rank's TensorRT engine. engine_dir: the `target/` or `draft/` folder of a pair.

    Everything is allocated here, for the engine's largest shapes. A step copies its integers to the device in one
    piece and executes; it waits for nothing, except for logits that are brought to the host. device_logits: leave them
    on the device, for acceptance there; None: on CUDA. memory: the tests' own.
    """

    def __init__(
        self,
        engine_dir: Path,
        num_blocks: int,
        block_size: int,
        device: str = "cuda",
        memory: Memory | None = None,
        rank: int = 0,
        device_logits: bool | None = None,
    ) -> None:
        manifest = load_engine(engine_dir)
        _check_environment(device)
        config = json.loads((engine_dir / "config.json").read_text())
        _check_block_size(engine_dir, block_size)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.vocab_size = manifest.vocab_size
        self.dtype = TORCH_DTYPES[manifest.dtype]
        self.memory = memory or Memory(device)
        self.session = TrtSession(engine_dir / f"rank{rank}.engine", self.memory)
        self.limits = _limits(self.session, config, block_size)
        self.cache = _pool(self.memory, engine_dir, config, num_blocks, self.limits, rank)
        self._constants = self._allocate_constants(manifest, rank)
        self._staging = Staging(self.memory, _staging_size(self.limits))
        shape = (self.limits.max_num_logits, self.session.output_width("logits"))
        self._logits = self.memory.device(shape, self.session.dtype("logits"))  # [R, padded vocabulary]
        self._leaves_logits = self.memory.is_cuda if device_logits is None else device_logits
        place = self.memory.device if self._leaves_logits else self.memory.host
        self._results = [place(shape, self._logits.dtype) for _ in range(2)]  # rows in the caller's order
        self._turn = 0

    @property
    def kv_bytes(self) -> int:
        """Size of the KV pool (on several ranks: of this one's share)."""
        return self.cache.num_bytes

    @torch.inference_mode()
    def forward(self, inputs: ModelInput) -> torch.Tensor:
        """Logits [N, vocab_size] in float32; rows of padded vocabulary are cut.

        They are valid until the second next pass, which writes to the same memory. On the device they may be read by
        PyTorch's current stream.
        """
        passes = split(inputs, self.limits)
        if len(passes) == 1:
            return self._deliver(self.execute(inputs))
        return torch.cat([self._deliver(self.execute(part)).clone() for part in passes])

    @torch.inference_mode()
    def execute(self, inputs: ModelInput) -> DeviceLogits:
        """Issue one pass within the engine's limits, behind all that PyTorch has been given; waits for nothing."""
        self.memory.take_over()
        step = step_tensors(inputs, self.limits)
        bound = dict(self._constants)
        self._staging.begin()
        for name, tensor in step.tensors.items():
            host, device = self._staging.put(tensor)
            bound[name] = host if name.startswith("host_") else device
        self._staging.upload()
        bound["cache_indirection"] = bound["cache_indirection"][: len(inputs.cache_lens)]
        self.session.run(bound, {"logits": self._logits})
        self._staging.end()
        return DeviceLogits(self._logits[: len(step.tensors["last_token_ids"])], step.logits_rows)

    def read_keys(self, slots: list[int], positions: list[int]) -> torch.Tensor:
        """Position-free keys [layers, kv_heads, n, head_size] in float32."""
        return self.cache.read_keys(slots, positions)

    def write_keys(self, slots: list[int], positions: list[int], keys: torch.Tensor) -> None:
        """Rotate position-free keys to these positions and store them."""
        self.cache.write_keys(slots, positions, keys)

    def _deliver(self, result: DeviceLogits) -> torch.Tensor:
        """Copy the wanted rows, in order; to the host, where their values have to be waited for, or on the device."""
        self._turn ^= 1
        home, filled = self._results[self._turn], 0
        with self.memory.on_stream():
            for first, count in _runs(result.rows.tolist()):
                home[filled : filled + count].copy_(result.logits[first : first + count], non_blocking=True)
                filled += count
        if self._leaves_logits:
            self.memory.hand_over()
        else:
            self.memory.synchronize()
        return home[:filled, : self.vocab_size].to(torch.float32)

    def _allocate_constants(self, manifest: EngineManifest, rank: int) -> dict[str, torch.Tensor]:
        """Inputs that never change, each in its place; the engine may want nothing that is not fed."""
        constants = {}
        for name, tensor in constant_tensors(self.limits, self.cache.tensor.data_ptr()).items():
            constants[name] = self.memory.host(tensor.shape, tensor.dtype)
            constants[name].copy_(tensor)
        shape = (self.limits.max_batch_size, 1, self.limits.max_seq_len)  # one beam
        constants["cache_indirection"] = self.memory.device(shape, torch.int32)
        if manifest.tp_size > 1:
            workspace, self._all_reduce_buffers = _all_reduce_workspace(self.memory, manifest.tp_size, rank)
            constants["all_reduce_workspace"] = workspace
        fed = _STEP_INPUTS | constants.keys()
        if self.session.inputs != fed or self.session.outputs != {"logits"}:
            raise EngineError(
                f"the engine's tensors are not this runtime's: unknown {sorted(self.session.inputs - fed)}, missing "
                f"{sorted(fed - self.session.inputs)}, outputs {sorted(self.session.outputs)}; build the pair again"
            )
        return constants


_STEP_INPUTS = {
    "input_ids",
    "position_ids",
    "last_token_ids",
    "context_lengths",
    "sequence_length",
    "kv_cache_block_offsets",
    "host_request_types",
    "host_context_lengths",
    "host_past_key_value_lengths",
    "host_kv_cache_block_offsets",
}


def _limits(session: TrtSession, config: dict[str, Any], block_size: int) -> EngineLimits:
    """Read the engine's own profiles, so that nothing can be larger than what it was built for."""
    _, _, _, blocks = session.largest("kv_cache_block_offsets")
    batch, _, capacity = session.largest("cache_indirection")
    return EngineLimits(
        num_layers=config["num_hidden_layers"],
        block_size=block_size,
        max_batch_size=batch,
        max_num_tokens=session.largest("input_ids")[0],
        max_num_logits=session.largest("last_token_ids")[0],
        max_blocks_per_seq=blocks,
        min_blocks_per_seq=session.smallest("kv_cache_block_offsets")[3],
        max_seq_len=min(capacity, blocks * block_size),
    )


def _staging_size(limits: EngineLimits) -> int:
    """int32 elements of all step tensors at their largest, each aligned."""
    batch, offsets = limits.max_batch_size, limits.max_batch_size * 2 * limits.max_blocks_per_seq
    sizes = [limits.max_num_tokens] * 2 + [limits.max_num_logits] + [batch] * 5 + [offsets] * 2
    return sum(map(aligned, sizes))


def _pool(
    memory: Memory, engine_dir: Path, config: dict[str, Any], num_blocks: int, limits: EngineLimits, rank: int
) -> KVPool:
    layers, fp8 = limits.num_layers, config["quantization"]["kv_cache_quant_algo"] == "FP8"
    return KVPool(
        memory,
        num_blocks=num_blocks,
        num_layers=layers,
        num_kv_heads=max(config["num_key_value_heads"] // config["mapping"]["tp_size"], 1),
        block_size=limits.block_size,
        head_size=config["head_size"],
        dtype=TORCH_DTYPES[config["dtype"]],
        rotary=Rotary(config["head_size"], config["rotary_base"], config["rotary_scaling"], torch.float32),
        scales=_kv_scales(engine_dir / f"rank{rank}.safetensors", layers) if fp8 else None,
        max_slots=limits.max_seq_len,
    )


def _kv_scales(path: Path, num_layers: int) -> torch.Tensor:
    """kv_cache_scaling_factor of each layer [layers]: x is stored as x / scale."""
    names = [f"transformer.layers.{layer}.attention.kv_cache_scaling_factor" for layer in range(num_layers)]
    try:
        with safe_open(path, framework="pt") as file:
            return torch.cat([file.get_tensor(name).view(1) for name in names])
    except (SafetensorError, OSError) as error:
        raise EngineError(f"{path} cannot be read: {error}; build the pair again with build-engine") from error


def _all_reduce_workspace(memory: Memory, tp_size: int, rank: int) -> tuple[torch.Tensor, Any]:
    """(workspace [7 * tp + 3] of int64, the buffers it points to, which have to be kept). All ranks call this."""
    helper = import_module("tensorrt_llm.plugin.plugin").CustomAllReduceHelper
    mapping = import_module("tensorrt_llm.mapping").Mapping(world_size=tp_size, rank=rank, tp_size=tp_size)
    with memory.on_stream():  # on its device
        buffers, workspace = helper.allocate_workspace(mapping, helper.max_workspace_size_auto(tp_size))
    memory.register(workspace, "device")
    return workspace, buffers


def _check_environment(device: str) -> None:
    import_tensorrt()
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise EngineError(
            "this engine was compiled by TensorRT-LLM and needs an NVIDIA GPU, and PyTorch sees none; "
            "build the pair with --backend torch to run it on a CPU"
        )


def _check_block_size(engine_dir: Path, block_size: int) -> None:
    built = json.loads((engine_dir / "build_config.json").read_text())["build_config"]
    tokens_per_block = built["plugin_config"]["tokens_per_block"]
    if tokens_per_block != block_size:
        raise EngineError(
            f"{engine_dir} was compiled for blocks of {tokens_per_block} tokens, and {block_size} are asked for; "
            "build the pair again"
        )


def _runs(rows: list[int]) -> list[tuple[int, int]]:
    """(first, count) of each run of consecutive rows."""
    runs: list[tuple[int, int]] = []
    for row in rows:
        if runs and sum(runs[-1]) == row:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((row, 1))
    return runs
