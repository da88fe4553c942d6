"""The Python interface: load a pair, generate."""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import torch
from pydantic import ValidationError

from magicdec.errors import EngineError, RequestError
from magicdec.pair.config import DrafterChoice, PairConfig
from magicdec.pair.manifest import load_engine, load_pair
from magicdec.pair.memory import default_kv_cache_tokens, weight_bytes
from magicdec.runtime.drafting.controller import DraftController
from magicdec.runtime.drafting.cost_model import CostPrior
from magicdec.runtime.drafting.model_proposer import ModelProposer
from magicdec.runtime.drafting.ngram import NGramProposer
from magicdec.runtime.drafting.switch import Drafters
from magicdec.runtime.drafting.views import CyclicDraftCache, TargetWindow
from magicdec.runtime.engine.block_manager import BlockManager
from magicdec.runtime.engine.device_acceptance import kernel_acceptance
from magicdec.runtime.engine.engine import Engine
from magicdec.runtime.engine.proposer import Proposer
from magicdec.runtime.engine.request import Request
from magicdec.runtime.engine.scheduler import DraftPolicy, FixedDrafts, Scheduler
from magicdec.runtime.outputs import RequestOutput
from magicdec.runtime.parallel.leader import join_ranks
from magicdec.runtime.parallel.mpi import check_num_ranks
from magicdec.runtime.runners.interface import OpenRunner
from magicdec.runtime.runners.opening import RunnerSpec, default_device, open_over, open_runner
from magicdec.runtime.runners.torch_runner import DTYPES
from magicdec.runtime.sampling_params import SamplingParams
from magicdec.runtime.text.tokenizer import HFTokenizer

Prompt = str | Sequence[int]
# Called after every step with (request outputs that changed, prompt tokens computed, prompt tokens in all).
OnProgress = Callable[[Sequence[RequestOutput], int, int], None]


