"""The engine: one step is schedule, propose, score, accept, commit."""

import itertools
import time
from collections.abc import Callable, Sequence

import torch

from magicdec.errors import EngineError, RequestError
from magicdec.runtime.engine.admission import CheckedRequest, check_request, check_token_ids, id_in_use
from magicdec.runtime.engine.block_manager import BlockManager
from magicdec.runtime.engine.block_tables import pack_views
from magicdec.runtime.engine.device_acceptance import DeviceAcceptance
from magicdec.runtime.engine.drafting import PLAIN, Drafting, Round, StepListener
from magicdec.runtime.engine.request import Request, RequestGroup
from magicdec.runtime.engine.sampler import Span, verify_all
from magicdec.runtime.engine.scheduler import ScheduledRequest, Scheduler, SchedulerOutput
from magicdec.runtime.outputs import Logprob, RequestOutput
from magicdec.runtime.runners.interface import ModelRunner
from magicdec.runtime.sampling.acceptance import VerifyOutput
from magicdec.runtime.sampling.draft import Draft
from magicdec.runtime.sampling.draws import child_seed, fresh_seed
from magicdec.runtime.sampling.logits import LogitsProcessor
from magicdec.runtime.sampling_params import SamplingParams
from magicdec.runtime.text.detokenizer import Detokenizer
from magicdec.runtime.text.tokenizer import Tokenizer

Verdict = VerifyOutput | RequestError | None


