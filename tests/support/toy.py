"""Engines on ToyRunner, and the oracle that their output must equal: plain decoding as one loop, without an engine."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from magicdec.pair import budget
from magicdec.runtime.drafting.model_proposer import ModelProposer
from magicdec.runtime.drafting.ngram import NGramProposer
from magicdec.runtime.drafting.views import CyclicView, TargetWindow
from magicdec.runtime.engine.block_manager import BlockManager
from magicdec.runtime.engine.drafting import Drafting
from magicdec.runtime.engine.engine import Engine
from magicdec.runtime.engine.proposer import PlainProposer, Proposer
from magicdec.runtime.engine.request import Request
from magicdec.runtime.engine.scheduler import FixedDrafts, Scheduler
from magicdec.runtime.outputs import CompletionOutput, FinishReason, Logprob, RequestOutput
from magicdec.runtime.sampling.draws import Purpose, child_seed, uniform
from magicdec.runtime.sampling.logits import LogitsProcessor
from magicdec.runtime.sampling_params import SamplingParams
from magicdec.runtime.text.detokenizer import Detokenizer
from tests.support.one_request import gumbel, sample, sample_gumbel
from tests.support.toy_runner import ToyRunner

Kind = Literal["plain", "ngram", "self", "in_cache", "absolute"]
KINDS: tuple[Kind, ...] = ("plain", "ngram", "self", "in_cache", "absolute")
DRAFTERS = KINDS[1:]
VOCAB_SIZE = 16
EOS = 0
DETAIL = 0.5  # so that drafts agree with the target about half the time, and yet each token seen matters
MAX_SEQ_LEN = 200
MAX_STEPS = 20_000  # of one run; far more than any test needs, so that an engine that stands still fails


class ToyTokenizer:
    """Pieces of text of one to three letters, so that a string can be spelt in several ways and cross tokens."""

    pieces = ("</s>", "a", "b", "c", "ab", "bc", "ca", "abc", " ", " a", "d", "da", "e", "ee", "f", ".")

    def encode_plain(self, text: str) -> list[int]:
        """Longest piece first."""
        ids = []
        while text:
            piece = max((p for p in self.pieces[1:] if text.startswith(p)), key=len)
            ids.append(self.pieces.index(piece))
            text = text[len(piece) :]
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """End of sequence has no text."""
        return "".join(self.pieces[i] for i in token_ids if i != EOS)

    def decode_stream(self) -> Callable[[int], str | None]:
        """Every token is whole characters."""
        return lambda token_id: self.decode([token_id])


def engine(
    kind: Kind,
    *,
    num_draft_tokens: int = 3,
    num_blocks: int = 64,
    block_size: int = 4,
    max_batch_size: int = 4,
    max_num_tokens: int = 32,
    max_seq_len: int = MAX_SEQ_LEN,
    window_size: int = 8,
    num_sink_tokens: int = 3,
    prefix_caching: bool = True,
    draft_length: Callable[[Request], int] | None = None,
    target_type: Callable[..., ToyRunner] = ToyRunner,
    draft_type: Callable[..., ToyRunner] = ToyRunner,
) -> Engine:
    """An engine with a drafter of one kind.

    draft_length: default the request's own, at most num_draft_tokens. target_type, draft_type: what to make the runners
    of. A separate draft sees only its window, so it agrees with the target to a degree.
    """
    sinks = -(-num_sink_tokens // block_size) * block_size
    shape = {"block_size": block_size, "vocab_size": VOCAB_SIZE, "detail": DETAIL}
    gap = sinks if kind == "self" else None  # only self-speculation looks through the target's blocks with a gap
    target = target_type(num_blocks=num_blocks, num_sink_tokens=gap, **shape)
    blocks = BlockManager(num_blocks, block_size, prefix_caching=prefix_caching)

    def fixed(request: Request) -> int:
        own = request.params.num_draft_tokens
        return num_draft_tokens if own is None else min(own, num_draft_tokens)

    def separate(positions: Literal["in_cache", "absolute"]) -> ModelProposer:
        each = budget.num_cyclic_blocks(num_sink_tokens, window_size, block_size, num_draft_tokens)
        draft = draft_type(
            num_blocks=each * max_batch_size, num_sink_tokens=sinks, sinks_follow=positions == "in_cache", **shape
        )
        cache = CyclicView(
            draft,
            window_size=window_size,
            num_sink_tokens=num_sink_tokens,
            num_blocks_per_request=each,
            sink_positions=positions,
        )
        return ModelProposer(draft, cache)

    proposer: Proposer
    if kind == "plain":
        proposer = PlainProposer()
    elif kind == "ngram":
        proposer = NGramProposer(min_ngram=1, max_ngram=3)
    elif kind == "self":
        window = TargetWindow(blocks, window_size=window_size, num_sink_tokens=num_sink_tokens)
        proposer = ModelProposer(target, window)
    else:
        proposer = separate(kind)
    policy = FixedDrafts(draft_length or fixed)
    engine = Engine(
        target,
        blocks,
        Scheduler(blocks, max_batch_size=max_batch_size, max_num_tokens=max_num_tokens),
        max_seq_len=max_seq_len,
        max_draft_len=num_draft_tokens,
        eos_token_ids=[EOS],
        tokenizer=ToyTokenizer(),
    )
    engine.use(Drafting(policy, proposer))
    return engine


def request(token_ids: Sequence[int], name: str = "0", num_prompt_tokens: int | None = None, **params: Any) -> Request:
    """A sequence without an engine; by default all of its tokens are prompt."""
    sampling = SamplingParams(**params)
    return Request(
        request_id=name,
        params=sampling,
        seed=sampling.seed or 0,
        token_ids=list(token_ids),
        num_prompt_tokens=len(token_ids) if num_prompt_tokens is None else num_prompt_tokens,
        max_seq_len=MAX_SEQ_LEN,
        logits_processor=LogitsProcessor(sampling, token_ids, VOCAB_SIZE, [EOS]),
        detokenizer=Detokenizer(None, []),
        stop_token_ids=frozenset([EOS]),
    )


def run(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    after_step: Callable[[int], None] | None = None,
) -> list[RequestOutput]:
    """Serve all prompts, as requests "0", "1", ...; every owner's invariant is asserted after every step."""
    for index, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(str(index), prompt, param)
    final = drain(engine, after_step)
    return [final[str(index)] for index in range(len(prompts))]


