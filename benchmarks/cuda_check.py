"""make torch-cuda-check: the parts that need a CUDA card, PyTorch and Triton, and nothing else, in less than 4 minutes.

    python -m benchmarks.cuda_check             from the repository's root, with any Python that has PyTorch for CUDA
    TRITON_INTERPRET=1 python -m benchmarks.cuda_check --rehearse     the same on a CPU, at toy sizes: proves the script

The fused acceptance must give the reference's tokens, and the model TorchRunner's logits on a CPU. Speeds are measured,
not judged. Ends with 0 if all is equal, with 1 if not, with 2 where it cannot run.
"""

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from magicdec.plugins import acceptance
from magicdec.plugins.acceptance import Outcome, Rule
from magicdec.plugins.model.inputs import SequenceInput, pack
from magicdec.plugins.model.kv_cache import KVCache
from magicdec.plugins.model.torch_model import ModelConfig, TorchModel
from tests.plugins.acceptance_cases import Batch, at_the_edges, random_batch
from tests.support.one_request import gumbel, rejection_sample


@dataclass(frozen=True)
class Scale:
    """How much to do. shapes: (requests, V, block size, dtype) of each comparison."""

    device: str
    shapes: tuple[tuple[int, int, int, torch.dtype], ...]
    vocab_size: int
    batch_sizes: tuple[int, ...]
    repeats: int


CUDA = Scale(
    device="cuda",
    shapes=(
        (1500, 50, 16, torch.float32),
        (1000, 997, 64, torch.bfloat16),
        (200, 32_000, 1024, torch.float16),
        (100, 32_000, 1024, torch.float64),
        (60, 128_256, 1024, torch.bfloat16),
        (40, 151_936, 1024, torch.float32),
    ),
    vocab_size=128_256,
    batch_sizes=(1, 8, 32),
    repeats=50,
)
REHEARSAL = Scale("cpu", ((12, 50, 16, torch.float32), (3, 200, 64, torch.bfloat16)), 300, (1, 2), 2)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, at toy sizes, in Triton's interpreter")
    scale = REHEARSAL if parser.parse_args().rehearse else CUDA
    reason = missing(scale)
    if reason:
        sys.stderr.write(f"make torch-cuda-check cannot run: {reason}\n")
        return 2
    say(describe(scale))
    started = time.perf_counter()
    checks: tuple[Callable[[Scale], bool], ...] = (check_tokens, check_model, check_pair, measure)
    passed = [check(scale) for check in checks]
    say(f"{'passed' if all(passed) else 'FAILED'} in {time.perf_counter() - started:.0f} s")
    return 0 if all(passed) else 1


def missing(scale: Scale) -> str | None:
    """Why the check would mean nothing here."""
    if scale.device == "cuda" and not torch.cuda.is_available():
        return f"PyTorch {torch.__version__} sees no CUDA device. Run it where torch.cuda.is_available() is true"
    try:
        import triton  # noqa: F401
    except ImportError:
        return "this Python has no triton, which a PyTorch for CUDA brings along; pip install triton"
    return None


def describe(scale: Scale) -> str:
    import triton

    card = torch.cuda.get_device_name() if scale.device == "cuda" else "no GPU (rehearsal: proves the script alone)"
    return f"{card}; PyTorch {torch.__version__}, Triton {triton.__version__}, Python {sys.version.split()[0]}"


