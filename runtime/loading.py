"""Loading a pair: the wiring of its parts, done once and never changed."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import ValidationError

from magicdec.errors import EngineError
from magicdec.pair.config import PairConfig
from magicdec.pair.manifest import load_engine, load_pair
from magicdec.pair.memory import default_kv_cache_tokens, weight_bytes
from magicdec.plugins.dtypes import TORCH_DTYPES
from magicdec.runtime.drafting.controller import DraftController
from magicdec.runtime.drafting.cost_model import CostPrior
from magicdec.runtime.drafting.model_proposer import ModelProposer
from magicdec.runtime.drafting.ngram import NGramProposer
from magicdec.runtime.drafting.switch import controlled
from magicdec.runtime.drafting.views import CyclicView, TargetWindow
from magicdec.runtime.engine.block_manager import BlockManager
from magicdec.runtime.engine.device_acceptance import kernel_acceptance
from magicdec.runtime.engine.drafting import Drafting
from magicdec.runtime.engine.engine import Engine
from magicdec.runtime.engine.proposer import Proposer
from magicdec.runtime.engine.request import Request
from magicdec.runtime.engine.scheduler import FixedDrafts, Scheduler
from magicdec.runtime.parallel.leader import Leader, join_ranks
from magicdec.runtime.parallel.mpi import check_num_ranks
from magicdec.runtime.runners.interface import OpenRunner
from magicdec.runtime.runners.opening import RunnerSpec, default_device, open_over, open_runner
from magicdec.runtime.text.tokenizer import HFTokenizer


@dataclass(frozen=True)
class Loaded:
    """A pair in memory.

    config: as built, with the caller's options. draft_runner: None where the draft is the target itself, or no model.
    own: what drafts as the pair's kind says. Weights in bytes, over all ranks; 0 for a draft that has none.
    """

    config: PairConfig
    tokenizer: HFTokenizer
    runner: OpenRunner
    draft_runner: OpenRunner | None
    blocks: BlockManager
    own: Proposer
    engine: Engine
    target_weight_bytes: int
    draft_weight_bytes: int

    def memory(self) -> dict[str, int]:
        """Bytes of the KV pools as allocated, of one token and one draft; and of a draft's own weights as built."""
        target, draft = self.runner.kv_bytes, self.draft_runner
        return {
            "target_kv_bytes": target,
            "target_kv_bytes_per_token": target // (self.runner.num_blocks * self.runner.block_size),
            "draft_weight_bytes": self.draft_weight_bytes,
            "draft_kv_bytes": draft.kv_bytes if draft else 0,
            "draft_kv_bytes_per_request": draft.kv_bytes // self.config.max_batch_size if draft else 0,
        }

    def drafting(self) -> Drafting:
        """How the pair drafts as configured: a fixed number of drafts, or what a controller decides step by step."""
        length = self.config.draft.num_draft_tokens
        if length == "auto":
            return self.auto_drafting(every=self.config.draft.drafter == "auto")

        def fixed(request: Request) -> int:
            asked = request.params.num_draft_tokens
            return length if asked is None else asked

        return Drafting(FixedDrafts(fixed), self.own)

    def auto_drafting(self, *, every: bool) -> Drafting:
        """Drafting under a new controller, by the pair's own proposer, or by every one that it has."""
        proposers = self._all_proposers() if every else [self.own]
        controller = DraftController(self.config.draft.max_draft_len, self._cost_prior(proposers))
        return controlled(controller, proposers, time.perf_counter)

    def _all_proposers(self) -> list[Proposer]:
        """The pair's own, and what any pair can draft with besides."""
        config, proposers = self.config, [self.own]
        if config.backend == "torch" and (config.draft.kind != "self" or config.has_draft_weights):
            proposers.append(ModelProposer(self.runner, _window(config, self.blocks)))
        if config.draft.kind != "ngram":
            proposers.append(_lookup(config))
        return proposers

    def _cost_prior(self, proposers: Sequence[Proposer]) -> CostPrior:
        """What passes read, by the sizes of weights and caches."""
        memory, weights = self.memory(), self.target_weight_bytes
        per_token = memory["target_kv_bytes_per_token"]
        window = memory["draft_kv_bytes_per_request"] or self.config.draft_budget * per_token

        def draft(proposer: Proposer) -> float | None:
            if not isinstance(proposer, ModelProposer):
                return None
            return 1.0 if proposer.runner is self.runner else self.draft_weight_bytes / weights

        return CostPrior(per_token / weights, tuple(map(draft, proposers)), window / weights)


