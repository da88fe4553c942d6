"""A whole step of the native model beside what it cannot do without: reading the weights and the KV cache once.

    python benchmarks/step.py --batch 1 8 --rows 1 5 --context 512 --json step.json

SmolLM2-135M's shape with random weights. Each round times a plain read of as many bytes as all weights take, each step,
and the same linear layers by PyTorch; times are medians over the rounds, ratios are of times of one run. "parts" splits
a step's time as thread 0 sees it.
"""

import argparse
import ctypes
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from magicdec.threads import wait_politely

wait_politely()  # before torch is imported

import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from torch.nn import functional  # noqa: E402

from magicdec.plugins.cpu.library import best_isa, native  # noqa: E402
from magicdec.plugins.model.inputs import ModelInput, SequenceInput, pack  # noqa: E402
from magicdec.plugins.model.kv_cache import KVCache  # noqa: E402
from magicdec.plugins.model.native_model import PARTS, NativeModel  # noqa: E402
from magicdec.plugins.model.torch_model import ModelConfig  # noqa: E402
from magicdec.plugins.weight_only import int4_scales, int8_scales, to_int4, to_int8  # noqa: E402

CONFIG = ModelConfig(
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_size=64,
    hidden_size=576,
    vocab_size=49152,
    norm_epsilon=1e-5,
    rotary_base=100000.0,
    rotary_scaling=None,
    qk_layernorm=False,
)
INNER, BLOCK = 1536, 16
QKV = (CONFIG.num_heads + 2 * CONFIG.num_kv_heads) * CONFIG.head_size
SHAPES = {
    "attention.qkv": (QKV, CONFIG.hidden_size),
    "attention.dense": (CONFIG.hidden_size, CONFIG.num_heads * CONFIG.head_size),
    "mlp.fc": (INNER, CONFIG.hidden_size),
    "mlp.gate": (INNER, CONFIG.hidden_size),
    "mlp.proj": (CONFIG.hidden_size, INNER),
}
WARMUP = 2


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 5], help="new rows of each sequence")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--dtype", choices=("bfloat16", "float32", "float16"), default="bfloat16")
    parser.add_argument("--weights", choices=("dense", "int8", "int4"), default="dense", help="int4: int8 lm_head")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    result = measure(args, getattr(torch, args.dtype))
    Console().print(table(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))


@torch.inference_mode()
def measure(args: argparse.Namespace, dtype: torch.dtype) -> dict[str, Any]:
    """All steps, interleaved."""
    library = native()
    if library is None:
        raise SystemExit("the native library was not built")
    weights = random_weights(dtype, args.weights)
    weight_bytes = sum(tensor.nbytes for name, tensor in weights.items() if "embedding" not in name)
    dense = dense_matrices(dtype)
    model = NativeModel(library, CONFIG, weights)
    cache = filled_cache(max(args.batch) * (args.context + max(args.rows)) + BLOCK * max(args.batch), dtype)
    inputs = {(batch, rows): step_input(batch, rows, args.context) for batch in args.batch for rows in args.rows}
    buffer = torch.ones(weight_bytes, dtype=torch.uint8)
    actions: dict[Any, Callable[[], object]] = {"read": lambda: read(library, buffer)}
    for key, step in inputs.items():
        actions[key] = lambda step=step: model.forward(step, cache, BLOCK)  # type: ignore[misc]
        actions["torch", key] = lambda key=key: torch_linears(dense, key[0] * key[1], dtype)  # type: ignore[misc]
    times: dict[Any, list[float]] = defaultdict(list)
    parts = {key: torch.zeros(len(PARTS), dtype=torch.float64) for key in inputs}
    for index in range(-WARMUP, args.rounds):
        for key, action in actions.items():
            model.seconds = parts.get(key) if index >= 0 else None
            start = time.perf_counter()
            action()
            if index >= 0:
                times[key].append(time.perf_counter() - start)
    median = {key: 1e3 * statistics.median(values) for key, values in times.items()}
    kv_bytes = cache.num_bytes / cache.keys.shape[2] * args.context
    return {
        "isa": best_isa(library),
        "dtype": args.dtype,
        "weights": args.weights,
        "threads": args.threads,
        "context": args.context,
        "weight_megabytes": weight_bytes / 1e6,
        "read_ms": median["read"],
        "read_gigabytes_per_second": weight_bytes / median["read"] / 1e6,
        "steps": [
            {
                "batch": batch,
                "rows": rows,
                "ms": median[batch, rows],
                "least_ms": 1e3 * min(times[batch, rows]),
                "of_weights_read": median[batch, rows] / median["read"],
                "of_weights_and_kv_read": median[batch, rows]
                / (median["read"] * (weight_bytes + batch * kv_bytes) / weight_bytes),
                "torch_linears_ms": median["torch", (batch, rows)],
                "parts_ms": dict(zip(PARTS, (1e3 / args.rounds * parts[batch, rows]).tolist(), strict=True)),
            }
            for batch, rows in inputs
        ],
    }


