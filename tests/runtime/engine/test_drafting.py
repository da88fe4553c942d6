"""`Engine.use`: the way of drafting changes between steps, and nothing but the speed changes with it."""

from collections.abc import Sequence

import pytest

from magicdec.runtime.drafting.model_proposer import ModelProposer
from magicdec.runtime.drafting.ngram import NGramProposer
from magicdec.runtime.drafting.views import CyclicView
from magicdec.runtime.engine.drafting import PLAIN, Drafting, Round
from magicdec.runtime.engine.engine import Engine
from magicdec.runtime.engine.request import Request
from magicdec.runtime.engine.scheduler import FixedDrafts
from magicdec.runtime.sampling_params import SamplingParams
from tests.support import toy
from tests.support.faults import plant

PROMPTS = [[1, 2, 3], [4, 5, 4, 5, 4], [6, 7, 8, 9] * 5, [3, 3]]
PARAMS = [
    SamplingParams(max_tokens=40, seed=3, ignore_eos=True),
    SamplingParams(max_tokens=40, temperature=0, ignore_eos=True),
    SamplingParams(max_tokens=40, temperature=1.2, top_p=0.8, seed=7),
    SamplingParams(max_tokens=40, temperature=0, repetition_penalty=1.4, ignore_eos=True),
]


class Listener:
    """Notes who was open and who ended."""

    def __init__(self) -> None:
        self.told: set[Request] = set()
        self.released: set[Request] = set()

    def stepped(self, rounds: Sequence[Round], seconds: float, *, with_prompts: bool) -> None:
        assert seconds >= 0
        assert with_prompts in (True, False)
        self.told |= {each.request for each in rounds}

    def release(self, request: Request) -> None:
        self.released.add(request)


def held(drafting: Drafting) -> int:
    """Blocks of a separate draft's pool that some request holds."""
    assert isinstance(drafting.proposer, ModelProposer)
    assert isinstance(drafting.proposer.cache, CyclicView)
    return drafting.proposer.cache.blocks.num_used_blocks


def run_with_changes(every: int) -> tuple[Engine, int]:
    """A separate draft, look-ups and plain decoding in turn; how often the former way let go of something."""
    engine, let_go = toy.engine("in_cache", num_blocks=40), 0
    lookup = Drafting(FixedDrafts(lambda _: 2), NGramProposer(min_ngram=1, max_ngram=2))
    ways = [engine.drafting, lookup, PLAIN]

    def change(step: int) -> None:
        nonlocal let_go
        if step % every == 0:
            former, before = engine.drafting, held(ways[0])
            assert engine.use(ways[(ways.index(former) + 1) % 3]) is former
            if former is ways[0]:
                let_go += before > 0
                assert held(former) == 0, "the former way holds blocks"

    outputs = toy.run(engine, PROMPTS, PARAMS, change)
    for output, prompt, params in zip(outputs, PROMPTS, PARAMS, strict=True):
        toy.assert_equal(output.outputs[0], toy.plain(prompt, params))
    return engine, let_go


@pytest.mark.parametrize("every", [1, 2, 5])
def test_output_is_plain_decodings_whatever_drafts_meanwhile(every: int) -> None:
    engine, let_go = run_with_changes(every)
    assert let_go > 0
    engine.check_integrity()


def test_planted_fault_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, Engine, "use", "former.proposer.release(request)", "pass")
    with pytest.raises(AssertionError, match="the former way holds blocks"):
        run_with_changes(2)


def test_an_engine_decodes_plainly_until_it_is_told_how_to_draft() -> None:
    engine = toy.engine("self")
    assert engine.use(PLAIN) is not PLAIN
    (output,) = toy.run(engine, PROMPTS[:1], PARAMS[:1])
    assert output.metrics.num_draft_tokens == 0
    toy.assert_equal(output.outputs[0], toy.plain(PROMPTS[0], PARAMS[0]))


def test_a_listener_is_told_of_each_request_and_lets_go_of_it() -> None:
    """When it ends, when it is aborted, and when another way of drafting comes."""
    engine, first, second = toy.engine("self"), Listener(), Listener()
    own = engine.drafting
    engine.use(Drafting(own.policy, own.proposer, first))
    for index, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        engine.add_request(str(index), prompt, params)
    for _ in range(4):
        engine.step()
    engine.abort("0")
    assert len(first.told) == 4
    assert len(first.released) == 1
    engine.use(Drafting(own.policy, own.proposer, second))
    assert first.released == first.told
    toy.drain(engine)
    assert second.told == second.released == first.told - {each for each in first.told if each.request_id == "0#0"}
