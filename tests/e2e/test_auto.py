"""Whole runs that choose draft length and drafter themselves: the output is plain decoding's."""

from pathlib import Path

import pytest

from magicdec.errors import EngineError
from magicdec.runtime.drafting.switch import ProposerSwitch
from magicdec.runtime.llm import LLM
from magicdec.runtime.sampling_params import SamplingParams
from tests.e2e.test_exactness import PARAMS, PROMPTS
from tests.support.engines import Drafter, tiny_pair


@pytest.mark.parametrize("drafter", ["self", "in_cache", "ngram"])
def test_auto_gives_plain_decodings_output(drafter: Drafter, tmp_path: Path) -> None:
    """Greedy and seeded requests in one batch, with every drafter that the pair has."""
    pair = tiny_pair(tmp_path, drafter)
    llm = LLM(pair, num_draft_tokens="auto", drafter="auto")
    assert isinstance(llm.engine.drafting.proposer, ProposerSwitch)
    assert len(llm.engine.drafting.proposer.proposers) == (3 if drafter == "in_cache" else 2)
    outputs = llm.generate(PROMPTS, PARAMS)
    llm.engine.check_integrity()
    plain = LLM(pair, num_draft_tokens=0).generate(PROMPTS, PARAMS)
    for output, wanted in zip(outputs, plain, strict=True):
        assert [out.token_ids for out in output.outputs] == [out.token_ids for out in wanted.outputs]
        assert [out.text for out in output.outputs] == [out.text for out in wanted.outputs]
    assert sum(output.metrics.num_accepted_tokens for output in outputs) > 0


def test_auto_needs_no_other_drafter_and_yields_to_a_requests_own_length(tmp_path: Path) -> None:
    llm = LLM(tiny_pair(tmp_path, "self"), num_draft_tokens="auto")
    assert isinstance(llm.engine.drafting.proposer, ProposerSwitch)
    assert len(llm.engine.drafting.proposer.proposers) == 1
    params = [SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, num_draft_tokens=k) for k in (0, 2)]
    none, two = llm.generate([[5, 6, 7]] * 2, params)
    assert set(none.metrics.draft_lengths) == {0}
    assert max(two.metrics.draft_lengths) == 2
    assert none.outputs[0].token_ids == two.outputs[0].token_ids


def test_drafter_auto_goes_with_lengths_that_are_chosen(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="use num_draft_tokens 'auto', or drafter 'own'"):
        LLM(tiny_pair(tmp_path, "self"), drafter="auto")
