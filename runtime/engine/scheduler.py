"""Who runs in the next step, with how many prompt tokens and how many draft tokens each."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from magicdec.runtime.engine.block_manager import BlockManager
from magicdec.runtime.engine.request import Request, RequestStatus


class DraftChoice(NamedTuple):
    """How many tokens to draft for a request in the next step, and which of the engine's proposers is to do it."""

    num_tokens: int
    proposer: int = 0


class DraftPolicy(Protocol):
    """Decides how much is drafted. It may look at committed tokens and at time, never at uncommitted drafts."""

    def choose(self, decoding: Sequence[Request], *, beside_prompts: bool) -> Sequence[DraftChoice]:
        """Choose for each of the requests that may draft in the next step. beside_prompts: it reads prompts as well."""
        ...


class FixedDrafts:
    """A `DraftPolicy` by a fixed rule for each request."""

    def __init__(self, length: Callable[[Request], int]) -> None:
        self.length = length

    def choose(self, decoding: Sequence[Request], *, beside_prompts: bool) -> list[DraftChoice]:  # noqa: ARG002
        """What the rule says, from the first proposer."""
        return [DraftChoice(self.length(request)) for request in decoding]


@dataclass(slots=True)  # not frozen, which would make it several times as slow to make
class ScheduledRequest:
    """One request's share of a step: rows num_computed_tokens .. + num_tokens of it, and then its drafts."""

    request: Request
    num_tokens: int  # committed tokens that the target reads in this step
    num_draft_tokens: int  # 0 = plain decoding, or a prompt chunk
    proposer: int = 0  # which of the engine's proposers makes them

    @property
    def choice(self) -> DraftChoice:
        """What is left of the policy's choice, where budget or blocks were short."""
        return DraftChoice(self.num_draft_tokens, self.proposer)

    @property
    def completes(self) -> bool:
        """Whether the last committed token is read, so that a next token can be chosen."""
        return self.num_tokens == self.request.num_pending_tokens


@dataclass(frozen=True)
class SchedulerOutput:
    """All requests of one step, decoding ones first, and those that had to give up their blocks."""

    scheduled: tuple[ScheduledRequest, ...]
    preempted: tuple[Request, ...]


class Scheduler:
    """First come, first served, in-flight: requests join and leave at every step.

    Decoding rows are taken first, so that a long prompt never stalls them; prompts fill the rest of the token budget
    in chunks. A request is admitted when its whole prompt fits in free blocks. When blocks run out, drafts are
    dropped first, and then the youngest request is preempted: it waits again, keeps its output tokens, and is
    recomputed later.
    """

    def __init__(self, blocks: BlockManager, *, max_batch_size: int, max_num_tokens: int) -> None:
        self.blocks = blocks
        self.max_batch_size = max_batch_size
        self.max_num_tokens = max_num_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in order of admission; the last one is the youngest

    def add(self, request: Request) -> None:
        """Queue a new request."""
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Forget a request, wherever it is, and free its blocks."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        if self.blocks.owns(request.request_id):
            self.blocks.free(request.request_id)

    def schedule(self, policy: DraftPolicy, now: float) -> SchedulerOutput:
        """Plan the next step. now: by the engine's clock, in seconds."""
        budget = self.max_num_tokens
        scheduled: list[ScheduledRequest] = []
        preempted: list[Request] = []
        decoding = [request for request in self.running if request.num_pending_tokens == 1]
        choices = policy.choose(decoding, beside_prompts=len(decoding) < len(self.running))
        for index, (request, choice) in enumerate(zip(decoding, choices, strict=True)):
            if request.status is not RequestStatus.RUNNING:
                continue  # preempted for the sake of an older one, in this loop
            room = budget - (len(decoding) - index - 1)  # leave a row for each of the others
            entry = self._schedule_decode(request, choice, room, preempted)
            if entry is not None:
                scheduled.append(entry)
                budget -= entry.num_tokens + entry.num_draft_tokens
        if not preempted:
            self._admit(now)
        taken = set(decoding)
        for request in [request for request in self.running if request not in taken]:
            chunk = min(budget, request.num_pending_tokens)
            if chunk > 0:
                scheduled.append(ScheduledRequest(request, chunk, 0))
                budget -= chunk
        return SchedulerOutput(tuple(scheduled), tuple(preempted))

    def _schedule_decode(
        self, request: Request, choice: DraftChoice, room: int, preempted: list[Request]
    ) -> ScheduledRequest | None:
        """Get slots for the pending token and its drafts; without drafts if need be; by preemption if that fails."""
        drafts = max(0, min(choice.num_tokens, request.num_tokens_left - 1, room - 1))
        if self.blocks.extend(request.request_id, len(request.token_ids) + drafts):
            return ScheduledRequest(request, 1, drafts, choice.proposer)
        while not self.blocks.extend(request.request_id, len(request.token_ids)):
            youngest = self.running[-1]
            self._preempt(youngest)
            preempted.append(youngest)
            if youngest is request:
                return None
        return ScheduledRequest(request, 1, 0)

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self.blocks.free(request.request_id)
        request.preempt()
        self.waiting.appendleft(request)

    def _admit(self, now: float) -> None:
        """Move waiting requests into the batch while slots and blocks last; a sibling of a prompt in work waits."""
        for request in list(self.waiting):
            if len(self.running) >= self.max_batch_size:
                return
            if request.shares_prompt_soon:
                continue
            reused = self.blocks.allocate(request.request_id, request.token_ids, len(request.token_ids))
            if reused is None:
                return
            self.waiting.remove(request)
            request.admit(reused, now)
            self.running.append(request)
