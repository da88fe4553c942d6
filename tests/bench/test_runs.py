"""What counts as decoding, and what as draft, verify and reading: on engines whose passes cost what the test says."""

from collections.abc import Sequence

import pytest
import torch

from magicdec.bench.grid import PLAIN, Grid, Way
from magicdec.bench.prompts import cut_prompts
from magicdec.bench.run import BatchRunner, same_tokens
from magicdec.bench.session import interleave
from magicdec.errors import ConfigError
from magicdec.plugins.model.inputs import ModelInput
from magicdec.runtime.engine.drafting import PLAIN as PLAIN_DRAFTING
from magicdec.runtime.sampling_params import SamplingParams
from tests.support import toy
from tests.support.toy_runner import ToyRunner

PROMPTS = ([1, 2, 3, 4, 5, 6, 7, 8, 9], [9, 8, 7, 6, 5, 4, 3, 2, 1], [3] * 9)
WAYS = [Way("self", 512, length) for length in (1, 2, 3)]


class Time:
    """A clock that only passes move."""

    now = 0.0

    def __call__(self) -> float:
        return Time.now


class SlowToy(ToyRunner):
    """A second for each row, a hundred for that of a prompt."""

    def forward(self, inputs: ModelInput) -> torch.Tensor:
        Time.now += sum(row_seconds(position) for position in inputs.positions.tolist())
        return super().forward(inputs)


def row_seconds(position: int) -> float:
    return 100.0 if position < max(map(len, PROMPTS)) - 1 else 1.0


def params(num_draft_tokens: int | None, count: int = 3) -> list[SamplingParams]:
    return [SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, num_draft_tokens=num_draft_tokens)] * count


def test_decoding_is_counted_without_reading_the_prompts() -> None:
    """Prompts of 9 tokens, read in chunks of 4 rows by an engine of zero cost beside its passes."""
    engine = toy.engine("plain", target_type=SlowToy, max_num_tokens=4)
    prompts = [PROMPTS[0], PROMPTS[0][::-1]]
    run, outputs = BatchRunner(engine, engine.drafting, Time()).run(prompts, params(0, 2), 10)
    assert run.decode_seconds == 2 * run.steps  # a second a row, two rows a step
    assert run.verify_seconds == run.decode_seconds
    assert run.draft_seconds == 0
    assert (run.steps, run.tokens, run.drafted) == (10, 20, 0)
    assert run.reading_seconds >= 16 * 100
    assert min(map(len, outputs)) >= 12
    engine.check_integrity()


def test_drafts_and_verification_are_timed_apart() -> None:
    """Self-speculation: the same runner makes both passes."""
    engine = toy.engine("self", target_type=SlowToy, num_draft_tokens=3)
    run, _ = BatchRunner(engine, engine.drafting, Time()).run(PROMPTS, params(3), 12)
    rows = 3 * run.steps
    assert run.drafted == 3 * rows
    assert run.draft_seconds == 3 * rows
    assert run.verify_seconds == 4 * rows
    assert run.decode_seconds == 7 * rows
    assert run.tokens == run.accepted + rows
    engine.check_integrity()


def test_the_batch_is_whole_in_every_measured_step() -> None:
    engine = toy.engine("ngram", target_type=SlowToy)
    run, outputs = BatchRunner(engine, engine.drafting, Time()).run(PROMPTS, params(3), 12)
    assert run.verify_seconds == 3 * run.steps + run.drafted
    assert 12 <= max(map(len, outputs)) - 2 <= 12 + 2 * 4
    assert max(map(len, outputs)) < 60


def test_the_engine_gets_its_own_parts_back() -> None:
    engine = toy.engine("self")
    runner, drafting = engine.runner, engine.drafting
    BatchRunner(engine, PLAIN_DRAFTING, Time()).run(PROMPTS, params(0), 5)
    assert engine.runner is runner
    assert engine.drafting is drafting


def test_all_ways_on_one_engine_write_what_plain_decoding_writes() -> None:
    engine = toy.engine("self", target_type=SlowToy)
    _, plain = BatchRunner(engine, PLAIN_DRAFTING, Time()).run(PROMPTS, params(0), 12)
    _, other = BatchRunner(engine, engine.drafting, Time()).run(PROMPTS, params(3), 12)
    assert same_tokens(plain, other)
    assert not same_tokens(plain, [other[0], [*other[1][:3], 99, *other[1][4:]], other[2]])


def test_every_way_is_measured_beside_plain_decoding() -> None:
    first, second = list(interleave(WAYS, 0)), list(interleave(WAYS, 1))
    assert first == [[WAYS[0], PLAIN, WAYS[1]], [WAYS[2], PLAIN]]
    assert second == [[WAYS[2], PLAIN, WAYS[1]], [WAYS[0], PLAIN]]
    assert list(interleave([], 0)) == [[PLAIN]]


def test_a_window_as_large_as_the_context_is_measured_once() -> None:
    ways = (Way("self", 512, 4), Way("self", 2048, 4), Way("self-full", None, 4))
    grid = Grid((1024, 4096), (1, 4), (0.0,), ways)
    assert grid.ways_at(1024) == [ways[0], ways[2]]
    assert grid.ways_at(4096) == list(ways)
    assert Grid((1024,), (1,), (0.0,), ways[:2]).ways_at(1024) == list(ways[:2])
    assert [(p.context, p.batch) for p in grid.points] == [(1024, 4), (1024, 1), (4096, 4), (4096, 1)]


@pytest.mark.parametrize(("length", "context", "batch"), [(100, 40, 3), (43, 40, 3), (41, 40, 1)])
def test_prompts_are_different_pieces_of_the_text(length: int, context: int, batch: int) -> None:
    text: Sequence[int] = range(length)
    prompts = cut_prompts(text, context, batch, 1)
    assert [len(prompt) for prompt in prompts] == [context] * batch
    assert len({prompt[0] for prompt in prompts}) == batch
    assert prompts[0][0] == 1
    assert all(prompt == list(range(prompt[0], prompt[0] + context)) for prompt in prompts)


def test_a_text_that_is_too_short_is_refused() -> None:
    with pytest.raises(ConfigError, match="the text has 42 tokens, too few for 3 different prompts of 40"):
        cut_prompts(range(42), 40, 3, 1)