def load(
    directory: Path, *, kv_cache_tokens: int | None, dtype: str | None, device: str | None, **options: int | str | None
) -> Loaded:
    """Open the models of a pair and wire an engine that drafts as configured; see `LLM` for the options.

    Under a launcher of several processes this returns on rank 0 alone.
    """
    join_ranks()
    config = _override(load_pair(directory).config, **options)
    if dtype is not None and dtype not in TORCH_DTYPES:
        raise EngineError(f"dtype={dtype!r} is not known; use one of {', '.join(TORCH_DTYPES)}")
    compute, target = None if dtype is None else TORCH_DTYPES[dtype], directory / "target"
    manifest = load_engine(target)
    leader = join_ranks(manifest.tp_size)
    check_num_ranks(manifest.tp_size, leader.ranks.size if leader else 1, directory)
    tokenizer, device = HFTokenizer(target), device or default_device(target)
    kv_dtype = "fp8" if config.resolved_kv_cache_dtype == "fp8" else dtype or config.dtype
    num_blocks = _num_target_blocks(target, config, kv_cache_tokens, kv_dtype, device)
    runner = _open(leader, RunnerSpec(target, num_blocks, config.block_size, compute, device))
    blocks = BlockManager(num_blocks, config.block_size, prefix_caching=True)
    draft_runner, own = _own_drafts(directory, config, leader, runner, blocks, compute, device)
    engine = Engine(
        runner,
        blocks,
        Scheduler(blocks, max_batch_size=config.max_batch_size, max_num_tokens=config.max_num_tokens),
        max_seq_len=config.max_seq_len,
        max_draft_len=config.draft.max_draft_len,
        eos_token_ids=manifest.eos_token_ids,
        tokenizer=tokenizer,
        device_acceptance=kernel_acceptance(device),
    )
    weights = weight_bytes(target), weight_bytes(directory / "draft")
    loaded = Loaded(config, tokenizer, runner, draft_runner, blocks, own, engine, *weights)
    engine.use(loaded.drafting())
    return loaded


def _open(leader: Leader | None, spec: RunnerSpec) -> OpenRunner:
    """On as many ranks as the engine was built for; a draft may have fewer than its target."""
    return open_runner(spec) if leader is None else leader.open(spec)


def _own_drafts(
    directory: Path,
    config: PairConfig,
    leader: Leader | None,
    target: OpenRunner,
    blocks: BlockManager,
    dtype: torch.dtype | None,
    device: str,
) -> tuple[OpenRunner | None, Proposer]:
    """The draft's own runner, if it has one, and what drafts as the pair's kind says."""
    draft, size = config.draft, config.block_size
    if draft.kind == "ngram":
        return None, _lookup(config)
    if draft.kind == "self":
        other = open_over(target, directory / "draft") if config.has_draft_weights else None
        return other, ModelProposer(other or target, _window(config, blocks))
    each = config.draft_budget // size
    runner = _open(leader, RunnerSpec(directory / "draft", each * config.max_batch_size, size, dtype, device))
    if runner.vocab_size != target.vocab_size:
        raise EngineError(
            f"the draft has {runner.vocab_size} token ids and the target {target.vocab_size}; "
            "build the pair again from checkpoints that share a tokenizer"
        )
    view = CyclicView(
        runner,
        window_size=draft.window_size,
        num_sink_tokens=draft.num_sink_tokens,
        num_blocks_per_request=each,
        sink_positions=draft.resolved_sink_positions,
    )
    return runner, ModelProposer(runner, view)


def _window(config: PairConfig, blocks: BlockManager) -> TargetWindow:
    draft = config.draft
    return TargetWindow(blocks, window_size=draft.window_size, num_sink_tokens=draft.num_sink_tokens)


def _lookup(config: PairConfig) -> NGramProposer:
    return NGramProposer(min_ngram=config.draft.ngram_min, max_ngram=config.draft.ngram_max)


def _override(built: PairConfig, **options: int | str | None) -> PairConfig:
    """The built configuration with the caller's options, checked as a configuration file is."""
    given = {name: value for name, value in options.items() if value is not None}
    if "window_size" in given and built.draft.kind != "self":
        raise EngineError(
            f"window_size={given['window_size']} can be chosen at run time in self-speculation only; this pair's "
            f"draft is {built.draft.kind!r}: build it with another window_size"
        )
    if int(given.get("max_seq_len", 0)) > built.max_seq_len:
        raise EngineError(
            f"max_seq_len={given['max_seq_len']} is more than the {built.max_seq_len} that the pair was built with; "
            "build it again with a larger max_seq_len"
        )
    draft = {name: given.pop(name) for name in ("num_draft_tokens", "drafter", "window_size") if name in given}
    data = built.model_dump()
    data.update(given)
    data["draft"].update(draft)
    try:
        return PairConfig.model_validate(data)
    except ValidationError as error:
        reasons = "; ".join(detail["msg"] for detail in error.errors())
        raise EngineError(f"options {given | draft} do not fit this pair: {reasons}") from error


def _num_target_blocks(
    directory: Path, config: PairConfig, kv_cache_tokens: int | None, dtype: str, device: str
) -> int:
    tokens = kv_cache_tokens
    if tokens is None:
        tokens = default_kv_cache_tokens(directory, config, dtype, device)
    if tokens < config.block_size:
        raise EngineError(
            f"kv_cache_tokens={tokens} is less than one block of {config.block_size}; give at least "
            f"{config.block_size}, better a multiple of max_seq_len"
        )
    return tokens // config.block_size