def table(result: dict[str, Any]) -> Table:
    """One row a step."""
    title = (
        f"{result['dtype']}, {result['weights']} weights ({result['weight_megabytes']:.0f} MB read in "
        f"{result['read_ms']:.1f} ms, {result['read_gigabytes_per_second']:.0f} GB/s), {result['isa']}, "
        f"{result['threads']} threads, context {result['context']}"
    )
    columns = ("batch", "rows", "ms", "of weights read", "of weights + KV read", "linears by PyTorch, ms", *PARTS)
    out = Table(*columns, title=title)
    for step in result["steps"]:
        numbers = (step["of_weights_read"], step["of_weights_and_kv_read"], step["torch_linears_ms"])
        parts = (f"{value:.2f}" for value in step["parts_ms"].values())
        out.add_row(
            *(str(step[name]) for name in ("batch", "rows")), *(f"{x:.2f}" for x in (step["ms"], *numbers)), *parts
        )
    return out


def random_weights(dtype: torch.dtype, kind: str) -> dict[str, torch.Tensor]:
    """A checkpoint's tensors by their names."""
    vocab, hidden = CONFIG.vocab_size, CONFIG.hidden_size
    weights = {"transformer.vocab_embedding.weight": torch.randn(vocab, hidden).to(dtype)}
    weights["transformer.ln_f.weight"] = torch.ones(hidden, dtype=dtype)
    add_matrix(weights, "lm_head.", (vocab, hidden), dtype, "dense" if kind == "dense" else "int8")
    for index in range(CONFIG.num_layers):
        prefix = f"transformer.layers.{index}."
        for norm in ("input_layernorm", "post_layernorm"):
            weights[f"{prefix}{norm}.weight"] = torch.ones(hidden, dtype=dtype)
        for name, shape in SHAPES.items():
            add_matrix(weights, f"{prefix}{name}.", shape, dtype, kind)
    return weights


def add_matrix(
    weights: dict[str, torch.Tensor], prefix: str, shape: tuple[int, int], dtype: torch.dtype, kind: str
) -> None:
    """One linear layer's tensors."""
    weight = torch.randn(shape) * shape[1] ** -0.5
    if kind == "dense":
        weights[prefix + "weight"] = weight.to(dtype)
        return
    if kind == "int8":
        scale = int8_scales(weight)
        weights[prefix + "weight"] = to_int8(weight, scale)
    else:
        scale, offset = int4_scales(weight)
        weights[prefix + "weight"] = to_int4(weight, scale, offset)
        weights[prefix + "weights_offset"] = offset
    weights[prefix + "weights_scaling_factor"] = scale


def dense_matrices(dtype: torch.dtype) -> list[torch.Tensor]:
    """The same linear layers for PyTorch."""
    shapes = [*(shape for _ in range(CONFIG.num_layers) for shape in SHAPES.values())]
    return [torch.randn(shape).to(dtype) for shape in (*shapes, (CONFIG.vocab_size, CONFIG.hidden_size))]


def torch_linears(matrices: list[torch.Tensor], rows: int, dtype: torch.dtype) -> None:
    """Each of them once."""
    inputs = {size: torch.ones(rows, size, dtype=dtype) for size in {matrix.shape[1] for matrix in matrices}}
    for matrix in matrices:
        functional.linear(inputs[matrix.shape[1]], matrix)


def filled_cache(num_tokens: int, dtype: torch.dtype) -> KVCache:
    """A pool with something in every slot."""
    cache = KVCache(
        num_layers=CONFIG.num_layers,
        num_kv_heads=CONFIG.num_kv_heads,
        head_size=CONFIG.head_size,
        num_slots=-(-num_tokens // BLOCK) * BLOCK,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    cache.keys.normal_()
    cache.values.normal_()
    return cache


def step_input(batch: int, rows: int, context: int) -> ModelInput:
    """`rows` new rows for each of `batch` sequences of `context` tokens."""
    blocks = -(-(context + rows) // BLOCK)
    sequences = []
    for index in range(batch):
        table = range(index * blocks, (index + 1) * blocks)
        positions = range(context, context + rows)
        slots = [table[position // BLOCK] * BLOCK + position % BLOCK for position in positions]
        sequences.append(SequenceInput(range(7, 7 + rows), positions, context, table, slots, rows))
    return pack(sequences)


def read(library: ctypes.CDLL, buffer: torch.Tensor) -> None:
    """Every byte once, with all threads."""
    library.magicdec_set_num_threads(torch.get_num_threads())
    library.magicdec_read_bytes(ctypes.c_void_p(buffer.data_ptr()), ctypes.c_size_t(len(buffer)))


if __name__ == "__main__":
    main()
