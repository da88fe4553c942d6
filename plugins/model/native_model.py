"""The decoder of `runtime.torch_model` on the native CPU library: a whole forward pass in one call.

Row by row the same bits: a row's logits and KV entries do not depend on which rows share its pass, on how a prompt is
cut into chunks, or on the number of threads. So plain decoding and verification agree bit by bit in every dtype.
"""

import ctypes
from collections.abc import Mapping, MutableMapping

import torch
from torch.nn import functional

from magicdec.errors import EngineError
from magicdec.plugins.cpu.linear import MatrixStruct, PackedLinear
from magicdec.plugins.cpu.numbers import CACHE_DTYPES, DTYPES
from magicdec.plugins.hadamard import Hadamard
from magicdec.plugins.linear import Fp8Linear, load_embedding, load_linear
from magicdec.plugins.model.inputs import ModelInput
from magicdec.plugins.model.kv_cache import KVCache
from magicdec.plugins.model.torch_model import Layer, ModelConfig
from magicdec.plugins.rotary import Rotary

_MAX_HEAD_SIZE = 1024
_ALIGN = 16  # norms are padded with zeros to a multiple
_FIRST_POSITIONS = 2048
PARTS = ("norms", "qkv", "rotation and cache", "attention", "dense", "gate and up", "down", "logits")


class _Layer(ctypes.Structure):
    """`DecoderLayer` of csrc/step.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("input_norm", "input_offset", "post_norm", "post_offset")),
        *((name, ctypes.c_void_p) for name in ("query_norm", "key_norm")),
        *((name, MatrixStruct) for name in ("qkv", "dense", "gate_up", "down")),
        ("kv_scale", ctypes.c_float),
    )


class _Decoder(ctypes.Structure):
    """`Decoder` of csrc/step.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("layers", "final_norm", "embedding", "embedding_scales")),
        *((name, ctypes.c_void_p) for name in ("cosines", "sines", "key_turn", "query_turn")),
        ("head", MatrixStruct),
        *((name, ctypes.c_int64) for name in ("num_layers", "hidden_size", "inner_size", "num_heads", "num_kv_heads")),
        *((name, ctypes.c_int64) for name in ("head_size", "vocab_size", "num_positions")),
        ("epsilon", ctypes.c_float),
        ("dtype", ctypes.c_int32),
    )


class _Pass(ctypes.Structure):
    """`Pass` of csrc/step.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("token_ids", "positions", "slots", "wanted", "sequences")),
        *((name, ctypes.c_void_p) for name in ("keys", "values", "logits", "seconds")),
        *((name, ctypes.c_int64) for name in ("rows", "num_wanted", "num_sequences", "block_size", "num_slots")),
        ("logits_stride", ctypes.c_int64),
        ("cache_type", ctypes.c_int32),
    )


def obstacle(config: ModelConfig, weights: Mapping[str, torch.Tensor]) -> str | None:
    """Why the native library cannot run this model; None if it can. The dtype is the caller's to check."""
    if config.head_size % 2 or config.head_size > _MAX_HEAD_SIZE:
        return f"heads of size {config.head_size} (the kernels take even sizes up to {_MAX_HEAD_SIZE})"
    for index in range(config.num_layers):
        layer = Layer.from_checkpoint(weights, index)
        if type(layer.gate) is not type(layer.up):
            return f"layer {index} stores its gate and up matrices in different formats"
        scales = {linear.input_scale for linear in (layer.gate, layer.up) if isinstance(linear, Fp8Linear)}
        if len(scales) > 1:
            return f"layer {index} has different FP8 input scales for its gate and up matrices"
    return None