def drain(engine: Engine, after_step: Callable[[int], None] | None = None) -> dict[str, RequestOutput]:
    """Step until nothing is left; the last output of each request."""
    final: dict[str, RequestOutput] = {}
    for number in range(MAX_STEPS):
        if not engine.has_unfinished_requests:
            break
        for output in engine.step():
            assert output.request_id not in final, "output after the last"
            if output.finished:
                final[output.request_id] = output
        check_integrity(engine)
        if after_step is not None:
            after_step(number)
    assert not engine.has_unfinished_requests, "the engine stands still"
    return final


def check_integrity(engine: Engine) -> None:
    """The engine's own check, and the draft's pool: constant for each running request, and empty when idle."""
    engine.check_integrity()
    cache = draft_cache(engine)
    if cache is None:
        return
    cache.blocks.check_integrity()
    running = {request.request_id for request in engine.scheduler.running}
    assert cache.blocks.owners <= running, "a draft cache outlives its request"
    assert cache.blocks.num_used_blocks == len(cache.blocks.owners) * cache.num_blocks_per_request
    assert cache.blocks.num_used_blocks <= engine.scheduler.max_batch_size * cache.num_blocks_per_request


def draft_cache(engine: Engine) -> CyclicView | None:
    """The caches of a separate draft model, if there is one."""
    cache = engine.drafting.proposer.cache if isinstance(engine.drafting.proposer, ModelProposer) else None
    return cache if isinstance(cache, CyclicView) else None


@dataclass(frozen=True)
class Expected:
    """What plain decoding gives."""

    token_ids: list[int]
    text: str
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: FinishReason
    stop_reason: int | str | None


