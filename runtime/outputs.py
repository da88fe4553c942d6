"""What a caller gets back. Names follow vLLM's, so that a caller of either finds their way."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

FinishReason = Literal["stop", "length", "abort", "error"]
# plain: of a step without drafts; accepted: a draft token that the target took; the token that ends a round is
# recovered where it stands for a refused draft, and bonus where all drafts were accepted.
TokenOrigin = Literal["plain", "accepted", "recovered", "bonus"]


class Logprob(NamedTuple):
    """Log-probability of a token before any processing, and its rank (1 = the most likely)."""

    logprob: float
    rank: int


@dataclass
class CompletionOutput:
    """One of the n completions of a request; cumulative in a stream."""

    index: int
    text: str
    token_ids: list[int]
    token_origins: list[TokenOrigin]  # one a token
    token_lengths: list[int]  # characters that each added; past the end of `text` they are held back, or were cut
    logprobs: list[dict[int, Logprob]] | None = None  # a row a token: the token itself first, then the k likeliest
    finish_reason: FinishReason | None = None  # None while it runs
    stop_reason: int | str | None = None  # the stop token id or stop string that ended it
    error: str | None = None  # the text of the error when finish_reason is "error"

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the output tokens' log-probabilities; None when logprobs were not asked for."""
        if self.logprobs is None:
            return None
        return sum(row[token_id].logprob for row, token_id in zip(self.logprobs, self.token_ids, strict=True))


class CompletionSnapshot(CompletionOutput):
    """A completion as it was at one step. Its lists are copied when they are first looked at, not at every step.

    sources: by the names of those fields, the lists that they are cut from, which only ever grow.
    """

    @classmethod
    def of(cls, sources: dict[str, list[Any]], first: int, count: int, **others: Any) -> "CompletionSnapshot":
        """first: of the output's tokens in its source of token_ids; count: how many there are; others: fields."""
        snapshot = cls.__new__(cls)
        snapshot.__dict__.update(others, _sources=sources, _first=first, _count=count)
        return snapshot

    def __getattr__(self, name: str) -> Any:
        """Of what was not looked at before."""
        values = self.__dict__.get("_sources", {}).get(name)
        if values is None:
            raise AttributeError(name)
        first = self._first if name == "token_ids" else 0
        copied = self.__dict__[name] = values[first : first + self._count]
        return copied


@dataclass
class RequestMetrics:
    """What speculation did for one request (all its n completions together)."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    num_output_tokens: int = 0
    num_rounds: int = 0  # verify passes that carried drafts
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    draft_lengths: dict[int, int] = field(default_factory=dict)  # decoding steps by their number of draft tokens
    accepted_lengths: dict[int, int] = field(default_factory=dict)  # rounds by their number of accepted tokens
    num_preemptions: int = 0
    queue_seconds: float = 0.0  # arrival to a place in the batch
    prefill_seconds: float = 0.0  # arrival to first token
    decode_seconds: float = 0.0  # first token to last token

    @property
    def acceptance_length(self) -> float:
        """Tokens that one speculative round yields on average (1 + accepted / rounds); 1 without speculation."""
        return 1 + self.num_accepted_tokens / self.num_rounds if self.num_rounds else 1.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted over proposed draft tokens; 0 without speculation."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0


def together(metrics: Sequence[RequestMetrics]) -> RequestMetrics:
    """The metrics of a request from those of its n completions; times are of the first and the last token of any."""
    if len(metrics) == 1:
        return metrics[0]
    first = _first(each.prefill_seconds for each in metrics)
    last = max(each.prefill_seconds + each.decode_seconds for each in metrics)
    return RequestMetrics(
        num_prompt_tokens=metrics[0].num_prompt_tokens,
        num_cached_tokens=sum(each.num_cached_tokens for each in metrics),
        num_output_tokens=sum(each.num_output_tokens for each in metrics),
        num_rounds=sum(each.num_rounds for each in metrics),
        num_draft_tokens=sum(each.num_draft_tokens for each in metrics),
        num_accepted_tokens=sum(each.num_accepted_tokens for each in metrics),
        draft_lengths=_sum(each.draft_lengths for each in metrics),
        accepted_lengths=_sum(each.accepted_lengths for each in metrics),
        num_preemptions=sum(each.num_preemptions for each in metrics),
        queue_seconds=_first(each.queue_seconds for each in metrics),
        prefill_seconds=first,
        decode_seconds=last - first,
    )


def _first(seconds: Iterable[float]) -> float:
    """The smallest; 0 stands for what has not happened yet."""
    return min(filter(None, seconds), default=0.0)


def _sum(counts: Iterable[dict[int, int]]) -> dict[int, int]:
    return in_order(sum(map(Counter, counts), Counter()))


def in_order(counts: dict[int, int]) -> dict[int, int]:
    """A copy, by rising key."""
    return dict(sorted(counts.items()) if len(counts) > 1 else counts)


@dataclass
class RequestOutput:
    """The state of a request after a step; cumulative."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
