"""The proposer of each way, all on one engine, so that every way decodes over the same weights, KV and prompts."""

from dataclasses import replace
from typing import TYPE_CHECKING

from magicdec.bench.grid import Way
from magicdec.runtime.drafting.model_proposer import ModelProposer
from magicdec.runtime.drafting.ngram import NGramProposer
from magicdec.runtime.drafting.views import TargetWindow
from magicdec.runtime.engine.drafting import Drafting
from magicdec.runtime.engine.proposer import PlainProposer, Proposer

if TYPE_CHECKING:
    from magicdec.runtime.llm import LLM


def make_drafting(llm: "LLM", way: Way) -> Drafting:
    """How a way drafts: by its own proposer, as many tokens as each request says; `auto` has its own controller."""
    if way.drafter == "auto":
        return llm.auto_drafting(every=True)
    return replace(llm.engine.drafting, proposer=make_proposer(llm, way))


def make_proposer(llm: "LLM", way: Way) -> Proposer:
    """What drafts for a way.

    `self-full` is the speculative decoding of the literature: the draft reads the whole context. It has the target's
    weights and cache, and a window that no context outgrows.
    """
    draft = llm.config.draft
    if way.drafter == "none":
        return PlainProposer()
    if way.drafter == "ngram":
        return NGramProposer(min_ngram=draft.ngram_min, max_ngram=draft.ngram_max)
    if way.drafter == "draft":
        return llm.engine.drafting.proposer
    window = llm.engine.blocks.num_blocks * llm.config.block_size if way.drafter == "self-full" else way.window
    assert window is not None, "a way of this kind has a window"
    view = TargetWindow(llm.engine.blocks, window_size=window, num_sink_tokens=draft.num_sink_tokens)
    own = llm.draft_runner if way.drafter in ("self-int8", "self-int4") else None
    return ModelProposer(own or llm.runner, view)


def draft_kv_bytes(llm: "LLM", way: Way, batch: int) -> int:
    """KV that exists for drafts alone: none in self-speculation, which reads the target's blocks."""
    return llm.memory()["draft_kv_bytes_per_request"] * batch if way.drafter == "draft" else 0
