"""Executes an engine directory's checkpoint, on a CPU by the native library, elsewhere by PyTorch."""

import json
import logging
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from magicdec.errors import EngineError
from magicdec.pair.manifest import load_engine
from magicdec.plugins.cpu.library import native
from magicdec.plugins.cpu.numbers import DTYPES as NATIVE_DTYPES
from magicdec.plugins.dtypes import TORCH_DTYPES
from magicdec.plugins.fp8 import FP8, from_fp8
from magicdec.plugins.linear import product_dtype
from magicdec.plugins.model.communicator import Communicator, SingleRank
from magicdec.plugins.model.inputs import ModelInput
from magicdec.plugins.model.kv_cache import KVCache
from magicdec.plugins.model.native_model import NativeModel, obstacle
from magicdec.plugins.model.torch_model import ModelConfig, TorchModel
from magicdec.plugins.rotary import rotate

logger = logging.getLogger(__name__)


class TorchRunner:
    """A `ModelRunner` on PyTorch's tensors. engine_dir: the `target/` or `draft/` folder of a pair.

    dtype: compute in this type instead of the checkpoint's (float64 in tests). Logits are float32, float64 in float64.
    communicator: the ranks that the engine was built for, of which this runner is one (see `runtime.parallel`).
    cache: a pool of another runner of the same model, of num_blocks blocks, to read and write instead of an own one.
    """

    def __init__(
        self,
        engine_dir: Path,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype | None = None,
        device: str = "cpu",
        communicator: Communicator | None = None,
        cache: KVCache | None = None,
    ) -> None:
        manifest, ranks = load_engine(engine_dir), communicator or SingleRank()
        if manifest.tp_size != ranks.size:
            raise EngineError(
                f"{engine_dir} was built for {manifest.tp_size} tensor-parallel ranks, and {ranks.size} run it; start "
                f"{manifest.tp_size} with mpiexec, or build with --tp {ranks.size}"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.vocab_size = manifest.vocab_size
        self.device = torch.device(device)
        self.dtype = dtype or TORCH_DTYPES[manifest.dtype]
        config = ModelConfig.from_checkpoint(json.loads((engine_dir / "config.json").read_text()))
        weights = self._load(engine_dir / f"rank{ranks.rank}.safetensors")
        names = (f"transformer.layers.{i}.attention.kv_cache_scaling_factor" for i in range(config.num_layers))
        fp8_scales = [weights[name].item() for name in names] if manifest.kv_cache_quant_algo == "FP8" else None
        self.model = self._model(config, weights, ranks)
        self.owns_cache = cache is None
        self.cache = cache or KVCache(
            num_layers=config.num_layers,
            num_kv_heads=self.model.num_kv_heads,
            head_size=config.head_size,
            num_slots=num_blocks * block_size,
            dtype=self.dtype,
            device=self.device,
            fp8_scales=fp8_scales,
        )

    @property
    def kv_bytes(self) -> int:
        """Size of this rank's KV pool; 0 where it is another runner's."""
        return self.cache.num_bytes if self.owns_cache else 0

    @torch.inference_mode()
    def forward(self, inputs: ModelInput) -> torch.Tensor:
        """Logits [N, vocab_size], left on the device for acceptance there; rows of padded vocabulary are cut."""
        return self.model.forward(inputs, self.cache, self.block_size)[:, : self.vocab_size]

    @torch.inference_mode()
    def read_keys(self, slots: list[int], positions: list[int]) -> torch.Tensor:
        """Position-free keys [layers, kv_heads, n, head_size] in at least float32."""
        keys = self.cache.read_keys(torch.tensor(slots, device=self.device), self.model.wide)
        return self._turn(keys, positions, back=True)

    @torch.inference_mode()
    def write_keys(self, slots: list[int], positions: list[int], keys: torch.Tensor) -> None:
        """Rotate position-free keys to these positions and store them."""
        turned = self._turn(keys, positions, back=False)
        self.cache.write_keys(torch.tensor(slots, device=self.device), turned)

    def _turn(self, keys: torch.Tensor, positions: list[int], *, back: bool) -> torch.Tensor:
        cos, sin = self.model.rotary.angles(torch.tensor(positions, device=self.device))  # [n, 1, head_size]
        cos, sin = cos.squeeze(1), sin.squeeze(1)
        return rotate(keys, cos, -sin if back else sin)

    def _model(
        self, config: ModelConfig, weights: dict[str, torch.Tensor], ranks: Communicator
    ) -> NativeModel | TorchModel:
        """The native model where there is one: on one CPU, in a dtype that it knows, if the library was built."""
        if self.device.type == "cpu" and ranks.size == 1 and self.dtype in NATIVE_DTYPES:
            library = native()
            reason = obstacle(config, weights)
            if library is not None and reason is None:
                return NativeModel(library, config, weights)
            if library is not None:
                logger.warning("%s: computing with PyTorch's kernels, which are several times slower", reason)
        return TorchModel(config, weights, ranks)

    def _load(self, path: Path) -> dict[str, torch.Tensor]:
        try:
            with safe_open(path, framework="pt", device=str(self.device)) as file:
                return {name: self._convert(name, file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise EngineError(f"{path} cannot be read: {error}; build the pair again with build-engine") from error

    def _convert(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Into the dtype of the computation; int8 and int4 numbers and all scales stay what they are."""
        if tensor.dtype == FP8:
            return from_fp8(tensor, product_dtype(self.dtype))
        quantised = not tensor.dtype.is_floating_point or name.endswith(("_scaling_factor", "weights_offset"))
        return tensor if quantised else tensor.to(self.dtype)