class Engine:
    """Draft-target decoding of many requests at once, in-flight. Not thread-safe: one owner calls it.

    It decodes plainly until `use` tells it how to draft.
    """

    def __init__(
        self,
        runner: ModelRunner,
        blocks: BlockManager,
        scheduler: Scheduler,
        *,
        max_seq_len: int,
        max_draft_len: int,
        eos_token_ids: Sequence[int],
        tokenizer: Tokenizer | None = None,
        device_acceptance: DeviceAcceptance | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if scheduler.max_num_tokens < scheduler.max_batch_size:
            raise EngineError(
                f"max_num_tokens={scheduler.max_num_tokens} is less than max_batch_size={scheduler.max_batch_size}: "
                "a step could not hold one token of each request; raise the one or lower the other"
            )
        self.runner = runner
        self.blocks = blocks
        self.scheduler = scheduler
        self.drafting = PLAIN  # until `use`
        self.max_seq_len = max_seq_len
        self.max_draft_len = max_draft_len
        self.eos_token_ids = list(eos_token_ids)
        self.tokenizer = tokenizer
        self.device_acceptance = device_acceptance  # None: every request is decided by `sampler.verify_all`
        self._clock = clock
        self._groups: dict[str, RequestGroup] = {}
        self._group_of: dict[Request, RequestGroup] = {}

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether a step has anything to do."""
        return bool(self.scheduler.running or self.scheduler.waiting)

    def step(self) -> list[RequestOutput]:
        """Advance every scheduled request by a prompt chunk or by one token and its accepted drafts."""
        start = self._clock()
        plan = self._schedule(start)
        if not plan.scheduled:
            return []
        drafts = self.drafting.proposer.propose(plan.scheduled)
        logits, spans = self._score(plan.scheduled, drafts)
        verdicts = self._accept(plan.scheduled, drafts, logits, spans)
        outputs = self._commit(plan.scheduled, drafts, logits, spans, verdicts)
        if self.drafting.listener is not None:
            self._tell(self.drafting.listener, plan.scheduled, drafts, verdicts, self._clock() - start)
        return outputs

    def use(self, drafting: Drafting) -> Drafting:
        """Draft in this way from the next step on; returns the former way, which holds nothing any more."""
        former = self.drafting
        for request in self._group_of:
            former.proposer.release(request)
            if former.listener is not None:
                former.listener.release(request)
        self.drafting = drafting
        return former

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        prompt: str | None = None,
    ) -> None:
        """`check` and `add` in one."""
        self.add(request_id, self.check(prompt_token_ids, params, prompt))

    def add(self, request_id: str, checked: CheckedRequest) -> None:
        """Queue a request that `check` let pass; RequestError, with nothing changed, if its id is in use."""
        if request_id in self._groups:
            raise id_in_use(request_id)
        params, prompt_token_ids = checked.params, checked.prompt_token_ids
        bad_words = self._encode_bad_words(params)
        seed = fresh_seed() if params.seed is None else params.seed
        requests: list[Request] = []
        for index in range(params.n):
            leader = requests[0] if requests and self.blocks.prefix_caching else None
            requests.append(self._new_request(request_id, index, prompt_token_ids, params, seed, bad_words, leader))
        group = RequestGroup(request_id, checked.prompt, list(prompt_token_ids), requests)
        self._groups[request_id] = group
        for request in requests:
            self._group_of[request] = group
            self.scheduler.add(request)

    def check(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, prompt: str | None = None
    ) -> CheckedRequest:
        """RequestError if this engine can never serve such a request; any thread may ask, since only limits count.

        prompt: the text that the token ids stand for, to be repeated in the outputs.
        """
        return check_request(
            CheckedRequest(prompt_token_ids, params, prompt),
            vocab_size=self.runner.vocab_size,
            max_seq_len=self.max_seq_len,
            max_draft_len=self.max_draft_len,
            max_kv_tokens=self.blocks.num_blocks * self.blocks.block_size,
            has_tokenizer=self.tokenizer is not None,
        )

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now and free all that it holds; None if there is no such request."""
        group = self._groups.get(request_id)
        if group is None:
            return None
        for request in group.requests:
            if not request.is_finished:
                request.finish("abort")
                self._retire(request)
                if self.drafting.listener is not None:
                    self.drafting.listener.release(request)
        del self._groups[request_id]
        return group.output()

    def prompt_progress(self) -> tuple[int, int]:
        """(computed, in all) tokens of the prompts that are not yet read, over all open requests."""
        reading = [r for r in self._group_of if r.num_output_tokens == 0]
        return sum(r.num_computed_tokens for r in reading), sum(r.num_prompt_tokens for r in reading)

    def check_integrity(self) -> None:
        """Assert every owner's invariant; when the engine is idle, that nothing is held any more."""
        self.blocks.check_integrity()
        if not self.has_unfinished_requests:
            assert self.blocks.num_used_blocks == 0, "an idle engine holds blocks"
            assert not self._groups, "an idle engine holds requests"
            assert not self._group_of, "an idle engine holds sequences"

    def _schedule(self, now: float) -> SchedulerOutput:
        plan = self.scheduler.schedule(self.drafting.policy, now)
        for request in plan.preempted:
            self.drafting.proposer.release(request)
        return plan

    def _score(self, scheduled: Sequence[ScheduledRequest], drafts: Sequence[Draft]) -> tuple[torch.Tensor, list[Span]]:
        """One packed target pass: verify rows, plain rows and prompt chunks.

        Returns the logits [N, V], and for each request which rows are its k + 1 (none for a chunk of a prompt).
        """
        starts = [entry.request.num_computed_tokens for entry in scheduled]
        token_ids: list[list[int]] = []
        wanted: list[int] = []  # rows of logits
        for entry, start, draft in zip(scheduled, starts, drafts, strict=True):
            token_ids.append([*entry.request.token_ids[start : start + entry.num_tokens], *draft.token_ids])
            wanted.append(1 + len(draft.token_ids) if entry.completes else 0)
        tables = self.blocks.tables([entry.request.request_id for entry in scheduled])
        logits = self.runner.forward(pack_views(tables, token_ids, starts, wanted))
        return logits, list(itertools.pairwise([0, *itertools.accumulate(wanted)]))

    def _accept(
        self,
        scheduled: Sequence[ScheduledRequest],
        drafts: Sequence[Draft],
        logits: torch.Tensor,
        spans: Sequence[Span],
    ) -> list[Verdict]:
        """Exact acceptance, for each request; None for a chunk of a prompt, an error for one that cannot be decided."""
        requests = [entry.request for entry in scheduled]
        verdicts: list[Verdict] = [None] * len(scheduled)
        if self.device_acceptance is not None:
            rows = [logits[start:stop] for start, stop in spans]
            verdicts = [*self.device_acceptance.verify(requests, rows, drafts)]
        undecided = [i for i, (start, stop) in enumerate(spans) if start < stop and verdicts[i] is None]
        decided = verify_all(
            [requests[i] for i in undecided], logits, [spans[i] for i in undecided], [drafts[i] for i in undecided]
        )
        for i, verdict in zip(undecided, decided, strict=True):
            verdicts[i] = verdict
        return verdicts

    def _commit(
        self,
        scheduled: Sequence[ScheduledRequest],
        drafts: Sequence[Draft],
        logits: torch.Tensor,
        spans: Sequence[Span],
        verdicts: Sequence[Verdict],
    ) -> list[RequestOutput]:
        """What a step came to: tokens appended up to the end condition, lengths set, blocks published or freed."""
        changed: dict[str, RequestGroup] = {}
        now = self._clock()
        for entry, draft, (first, _), verdict in zip(scheduled, drafts, spans, verdicts, strict=True):
            request = entry.request
            if verdict is None:
                request.advance(entry.num_tokens)
            elif isinstance(verdict, RequestError):
                request.finish("error", error=str(verdict))
            else:
                logprobs = self._logprobs(request, logits, first, verdict)
                request.commit(verdict.token_ids, logprobs, len(draft.token_ids), now)
            if request.error is None:  # what a failed step computed may be what failed
                self.blocks.publish(request.request_id, request.token_ids, request.num_computed_tokens)
            if verdict is not None or request.is_finished:
                group = self._group_of[request]
                changed[group.request_id] = group
            if request.is_finished:
                self._retire(request)
        return [self._report(group) for group in changed.values()]

    def _logprobs(
        self, request: Request, logits: torch.Tensor, first: int, verdict: VerifyOutput
    ) -> list[dict[int, Logprob]]:
        """Of the tokens that were chosen. logits: of the whole step; the request's rows begin at `first`."""
        if request.logprobs is None:
            return []
        rows = logits[first : first + len(verdict.token_ids)]
        return request.logits_processor.logprobs(rows, verdict.token_ids)

    def _tell(
        self,
        listener: StepListener,
        scheduled: Sequence[ScheduledRequest],
        drafts: Sequence[Draft],
        verdicts: Sequence[Verdict],
        seconds: float,
    ) -> None:
        """What became of the step's drafts. A prompt's last chunk is no round, nor is what could not be decided."""
        rounds = [
            Round(entry.request, entry.choice, len(draft.token_ids), out.num_accepted)
            for entry, draft, out in zip(scheduled, drafts, verdicts, strict=True)
            if isinstance(out, VerifyOutput) and entry.num_tokens == 1
        ]
        listener.stepped(rounds, seconds, with_prompts=len(rounds) < len(scheduled))
        for entry in scheduled:
            if entry.request.is_finished:
                listener.release(entry.request)

    def _report(self, group: RequestGroup) -> RequestOutput:
        output = group.output()
        if output.finished:
            del self._groups[group.request_id]
        return output

    def _retire(self, request: Request) -> None:
        """Free all that a finished request holds."""
        self.scheduler.remove(request)
        self.drafting.proposer.release(request)
        del self._group_of[request]

    def _new_request(
        self,
        request_id: str,
        index: int,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        seed: int,
        bad_words: list[list[int]],
        leader: Request | None,
    ) -> Request:
        eos = [] if params.ignore_eos else self.eos_token_ids
        tokenizer = self.tokenizer
        return Request(
            request_id=f"{request_id}#{index}",
            params=params,
            seed=child_seed(seed, index),
            token_ids=list(prompt_token_ids),
            num_prompt_tokens=len(prompt_token_ids),
            max_seq_len=self.max_seq_len,
            logits_processor=LogitsProcessor(params, prompt_token_ids, self.runner.vocab_size, eos, bad_words),
            detokenizer=Detokenizer(tokenizer.decode_stream if tokenizer else None, params.stop),
            stop_token_ids=frozenset(eos) | frozenset(params.stop_token_ids),
            leader=leader,
            arrival_time=self._clock(),
            logprobs=None if params.logprobs is None else [],
        )

    def _encode_bad_words(self, params: SamplingParams) -> list[list[int]]:
        """Every way that a bad word may be spelt: at the start of a word and inside one."""
        if not params.bad_words:
            return []
        assert self.tokenizer is not None
        spellings = [spelling for word in params.bad_words for spelling in (word, " " + word)]
        found = [ids for ids in map(self.tokenizer.encode_plain, spellings) if ids]
        for ids in found:
            check_token_ids("bad_words", ids, self.runner.vocab_size)
        return found