class LLM:
    """A built pair, ready to generate.

    Options override what the pair was built with: max_batch_size, max_num_tokens (rows of one target pass),
    max_seq_len (at most the built one), num_draft_tokens (0 = plain decoding, at most the built max_draft_len, "auto" =
    chosen at each step), drafter ("own" or, with num_draft_tokens "auto", "auto" = the best of all that the pair has),
    window_size (self-speculation only), kv_cache_tokens (size of the target's cache; by default what max_batch_size
    sequences of max_seq_len need, within half of the free memory), dtype (PyTorch only) and device of the
    computation (by default "cpu" for PyTorch and "cuda" for TensorRT-LLM).

    Under `mpiexec -n N` only rank 0 gets an LLM. On the other ranks this call serves rank 0, ignoring its arguments,
    and then leaves the process by SystemExit: code behind it runs on rank 0 alone.
    """

    def __init__(
        self,
        engine_dir: str | Path,
        *,
        max_batch_size: int | None = None,
        max_num_tokens: int | None = None,
        max_seq_len: int | None = None,
        num_draft_tokens: int | Literal["auto"] | None = None,
        drafter: DrafterChoice | None = None,
        window_size: int | None = None,
        kv_cache_tokens: int | None = None,
        dtype: str | None = None,
        device: str | None = None,
    ) -> None:
        join_ranks()
        directory = Path(engine_dir)
        built = load_pair(directory).config
        self.config = _override(
            built,
            max_batch_size=max_batch_size,
            max_num_tokens=max_num_tokens,
            max_seq_len=max_seq_len,
            num_draft_tokens=num_draft_tokens,
            drafter=drafter,
            window_size=window_size,
        )
        if dtype is not None and dtype not in DTYPES:
            raise EngineError(f"dtype={dtype!r} is not known; use one of {', '.join(DTYPES)}")
        compute = None if dtype is None else DTYPES[dtype]
        config, manifest = self.config, load_engine(directory / "target")
        self._leader = join_ranks(manifest.tp_size)
        check_num_ranks(manifest.tp_size, self._leader.ranks.size if self._leader else 1, directory)
        self.tokenizer = HFTokenizer(directory / "target")
        device = device or default_device(directory / "target")
        kv_dtype = "fp8" if config.resolved_kv_cache_dtype == "fp8" else dtype or config.dtype
        num_blocks = _num_target_blocks(directory / "target", config, kv_cache_tokens, kv_dtype, device)
        self.runner = self._open(RunnerSpec(directory / "target", num_blocks, config.block_size, compute, device))
        blocks = BlockManager(num_blocks, config.block_size, prefix_caching=True)
        self.draft_runner: OpenRunner | None = None
        self._target_weight_bytes = weight_bytes(directory / "target")
        self._draft_weight_bytes = weight_bytes(directory / "draft")
        self._blocks, self._own = blocks, self._proposer(directory, blocks, compute, device)
        policy, proposer, controller = self._drafting()
        scheduler = Scheduler(
            blocks,
            policy,
            max_batch_size=config.max_batch_size,
            max_num_tokens=config.max_num_tokens,
        )
        self.engine = Engine(
            self.runner,
            blocks,
            scheduler,
            proposer,
            max_seq_len=config.max_seq_len,
            max_draft_len=config.draft.max_draft_len,
            eos_token_ids=manifest.eos_token_ids,
            tokenizer=self.tokenizer,
            device_acceptance=kernel_acceptance(device),
            controller=controller,
        )
        self._ids = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_progress: OnProgress | None = None,
    ) -> list[RequestOutput]:
        """Answer one or many prompts (text or token ids); outputs come in the order of the prompts."""
        batch = _as_batch(prompts)
        params = _as_params(sampling_params, len(batch))
        names = self._add_all(batch, params)
        final: dict[str, RequestOutput] = {}
        try:
            while self.engine.has_unfinished_requests and len(final) < len(names):
                outputs = self.engine.step()
                final.update({out.request_id: out for out in outputs if out.finished and out.request_id in names})
                if on_progress is not None:
                    on_progress(outputs, *self.engine.prompt_progress())
        finally:
            for name in names:
                self.engine.abort(name)
        return [final[name] for name in names]

    def generate_stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, on_progress: OnProgress | None = None
    ) -> Iterator[RequestOutput]:
        """Answer one prompt step by step; each output holds all text so far. Closing the iterator aborts."""
        (name,) = self._add_all([prompt], [sampling_params or SamplingParams()])
        try:
            while self.engine.has_unfinished_requests:
                outputs = self.engine.step()
                if on_progress is not None:
                    on_progress(outputs, *self.engine.prompt_progress())
                mine = [out for out in outputs if out.request_id == name]
                yield from mine
                if any(out.finished for out in mine):
                    return
        finally:
            self.engine.abort(name)

    def chat_prompt(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of a conversation by the model's chat template, to be passed to `generate`."""
        return self.tokenizer.encode_chat(messages)

    def memory(self) -> dict[str, int]:
        """Bytes of the KV pools as allocated, of one token and one draft; and of a draft's own weights as built."""
        target, draft = self.runner.kv_bytes, self.draft_runner
        return {
            "target_kv_bytes": target,
            "target_kv_bytes_per_token": target // (self.runner.num_blocks * self.runner.block_size),
            "draft_weight_bytes": self._draft_weight_bytes,
            "draft_kv_bytes": draft.kv_bytes if draft else 0,
            "draft_kv_bytes_per_request": draft.kv_bytes // self.config.max_batch_size if draft else 0,
        }

    def auto_drafting(self, *, every: bool) -> tuple[Drafters, DraftController]:
        """A new controller of draft lengths, and what it chooses from: the pair's own drafter, or every one it has."""
        proposers = self._all_proposers() if every else [self._own]
        controller = DraftController(self.config.draft.max_draft_len, self._cost_prior(proposers))
        return Drafters(proposers, controller.drafted, time.perf_counter), controller

    def _open(self, spec: RunnerSpec) -> OpenRunner:
        """On as many ranks as the engine was built for; a draft may have fewer than its target."""
        return open_runner(spec) if self._leader is None else self._leader.open(spec)

    def _drafting(self) -> tuple[DraftPolicy, Proposer, DraftController | None]:
        """How much is drafted and by whom: fixed, or decided step by step by a controller."""
        length = self.config.draft.num_draft_tokens
        if length == "auto":
            drafters, controller = self.auto_drafting(every=self.config.draft.drafter == "auto")
            return controller, drafters, controller

        def fixed(request: Request) -> int:
            asked = request.params.num_draft_tokens
            return length if asked is None else asked

        return FixedDrafts(fixed), self._own, None

    def _cost_prior(self, proposers: Sequence[Proposer]) -> CostPrior:
        """What passes read, by the sizes of weights and caches."""
        memory, weights = self.memory(), self._target_weight_bytes
        per_token = memory["target_kv_bytes_per_token"]
        window = memory["draft_kv_bytes_per_request"] or self.config.draft_budget * per_token

        def draft(proposer: Proposer) -> float | None:
            if not isinstance(proposer, ModelProposer):
                return None
            return 1.0 if proposer.runner is self.runner else self._draft_weight_bytes / weights

        return CostPrior(per_token / weights, tuple(map(draft, proposers)), window / weights)

    def _all_proposers(self) -> list[Proposer]:
        """The pair's own drafter, and what any pair can draft with besides."""
        draft, proposers = self.config.draft, [self._own]
        if self.config.backend == "torch" and (draft.kind != "self" or self.config.has_draft_weights):
            proposers.append(ModelProposer(self.runner, self._window(self._blocks)))
        if draft.kind != "ngram":
            proposers.append(self._lookup())
        return proposers

    def _window(self, blocks: BlockManager) -> TargetWindow:
        draft = self.config.draft
        return TargetWindow(blocks, window_size=draft.window_size, num_sink_tokens=draft.num_sink_tokens)

    def _lookup(self) -> NGramProposer:
        draft = self.config.draft
        return NGramProposer(self.runner.vocab_size, min_ngram=draft.ngram_min, max_ngram=draft.ngram_max)

    def _proposer(self, directory: Path, blocks: BlockManager, dtype: torch.dtype | None, device: str) -> Proposer:
        draft, size = self.config.draft, self.config.block_size
        if draft.kind == "ngram":
            return self._lookup()
        if draft.kind == "self":
            if self.config.has_draft_weights:
                self.draft_runner = open_over(self.runner, directory / "draft")
            return ModelProposer(self.draft_runner or self.runner, self._window(blocks))
        each = self.config.draft_budget // size
        runner = self._open(RunnerSpec(directory / "draft", each * self.config.max_batch_size, size, dtype, device))
        if runner.vocab_size != self.runner.vocab_size:
            raise EngineError(
                f"the draft has {runner.vocab_size} token ids and the target {self.runner.vocab_size}; "
                "build the pair again from checkpoints that share a tokenizer"
            )
        self.draft_runner = runner
        cache = CyclicDraftCache(
            runner,
            window_size=draft.window_size,
            num_sink_tokens=draft.num_sink_tokens,
            num_blocks_per_request=each,
            sink_positions=draft.resolved_sink_positions,
        )
        return ModelProposer(runner, cache)

    def _add_all(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> list[str]:
        """Queue all prompts, or none if one of them is refused."""
        names: list[str] = []
        for index, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
            name = str(next(self._ids))
            text = prompt if isinstance(prompt, str) else None
            ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
            try:
                self.engine.add_request(name, ids, param, prompt=text)
            except RequestError as error:
                for added in names:
                    self.engine.abort(added)
                raise RequestError(f"prompt {index}: {error}") from error
            names.append(name)
        return names


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _as_params(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise RequestError(f"{len(params)} sampling_params for {count} prompts; give one, or one for each prompt")
    return list(params)


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