class NativeModel:
    """Forward pass over a paged cache, in float32, bfloat16 or float16; accumulation and residuals are in float32.

    weights: one rank's tensors, all of them; emptied, layer by layer, as they are laid out anew.
    """

    def __init__(self, library: ctypes.CDLL, config: ModelConfig, weights: MutableMapping[str, torch.Tensor]) -> None:
        self.config, self.num_kv_heads, self.wide = config, config.num_kv_heads, torch.float32
        self._library = library
        self._kept: list[torch.Tensor | PackedLinear] = []  # what the library points to
        self.rotary = Rotary(config.head_size, config.rotary_base, config.rotary_scaling, torch.float32)
        self._dtype = weights["transformer.ln_f.weight"].dtype
        embedding = load_embedding(weights, "transformer.vocab_embedding.")
        head = PackedLinear([load_linear(weights, "lm_head.")])
        self._kept.append(head)
        self._num_outputs = head.columns
        final_norm = self._norm(weights["transformer.ln_f.weight"])
        self._layers = (_Layer * config.num_layers)()
        inner_size = 0
        for index in range(config.num_layers):
            inner_size = self._add_layer(index, Layer.from_checkpoint(weights, index))
            for name in [name for name in weights if name.startswith(f"transformer.layers.{index}.")]:
                del weights[name]
        weights.clear()
        self._decoder = _Decoder(
            layers=ctypes.addressof(self._layers),
            final_norm=final_norm,
            embedding=self._keep(embedding.table),
            embedding_scales=None if embedding.scale is None else self._keep(embedding.scale.float()),
            head=head.struct,
            num_layers=config.num_layers,
            hidden_size=config.hidden_size,
            inner_size=inner_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_size=config.head_size,
            vocab_size=len(embedding.table),
            epsilon=config.norm_epsilon,
            dtype=DTYPES[self._dtype],
        )
        self._cache: KVCache | None = None
        self.seconds: torch.Tensor | None = None  # float64 [len(PARTS)]: gathers the time of each part

    def forward(self, inputs: ModelInput, cache: KVCache, block_size: int) -> torch.Tensor:
        """Logits [N, vocab_size], float32."""
        self._reach(int(inputs.positions.max()))
        self._attach(cache)
        table = inputs.block_table.to(torch.int32).contiguous()
        starts = inputs.query_start_loc
        addresses = torch.arange(len(table)) * (4 * table.shape[1]) + table.data_ptr()
        sequences = torch.stack(
            [starts[:-1], starts.diff(), inputs.cache_lens, addresses, torch.zeros_like(addresses)], dim=1
        )  # `AttentionSequence` of csrc/attention.h
        rows = [inputs.input_ids, inputs.positions, inputs.slot_mapping, inputs.logits_indices]
        rows = [tensor.contiguous() for tensor in rows]
        logits = torch.empty(len(inputs.logits_indices), self._num_outputs)
        step = _Pass(
            *(tensor.data_ptr() for tensor in (*rows, sequences, cache.keys, cache.values, logits)),
            None if self.seconds is None else self.seconds.data_ptr(),
            *(len(rows[0]), len(logits), len(sequences), block_size, cache.keys.shape[2], self._num_outputs),
            CACHE_DTYPES[cache.dtype],
        )
        self._library.magicdec_set_num_threads(torch.get_num_threads())
        if self._library.magicdec_step(ctypes.byref(self._decoder), ctypes.byref(step)):
            raise IndexError("a token, position, slot or block of this pass does not exist")
        return logits[:, : self.config.vocab_size]

    def _add_layer(self, index: int, layer: Layer) -> int:
        """Lay out a layer; returns the size of its inner rows."""
        qkv, dense, down = (PackedLinear([linear]) for linear in (layer.qkv, layer.dense, layer.down))
        gate_up = PackedLinear([layer.gate, layer.up], gated=True)
        self._kept += [qkv, dense, gate_up, down]
        self._layers[index] = _Layer(
            input_norm=self._norm(layer.input_norm),
            input_offset=self._norm(layer.input_offset),
            post_norm=self._norm(layer.post_norm),
            post_offset=self._norm(layer.post_offset),
            query_norm=self._norm(layer.query_norm),
            key_norm=self._norm(layer.key_norm),
            qkv=qkv.struct,
            dense=dense.struct,
            gate_up=gate_up.struct,
            down=down.struct,
            kv_scale=1.0,
        )
        return gate_up.columns

    def _norm(self, weight: torch.Tensor | None) -> int | None:
        if weight is None:
            return None
        return self._keep(functional.pad(weight.float(), (0, -len(weight) % _ALIGN)))

    def _keep(self, tensor: torch.Tensor) -> int:
        """The address of a tensor that stays."""
        tensor = tensor.contiguous()
        self._kept.append(tensor)
        return tensor.data_ptr()

    def _reach(self, position: int) -> None:
        """Make the table of angles long enough for this position."""
        if position < self._decoder.num_positions:
            return
        count = max(2 * self._decoder.num_positions, position + 1, _FIRST_POSITIONS)
        half = self.config.head_size // 2
        self._angles = [table[:, 0, :half].contiguous() for table in self.rotary.angles(torch.arange(count))]
        self._decoder.cosines, self._decoder.sines = (table.data_ptr() for table in self._angles)
        self._decoder.num_positions = count

    def _attach(self, cache: KVCache) -> None:
        """Take over what an FP8 cache needs to know."""
        if cache is self._cache:
            return
        self._cache = cache
        if not (cache.keys.is_contiguous() and cache.values.is_contiguous()):
            raise EngineError("the KV pool must be contiguous")
        self._decoder.key_turn = self._decoder.query_turn = None
        if cache.fp8_scales is not None:
            turn = Hadamard(self.config.head_size, torch.float32)
            self._turns = [turn.to_keys.contiguous(), turn.to_queries.contiguous()]
            self._decoder.key_turn, self._decoder.query_turn = (matrix.data_ptr() for matrix in self._turns)
        for index in range(self.config.num_layers):
            self._layers[index].kv_scale = cache.scale(index)