def check_tokens(scale: Scale) -> bool:
    """Every rejection and greedy token is the reference's; noise through a device's logarithm may turn a tie."""
    from magicdec.plugins import acceptance_kernel

    passed = True
    for count, vocab_size, block_size, dtype in scale.shapes:
        rng = np.random.default_rng(vocab_size)
        batch = at_the_edges(rng, random_batch(rng, count, vocab_size, dtype))
        batch.logits[::37, vocab_size // 2] = math.nan  # rows that no request may draw from
        wanted = acceptance.accept(batch.logits, batch.draft_probs, batch.requests, gumbel, block_size)
        logits, drafts = batch.logits.to(scale.device), batch.draft_probs.to(scale.device)
        got = acceptance_kernel.accept(logits, drafts, batch.requests, block_size)
        wrong = {rule: _differences(batch, rule, got, wanted) for rule in Rule}
        counts = ", ".join(f"{rule.name.lower()} {wrong[rule]}" for rule in Rule)
        say(f"acceptance, V={vocab_size}, {str(dtype)[6:]}: {count} requests, different: {counts}")
        passed &= not any(wrong.values())
    return passed


def _differences(batch: Batch, rule: Rule, got: list[Outcome | None], wanted: list[Outcome | None]) -> int:
    rows = zip(batch.requests, got, wanted, strict=True)
    return sum(request.rule is rule and one != other for request, one, other in rows)


def check_model(scale: Scale) -> bool:
    """TorchModel over a paged cache: a prompt, then several rows on top of it, against the CPU in float64."""
    passed = True
    for name, qk_norm in (("LLaMA", False), ("Qwen3", True)):
        exact = _logits("cpu", torch.float64, qk_norm)
        for dtype, bound in ((torch.float64, 1e-10), (torch.float32, 1e-4), (torch.bfloat16, None)):
            error = float((_logits(scale.device, dtype, qk_norm).cpu().double() - exact).abs().max())
            on_cpu = float((_logits("cpu", dtype, qk_norm).double() - exact).abs().max())
            limit = 2 * on_cpu if bound is None else bound  # 16 bit: no worse than twice the same precision on a CPU
            say(f"{name} logits, {str(dtype)[6:]}: largest error {error:.1e} (CPU {on_cpu:.1e}, allowed {limit:.1e})")
            passed &= error <= limit
    return passed


def _logits(device: str, dtype: torch.dtype, qk_norm: bool) -> torch.Tensor:
    config = ModelConfig(2, 4, 2, 16, 64, 128, 1e-5, 1e4, None, qk_norm)
    weights = {name: tensor.to(device, dtype) for name, tensor in _weights(config).items()}
    model = TorchModel(config, weights)
    cache = KVCache(
        num_layers=2, num_kv_heads=2, head_size=16, num_slots=8 * 16, dtype=dtype, device=torch.device(device)
    )
    rows: list[torch.Tensor] = []
    with torch.inference_mode():
        for start, stop in ((0, 37), (37, 42)):
            table = [5, 2, 7]
            slots = [table[i // 16] * 16 + i % 16 for i in range(start, stop)]
            tokens = [(7 * i) % 128 for i in range(start, stop)]
            sequence = SequenceInput(tokens, range(start, stop), start, table[: -(-stop // 16)], slots, 5)
            rows.append(model.forward(pack([sequence]), cache, 16))
    return torch.cat(rows)


def _weights(config: ModelConfig) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, heads = config.hidden_size, config.num_heads + 2 * config.num_kv_heads

    def linear(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator, dtype=torch.float64) * float(columns**-0.5)

    weights = {"transformer.vocab_embedding.weight": linear(config.vocab_size, hidden) * 8}
    for index in range(config.num_layers):
        prefix = f"transformer.layers.{index}."
        shapes = {"attention.qkv": (heads * config.head_size, hidden), "attention.dense": (hidden, hidden)}
        shapes |= {"mlp.fc": (96, hidden), "mlp.gate": (96, hidden), "mlp.proj": (hidden, 96)}
        weights |= {f"{prefix}{name}.weight": linear(*shape) for name, shape in shapes.items()}
        sizes = {"input_layernorm": hidden, "post_layernorm": hidden}
        if config.qk_layernorm:
            sizes |= {"attention.q_layernorm": config.head_size, "attention.k_layernorm": config.head_size}
        weights |= {f"{prefix}{name}.weight": 1 + 0.1 * linear(1, size)[0] for name, size in sizes.items()}
    weights["transformer.ln_f.weight"] = torch.ones(hidden, dtype=torch.float64)
    weights["lm_head.weight"] = linear(config.vocab_size, hidden)
    return weights


def check_pair(scale: Scale) -> bool:
    """Whole runs of a tiny pair, if the package's other requirements are installed: float64, so tokens must agree."""
    try:
        from magicdec import LLM, SamplingParams
        from tests.support.engines import tiny_pair
    except ImportError as error:
        say(f"whole runs: NOT CHECKED, this Python lacks {error.name} (pip install -e . brings it)")
        return True
    params = [
        SamplingParams(temperature=0, max_tokens=24),
        SamplingParams(seed=1, max_tokens=24),
        SamplingParams(seed=2, max_tokens=24, acceptance="rejection", temperature=0.8),
        SamplingParams(seed=3, max_tokens=24, acceptance="rejection", top_p=0.9),
    ]
    prompts = [list(range(5, 100)), [7, 8, 9], [30, 20, 10, 40], list(range(40, 60))]
    passed = True
    for drafter in ("self", "ngram", "in_cache"):
        with TemporaryDirectory() as folder:
            pair = tiny_pair(Path(folder), drafter)
            outputs = [
                [o.outputs[0].token_ids for o in LLM(pair, dtype="float64", device=device).generate(prompts, params)]
                for device in ("cpu", scale.device)
            ]
        say(f"whole runs, {drafter} drafts: {'same tokens' if outputs[0] == outputs[1] else 'DIFFERENT tokens'}")
        passed &= outputs[0] == outputs[1]
    return passed


def measure(scale: Scale) -> bool:
    """Wall time of one step's acceptance with 4 drafts a request, logits on the device, outcomes on the host."""
    from magicdec.plugins import acceptance_kernel

    for count in scale.batch_sizes:
        rng = np.random.default_rng(0)
        batch = random_batch(rng, count, scale.vocab_size, torch.bfloat16, [Rule.REJECTION], min_draft_len=4)
        batch = replace(batch, logits=batch.logits.to(scale.device), draft_probs=batch.draft_probs.to(scale.device))
        coupled = replace(batch, requests=[replace(request, rule=Rule.COUPLED) for request in batch.requests])
        fused = _median(lambda b=batch: acceptance_kernel.accept(b.logits, b.draft_probs, b.requests), scale)  # type: ignore[misc]
        noisy = _median(lambda b=coupled: acceptance_kernel.accept(b.logits, b.draft_probs, b.requests), scale)  # type: ignore[misc]
        plain = _median(lambda b=batch: _request_by_request(b), replace(scale, repeats=3))  # type: ignore[misc]
        size = batch.logits.nbytes + batch.draft_probs.nbytes
        say(
            f"speed, {count} requests, {count * 5} rows of V={scale.vocab_size} ({size / 1e6:.0f} MB): "
            f"fused {fused * 1e3:.3f} ms, coupled {noisy * 1e3:.3f} ms, request by request {plain * 1e3:.1f} ms"
        )
    return True


def _request_by_request(batch: Batch) -> None:
    """What the engine does without the kernel."""
    row = 0
    for index, request in enumerate(batch.requests):
        k = len(request.draft_token_ids)
        probs = (batch.logits[row : row + k + 1].float() / request.temperature).softmax(-1)
        drafts = batch.draft_probs[row - index : row - index + k]
        rejection_sample(probs, drafts, request.draft_token_ids, request.accept_draws, request.sample_draws)
        row += k + 1


def _median(run: Callable[[], object], scale: Scale) -> float:
    """Seconds. Every run ends with a copy to the host, so the clock sees all of its work."""
    run()
    times = []
    for _ in range(scale.repeats):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
