"""What `magicdec trtllm-check` measures of TensorRT-LLM engines on the machine at hand."""

import platform
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from magicdec.builder.build import build_pair
from magicdec.errors import EngineError
from magicdec.pair.config import PairConfig
from magicdec.pair.manifest import load_pair
from magicdec.plugins.model.inputs import SequenceInput, pack
from magicdec.runtime.llm import LLM
from magicdec.runtime.outputs import RequestOutput
from magicdec.runtime.runners.interface import ModelRunner
from magicdec.runtime.runners.torch_runner import TorchRunner
from magicdec.runtime.runners.trtllm.runner import TrtllmRunner
from magicdec.runtime.runners.trtllm.session import TRTLLM_VERSION, import_tensorrt
from magicdec.runtime.sampling_params import SamplingParams

Rows = list[tuple[str, str]]
LEAST_P = 1e-4  # a law is doubted below this


@dataclass(frozen=True)
class Check:
    """One check's verdict and what it measured."""

    name: str
    passed: bool
    rows: Rows


@dataclass(frozen=True)
class CheckPlan:
    """What to check. pairs: what to build by name, with the draft ("self", or a model) and its configuration."""

    target: Path
    pairs: dict[str, tuple[Path | str, PairConfig]]
    directory: Path
    text: str
    device: str = "cuda"
    context: int = 2048  # prompt tokens of the longest prompt
    max_tokens: int = 128
    num_samples: int = 400
    workers: int | None = None  # processes that compile, see `compile_engines`


def describe_gpu() -> Rows:
    """Versions and the card; EngineError on a machine where the checks would mean nothing."""
    tensorrt_llm, tensorrt = import_tensorrt()
    if tensorrt_llm.__version__ != TRTLLM_VERSION:
        raise EngineError(
            f"TensorRT-LLM {tensorrt_llm.__version__} is installed, and the engines are written for {TRTLLM_VERSION}, "
            f"the last line with TensorRT engines; install tensorrt-llm=={TRTLLM_VERSION}"
        )
    if not torch.cuda.is_available():
        raise EngineError("PyTorch sees no NVIDIA GPU; run this check on a machine with an A100, H100 or H200")
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) not in ((8, 0), (9, 0)):
        raise EngineError(
            f"{torch.cuda.get_device_name()} is of compute capability {major}.{minor}; the engines are written for "
            "8.0 (A100) and 9.0 (H100, H200)"
        )
    return [
        ("GPU", f"{torch.cuda.get_device_name()}, compute capability {major}.{minor}"),
        ("TensorRT-LLM", f"{tensorrt_llm.__version__}, TensorRT {tensorrt.__version__}"),
        ("PyTorch", f"{torch.__version__}, CUDA {torch.version.cuda}"),
        ("Python", f"{platform.python_version()}, {platform.system()} {platform.machine()}"),
    ]


def run_checks(plan: CheckPlan, report: Callable[[str], None]) -> list[Check]:
    """All checks in order; one that raises has failed, and the next ones run all the same."""
    checks: list[Check] = []
    for name, (draft, config) in plan.pairs.items():
        pair = plan.directory / name
        steps: list[tuple[str, Callable[[], Check]]] = [("build", partial(_build, plan, draft, config, pair))]
        measures = (check_logits, check_equality, check_law, measure_speed)
        steps += [(measure.__name__.split("_")[1], partial(measure, plan, pair)) for measure in measures]
        for what, step in steps:
            report(f"{name}: {what}")
            checks.append(_guarded(f"{name}: {what}", step))
            if what == "build" and not checks[-1].passed:
                break
    return checks


