"""How long a benchmark will take: a rough guess from a few steps, made before the time is spent."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from magicdec.bench.drafters import make_drafting
from magicdec.bench.grid import PLAIN, Point
from magicdec.bench.run import BatchRunner, Clock
from magicdec.bench.session import WARM_UP_TOKENS, BenchPlan
from magicdec.runtime.sampling_params import SamplingParams

if TYPE_CHECKING:
    from magicdec.runtime.llm import LLM

PROBE_TOKENS, PROBE_STEPS = 256, 4


@dataclass(frozen=True)
class Pace:
    """Seconds of a plain step of one short sequence, and of reading one prompt token there."""

    step: float
    prompt_token: float


def probe(llm: "LLM", plan: BenchPlan, tokens: Sequence[int], clock: Clock) -> Pace:
    """Time a short prompt and a few steps behind it; the first reading warms up."""
    length = min(PROBE_TOKENS, max(map(plan.prompt_tokens, plan.grid.contexts)) // 2)
    runner = BatchRunner(llm.engine, make_drafting(llm, PLAIN), clock)
    single = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, num_draft_tokens=0)
    prompts = [list(tokens[start : start + length]) for start in (0, 1)]
    seconds = [runner.read([prompt], single, lambda _done, _total: None) for prompt in prompts]
    params = single.model_copy(update={"max_tokens": PROBE_STEPS + 4})
    run, _ = runner.run([prompts[1]], [params], PROBE_STEPS)
    return Pace(run.decode_seconds / run.steps, min(seconds) / length)


def estimate_seconds(plan: BenchPlan, pace: Pace, weight_bytes: int, kv_bytes_per_token: int) -> float:
    """A step is taken to be as slow as it reads bytes, and a prompt token to cost twice as much at 8k tokens.

    Speculative runs are counted as plain ones.
    """
    total = 0.0
    for context in plan.grid.contexts:
        if not plan.is_beyond(context):
            total += plan.prompt_tokens(context) * max(plan.grid.batches) * pace.prompt_token * (1 + context / 16384)
    for point in plan.grid.points:
        kv = point.context * point.batch * kv_bytes_per_token
        total += _num_steps(plan, point) * pace.step * (1 + kv / weight_bytes)
    return total


def _num_steps(plan: BenchPlan, point: Point) -> int:
    ways = len(plan.grid.ways_at(point.context))
    runs = ways + max(1, -(-ways // 2))  # of one repeat
    return runs * plan.repeats * (plan.output_tokens + 2) + (ways + 1) * (WARM_UP_TOKENS + 2)