def plain(
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    index: int = 0,
    seed: int | None = None,
    max_seq_len: int = MAX_SEQ_LEN,
    language: ToyRunner | None = None,
) -> Expected:
    """The oracle: one token at a time, from the law of the whole history, with the draws of its position.

    index: which of the n outputs. seed: stands for the fresh one of a request without a seed.
    """
    language = language or ToyRunner(vocab_size=VOCAB_SIZE, detail=DETAIL)
    seed = child_seed(params.seed if params.seed is not None else seed or 0, index)
    words = [spelling for word in params.bad_words for spelling in (word, " " + word)]
    bad_words = [ToyTokenizer().encode_plain(word) for word in words]
    eos = [] if params.ignore_eos else [EOS]
    processor = LogitsProcessor(params, prompt, VOCAB_SIZE, eos, bad_words)
    output: list[int] = []
    rows: list[torch.Tensor] = []
    while True:
        logits = language.next_logits([*prompt, *output])
        probs = processor.probs(logits[None], [])[0]  # [V]
        position = len(prompt) + len(output)
        if params.acceptance_rule == "coupled":
            token_id = sample_gumbel(probs, gumbel(seed, position, VOCAB_SIZE))
        else:
            token_id = sample(probs, uniform(seed, position, Purpose.SAMPLE))
        output.append(token_id)
        rows.append(logits)
        processor.append([token_id])
        end = _end(prompt, output, params, max_seq_len)
        if end is not None:
            reason, stop_reason, text = end
            return Expected(output, text, _logprobs(rows, output, params.logprobs), reason, stop_reason)


def _end(
    prompt: Sequence[int], output: list[int], params: SamplingParams, max_seq_len: int
) -> tuple[FinishReason, int | str | None, str] | None:
    """(finish_reason, stop_reason, text) if the output ends here; a stop string starts after min_tokens."""
    decode, last = ToyTokenizer().decode, output[-1]
    if len(output) >= params.min_tokens:
        if last in params.stop_token_ids or (last == EOS and not params.ignore_eos):
            return "stop", last if last in params.stop_token_ids else None, decode(output[:-1])
        text, first = decode(output), len(decode(output[: max(params.min_tokens - 1, 0)]))
        hits = [(text.find(stop, first), stop) for stop in params.stop if text.find(stop, first) >= 0]
        if hits:
            return "stop", min(hits)[1], text[: min(hits)[0]]
    if len(output) == params.max_tokens or len(prompt) + len(output) == max_seq_len:
        return "length", None, decode(output)
    return None


def _logprobs(rows: list[torch.Tensor], output: list[int], count: int | None) -> list[dict[int, Logprob]] | None:
    """The chosen token first, then the `count` most likely, by plain sorting."""
    if count is None:
        return None
    table = []
    for row, token_id in zip(rows, output, strict=True):
        total = math.log(sum(math.exp(value) for value in row.tolist()))
        ranked = sorted(((value - total, -i) for i, value in enumerate(row.tolist())), reverse=True)
        ranks = {-i: Logprob(value, rank) for rank, (value, i) in enumerate(ranked, 1)}
        table.append({token_id: ranks[token_id], **dict(list(ranks.items())[:count])})
    return table


def assert_equal(output: CompletionOutput, expected: Expected) -> None:
    """Tokens, text, log-probabilities and reasons, all of them."""
    assert output.token_ids == expected.token_ids
    assert output.text == expected.text
    assert (output.finish_reason, output.stop_reason, output.error) == (
        expected.finish_reason,
        expected.stop_reason,
        None,
    )
    assert (output.logprobs is None) == (expected.logprobs is None)
    for row, wanted in zip(output.logprobs or [], expected.logprobs or [], strict=True):
        assert list(row) == list(wanted)
        for token_id, entry in row.items():
            assert entry.rank == wanted[token_id].rank
            assert math.isclose(entry.logprob, wanted[token_id].logprob, abs_tol=1e-9)