def check_logits(plan: CheckPlan, pair: Path) -> Check:
    """The engine's error against float32 is at most twice PyTorch's in the engine's own precision."""
    config = load_pair(pair).config
    tokens = _tokens(plan, pair)[: min(config.max_seq_len // 2, plan.context)]
    engine = _open_engine(plan, pair, len(tokens))
    context, generation = _verify_and_decode(engine, tokens, config.draft.max_draft_len)
    blocks, device = engine.num_blocks, plan.device
    exact, _ = _verify_and_decode(
        TorchRunner(pair / "target", blocks, config.block_size, torch.float32, device),
        tokens,
        config.draft.max_draft_len,
    )
    same, _ = _verify_and_decode(
        TorchRunner(pair / "target", blocks, config.block_size, engine.dtype, device),
        tokens,
        config.draft.max_draft_len,
    )
    ours, theirs = _distance(context, exact), _distance(same, exact)
    rows = [
        ("largest error against float32, engine", f"{ours:.2e}"),
        (f"the same of PyTorch in {engine.dtype}", f"{theirs:.2e}"),
        ("verify rows against the same rows one by one", f"{_distance(context, generation):.2e}"),
        ("top-1 agreement with float32", f"{_agreement(context, exact):.3f}"),
    ]
    return Check("", ours <= 2 * theirs + 1e-3 and bool(context.isfinite().all()), rows)


def check_equality(plan: CheckPlan, pair: Path) -> Check:
    """Greedy with drafts equals greedy without, except where the decision is closer than rounding can tell."""
    config, llm = load_pair(pair).config, _open(plan, pair)
    tokens = _tokens(plan, pair)
    lengths = [min(plan.context, config.max_seq_len - plan.max_tokens - 16) // part for part in (1, 3, 20)]
    prompts = [tokens[start : start + length] for start, length in enumerate(lengths)]
    drafts = min(4, config.draft.max_draft_len)
    params = SamplingParams(
        temperature=0, max_tokens=plan.max_tokens, ignore_eos=True, logprobs=2, num_draft_tokens=drafts
    )
    speculative = llm.generate(prompts, params)
    plain = llm.generate(prompts, params.model_copy(update={"num_draft_tokens": 0}))
    engine = _open_engine(plan, pair, lengths[0])
    rounding = _distance(*_verify_and_decode(engine, prompts[0], config.draft.max_draft_len))
    parts = [_parting(a, b) for a, b in zip(speculative, plain, strict=True)]
    wrong = [part for part in parts if part is not None and part[1] > 4 * rounding + 1e-4]
    accepted = sum(out.metrics.num_accepted_tokens for out in speculative)
    proposed = sum(out.metrics.num_draft_tokens for out in speculative)
    rows = [
        ("prompts", ", ".join(f"{length} tokens" for length in lengths)),
        ("identical", f"{parts.count(None)} of {len(parts)}, {plan.max_tokens} tokens each"),
        ("part where", "; ".join(f"token {at}, margin {margin:.1e}" for at, margin in filter(None, parts)) or "never"),
        ("rounding of a logit between kernels", f"{rounding:.1e}"),
        ("draft tokens accepted", f"{accepted} of {proposed}"),
    ]
    return Check("", not wrong and proposed > 0, rows)


def check_law(plan: CheckPlan, pair: Path) -> Check:
    """Samples with drafts and without come from one law: chi-square of two samples of three tokens each."""
    llm, prompt = _open(plan, pair), _tokens(plan, pair)[:100]
    counts = []
    for first, drafts in ((0, None), (plan.num_samples, 0)):
        params = [
            SamplingParams(
                seed=first + index,
                acceptance="rejection",
                top_k=2,
                max_tokens=3,
                ignore_eos=True,
                num_draft_tokens=drafts,
            )
            for index in range(plan.num_samples)
        ]
        outputs = llm.generate([prompt] * plan.num_samples, params)
        counts.append(Counter(tuple(out.outputs[0].token_ids) for out in outputs))
    statistic, freedom = two_sample_chi_square(*counts)
    p = chi_square_tail(statistic, freedom)
    rows = [("samples", f"{plan.num_samples} each"), ("chi-square", f"{statistic:.1f} with {freedom} degrees")]
    return Check("", p > LEAST_P and freedom > 0, [*rows, ("p", f"{p:.2g}")])


def measure_speed(plan: CheckPlan, pair: Path) -> Check:
    """Tokens a second, plain and speculative, alone and in a full batch; measured, not judged."""
    config, llm = load_pair(pair).config, _open(plan, pair)
    length = min(plan.context, config.max_seq_len - plan.max_tokens - 16)
    tokens, rows = _tokens(plan, pair), []
    for batch in sorted({1, config.max_batch_size}):
        prompts = [tokens[start : start + length] for start in range(batch)]
        for name, drafts in (("plain", 0), ("speculative", None)):
            params = SamplingParams(temperature=0, max_tokens=plan.max_tokens, ignore_eos=True, num_draft_tokens=drafts)
            llm.generate(prompts, params)  # warm, and the prompts' prefixes are in the cache
            start_time = time.perf_counter()
            outputs = llm.generate(prompts, params)
            seconds = time.perf_counter() - start_time
            produced = sum(out.metrics.num_output_tokens for out in outputs)
            length_text = f", acceptance length {outputs[0].metrics.acceptance_length:.2f}" if drafts is None else ""
            rows.append((f"{name}, batch {batch}, context {length}", f"{produced / seconds:.1f} tokens/s{length_text}"))
    memory = llm.memory()
    rows.append(("KV pools", f"target {memory['target_kv_bytes']:,} bytes, draft {memory['draft_kv_bytes']:,}"))
    return Check("", True, rows)


def two_sample_chi_square(first: Counter[Any], second: Counter[Any]) -> tuple[float, int]:
    """(statistic, degrees of freedom) of two samples of equal size; cells of fewer than 10 in all are merged."""
    cells = [(first[key], second[key]) for key in first.keys() | second.keys()]
    kept = [cell for cell in cells if sum(cell) >= 10]
    rare = [cell for cell in cells if sum(cell) < 10]
    if rare:
        kept.append((sum(a for a, _ in rare), sum(b for _, b in rare)))
    return sum((a - b) ** 2 / (a + b) for a, b in kept), len(kept) - 1


def chi_square_tail(statistic: float, freedom: int) -> float:
    """Chance of a larger statistic."""
    if freedom < 1:
        return 1.0
    half = torch.tensor([freedom, statistic], dtype=torch.float64) / 2
    return float(torch.special.gammaincc(half[0], half[1]))


def _build(plan: CheckPlan, draft: Any, config: PairConfig, pair: Path) -> Check:
    start = time.perf_counter()
    build_pair(plan.target, draft, config, pair, workers=plan.workers, overwrite=True)
    return Check("", True, [("seconds", f"{time.perf_counter() - start:.1f}")])


def _guarded(name: str, measure: Callable[[], Check]) -> Check:
    try:
        found = measure()
        return Check(name, found.passed, found.rows)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return Check(name, False, [(type(error).__name__, f"{error} ({Path(where.filename).name}:{where.lineno})")])


def _open(plan: CheckPlan, pair: Path) -> LLM:
    config = load_pair(pair).config
    room = config.max_batch_size * (plan.context + plan.max_tokens + 64)
    return LLM(pair, device=plan.device, kv_cache_tokens=room)


def _open_engine(plan: CheckPlan, pair: Path, num_tokens: int) -> TrtllmRunner:
    size = load_pair(pair).config.block_size
    return TrtllmRunner(pair / "target", 2 * (-(-num_tokens // size) + 2), size, plan.device)


def _tokens(plan: CheckPlan, pair: Path) -> list[int]:
    from magicdec.runtime.text.tokenizer import HFTokenizer

    tokens = HFTokenizer(pair / "target").encode_plain(plan.text)
    return tokens if len(tokens) > plan.context + 64 else tokens * (1 + (plan.context + 64) // len(tokens))


def _verify_and_decode(runner: ModelRunner, tokens: list[int], count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the last count + 1 rows [count + 1, V]: verified in one pass, and decoded one by one."""
    size, last = runner.block_size, len(tokens) - count - 1
    table = list(range(-(-len(tokens) // size)))

    def rows(first: int, stop: int, num_logits: int) -> SequenceInput:
        return SequenceInput(tokens[first:stop], range(first, stop), first, table, range(first, stop), num_logits)

    runner.forward(pack([rows(0, last, 0)]))
    together = runner.forward(pack([rows(last, len(tokens), count + 1)])).clone()
    alone = [runner.forward(pack([rows(at, at + 1, 1)])).clone() for at in range(last, len(tokens))]
    return together, torch.cat(alone)


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


def _agreement(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.argmax(-1) == b.argmax(-1)).float().mean())


def _parting(output: RequestOutput, plain: RequestOutput) -> tuple[int, float] | None:
    """(token, plain decoding's margin there) where two outputs part; None where they do not."""
    mine, wanted = output.outputs[0], plain.outputs[0]
    pairs: Sequence[tuple[int, int]] = list(zip(mine.token_ids, wanted.token_ids, strict=True))
    at = next((index for index, (a, b) in enumerate(pairs) if a != b), None)
    if at is None:
        return None
    assert wanted.logprobs is not None
    best, second = sorted((entry.logprob for entry in wanted.logprobs[at].values()), reverse=True)[:2]
    return at, best - second
