"""One sequence that is being generated, and the group of the n sequences of one request."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from magicdec.runtime.outputs import (
    CompletionOutput,
    CompletionSnapshot,
    FinishReason,
    Logprob,
    RequestMetrics,
    RequestOutput,
    TokenOrigin,
    in_order,
    together,
)
from magicdec.runtime.sampling.logits import LogitsProcessor
from magicdec.runtime.sampling_params import SamplingParams
from magicdec.runtime.text.detokenizer import Detokenizer


class RequestStatus(Enum):
    """Where a request is; a preempted one waits again."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """A sequence: its committed tokens, and how many of them are computed.

    Its state changes by its own methods alone. The scheduler calls `admit` and `preempt`; the engine calls `advance`,
    `commit` and `finish`, when a step is over or the caller aborts. Times are of the engine's clock, in seconds.
    """

    request_id: str
    params: SamplingParams
    seed: int
    token_ids: list[int]  # prompt, then committed output
    num_prompt_tokens: int
    max_seq_len: int
    logits_processor: LogitsProcessor
    detokenizer: Detokenizer
    stop_token_ids: frozenset[int]  # end-of-sequence ids (unless ignored) and the request's own stop ids
    leader: "Request | None" = None  # the sibling whose prompt blocks this one waits to share (n > 1)
    status: RequestStatus = RequestStatus.WAITING
    token_origins: list[TokenOrigin] = field(default_factory=list)  # of the committed output
    num_computed_tokens: int = 0  # tokens whose key and value stand in the target's cache
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    num_cached_tokens: int = 0
    num_rounds: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    draft_lengths: Counter[int] = field(default_factory=Counter)  # decoding steps by the number of draft tokens
    accepted_lengths: Counter[int] = field(default_factory=Counter)  # rounds by the number of accepted tokens
    num_preemptions: int = 0
    arrival_time: float = 0.0
    admission_time: float | None = None  # to the batch, for the first time
    first_token_time: float | None = None
    last_token_time: float | None = None

    @property
    def num_pending_tokens(self) -> int:
        """Committed tokens that the target has yet to read; 1 when the request is ready to decode."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """Committed output tokens."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        """How many output tokens are committed."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_tokens_left(self) -> int:
        """Output tokens that may still come before max_tokens or max_seq_len ends the request."""
        return min(self.params.max_tokens - self.num_output_tokens, self.max_seq_len - len(self.token_ids))

    @property
    def is_finished(self) -> bool:
        """Whether nothing more will come."""
        return self.status is RequestStatus.FINISHED

    @property
    def shares_prompt_soon(self) -> bool:
        """Whether a sibling is still computing the prompt blocks that this request could share."""
        leader = self.leader
        return leader is not None and not leader.is_finished and leader.num_output_tokens == 0

    def admit(self, num_reused: int, now: float) -> None:
        """Take a place in the batch. num_reused: tokens whose keys and values are in its blocks already."""
        self.status = RequestStatus.RUNNING
        self.num_computed_tokens = num_reused
        self.num_cached_tokens += 0 if self.num_preemptions else num_reused  # its own blocks are no find
        self.admission_time = now if self.admission_time is None else self.admission_time

    def preempt(self) -> None:
        """Give the place up; output tokens stay, and all is computed again later."""
        self.status = RequestStatus.WAITING
        self.num_computed_tokens = 0
        self.num_preemptions += 1

    def advance(self, num_tokens: int) -> None:
        """The target has read a part of the prompt (or of what a preemption lost), and no token follows from it yet."""
        self.num_computed_tokens += num_tokens

    def commit(
        self, token_ids: Sequence[int], logprobs: list[dict[int, Logprob]], num_draft_tokens: int, now: float
    ) -> None:
        """Append a step's tokens up to and including the one that ends the request; the rest never happened.

        token_ids: accepted draft tokens, then one that was no draft. num_draft_tokens: of this step, refused ones too.
        """
        self._count_round(len(token_ids) - 1, num_draft_tokens)
        self.first_token_time = now if self.first_token_time is None else self.first_token_time
        self.last_token_time = now
        count = self._count_until_end(token_ids)
        self.token_ids += token_ids[:count]
        self.token_origins += _origins(len(token_ids) - 1, num_draft_tokens)[:count]
        self.logits_processor.append(token_ids[:count])
        if self.logprobs is not None:
            self.logprobs += logprobs[:count]
        self.num_computed_tokens = len(self.token_ids) - 1  # the last token is chosen, and not yet read

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None, error: str | None = None) -> None:
        """End the request; text that was held back is released, except what a stop string cut."""
        self.status = RequestStatus.FINISHED
        self.finish_reason, self.stop_reason, self.error = reason, stop_reason, error
        self.detokenizer.finish()

    def completion(self, index: int) -> CompletionOutput:
        """A snapshot for the caller."""
        return CompletionSnapshot.of(
            {
                "token_ids": self.token_ids,
                "token_origins": self.token_origins,
                "token_lengths": self.detokenizer.lengths,
            },
            self.num_prompt_tokens,
            self.num_output_tokens,
            index=index,
            text=self.detokenizer.text,
            logprobs=None if self.logprobs is None else list(self.logprobs),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            error=self.error,
        )

    def metrics(self) -> RequestMetrics:
        """What became of this sequence so far."""
        start, first, last = self.arrival_time, self.first_token_time, self.last_token_time
        return RequestMetrics(
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_output_tokens=self.num_output_tokens,
            num_rounds=self.num_rounds,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
            draft_lengths=in_order(self.draft_lengths),
            accepted_lengths=in_order(self.accepted_lengths),
            num_preemptions=self.num_preemptions,
            queue_seconds=0.0 if self.admission_time is None else self.admission_time - start,
            prefill_seconds=0.0 if first is None else first - start,
            decode_seconds=0.0 if first is None or last is None else last - first,
        )

    def _count_round(self, num_accepted: int, num_draft_tokens: int) -> None:
        if self.num_output_tokens:  # not the token that ends the prompt
            self.draft_lengths[num_draft_tokens] += 1
        if num_draft_tokens:
            self.num_rounds += 1
            self.num_draft_tokens += num_draft_tokens
            self.num_accepted_tokens += num_accepted
            self.accepted_lengths[num_accepted] += 1

    def _count_until_end(self, token_ids: Sequence[int]) -> int:
        """How many of these next tokens there will be: up to and including the one that ends the request."""
        num_output, room, minimum = self.num_output_tokens, self.num_tokens_left, self.params.min_tokens
        count = 0
        for token_id in token_ids:
            count += 1
            past_minimum = num_output + count >= minimum
            is_stop_token = token_id in self.stop_token_ids
            stop_string = self.detokenizer.append(token_id, is_stop_token=is_stop_token, may_stop=past_minimum)
            if is_stop_token and past_minimum:  # end conditions in the order of their strength
                self.finish("stop", token_id if token_id in self.params.stop_token_ids else None)
            elif stop_string is not None:
                self.finish("stop", stop_string)
            elif count == room:
                self.finish("length")
            else:
                continue
            break
        return count


def _origins(num_accepted: int, num_draft_tokens: int) -> list[TokenOrigin]:
    """Where each token of one step comes from."""
    if num_draft_tokens == 0:
        return ["plain"]
    origins: list[TokenOrigin] = ["accepted"] * num_accepted
    origins.append("bonus" if num_accepted == num_draft_tokens else "recovered")
    return origins


@dataclass
class RequestGroup:
    """The n sequences of one request, answered together."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    requests: list[Request]

    @property
    def finished(self) -> bool:
        """Whether all n sequences have ended."""
        return all([request.is_finished for request in self.requests])

    def output(self) -> RequestOutput:
        """A snapshot for the caller; cumulative."""
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[request.completion(index) for index, request in enumerate(self.requests)],
            finished=self.finished,
            metrics=together([request.metrics() for request in self.requests]),
        )
