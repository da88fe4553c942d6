"""From logits to the probabilities that a request draws from: masks, penalties, temperature, cut-offs, in vLLM's order.

One function makes target_probs and draft_probs, so both have the same support rules, and each row is processed with
its own history: prompt, output and the draft tokens before that row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from magicdec.errors import RequestError
from magicdec.runtime.outputs import Logprob
from magicdec.runtime.sampling_params import SamplingParams

_Ints = NDArray[np.int64]
_Floats = NDArray[np.float64]
_Bools = NDArray[np.bool_]

_TOP_P_GUESS = 1024  # a nucleus is nearly always smaller, and finding so many is far cheaper than sorting all


class LogitsProcessor:
    """The sampling parameters of one request, applied to rows of logits; it keeps the history that they need.

    Order: bad words, logit bias, min_tokens, repetition penalty (prompt and output), frequency and presence penalty
    (output), temperature, min_p, top_k, top_p. Bad words look at the output alone, as in vLLM. What is off costs
    nothing, and no call walks over the history: its distinct tokens are counted when they are committed.

    Args:
        params: the request's sampling parameters.
        prompt_token_ids: used by the repetition penalty alone.
        vocab_size: number of usable ids. Columns of logits beyond it are padding and get no probability; a model with
            fewer columns gives the missing ids none. So the rows of any target and draft have one width.
        eos_token_ids: end-of-sequence ids, masked with stop_token_ids until min_tokens.
        bad_words_ids: token ids of each spelling of each bad word.

    All ids are in the vocabulary; `engine.admission` has seen to it.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        vocab_size: int,
        eos_token_ids: Sequence[int] = (),
        bad_words_ids: Sequence[Sequence[int]] = (),
    ) -> None:
        self.params = params
        self.vocab_size = vocab_size
        self._bias = dict(params.logit_bias or {})
        self._ends = sorted({*eos_token_ids, *params.stop_token_ids}) if params.min_tokens else []
        self._bad_words = [tuple(ids) for ids in bad_words_ids if ids]
        self._num_output = 0
        self._tail: list[int] = []  # end of the output, as long as the longest bad word needs
        self._tail_len = max(map(len, self._bad_words), default=1) - 1
        repeats = params.repetition_penalty != 1
        self._penalizes = repeats or bool(params.presence_penalty or params.frequency_penalty)
        self._seen = _TokenCounts(prompt_token_ids if repeats else ())
        self.distribution_key = self._distribution_key()

    def append(self, token_ids: Sequence[int]) -> None:
        """Commit output tokens."""
        self._num_output += len(token_ids)
        if self._tail_len:
            self._tail = [*self._tail, *token_ids][-self._tail_len :]
        if self._penalizes:
            self._seen.add(token_ids)

    def probs(self, logits: torch.Tensor, drafts: Sequence[int], first: int = 0) -> torch.Tensor:
        """Probabilities [R, vocab_size] of logits [R, V]; the history of row i ends with drafts[: first + i].

        float64 stays float64, anything else becomes float32; `logits` is not changed.
        target_probs of k drafts: R = k + 1, first = 0. draft_probs of draft j: R = 1, first = j.

        Raises:
            RequestError: a row is NaN or infinite, or no token is left in it.
        """
        if self.params.greedy:
            best = torch.tensor(self.best(logits, drafts, first), device=logits.device)[:, None]  # [R, 1]
            dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
            zeros = torch.zeros(len(logits), self.vocab_size, dtype=dtype, device=logits.device)
            return zeros.scatter_(1, best, 1.0)
        logits = self._processed(self._fit(logits), drafts, first)
        largest = logits.amax(dim=-1, keepdim=True)
        _check_largest(largest)
        logits -= largest  # so that no temperature overflows
        logits /= self.params.temperature
        self._cut(logits)
        return logits.softmax(dim=-1)

    def best(self, logits: torch.Tensor, drafts: Sequence[int], first: int = 0) -> list[int]:
        """Arg-max of each row, the lowest id of equals; as `probs`, for a greedy request."""
        if self.distribution_key is None:
            logits = self._processed(self._fit(logits), drafts, first)
        ids, largest = _arg_max(logits[:, : self.vocab_size])
        _check_largest(largest)
        return ids.tolist()

    def _processed(self, logits: torch.Tensor, drafts: Sequence[int], first: int) -> torch.Tensor:
        """Masks and penalties, in place; what does not look at the history needs no draft tokens either."""
        if self.distribution_key is not None:
            return logits
        assert len(drafts) >= first + logits.shape[0] - 1, "more rows than draft tokens to tell them apart"
        histories = [drafts[: first + i] for i in range(logits.shape[0])]
        self._mask(logits, histories)
        if self._penalizes:
            self._penalize(logits, histories)
        return logits

    def _distribution_key(self) -> str | None:
        """Requests with the same one are decided alike, whatever came before a row; None: only this request is so."""
        params = self.params
        if self._bias or self._ends or self._bad_words or self._penalizes:
            return None
        cuts = params.min_p, params.top_k, params.top_p
        return repr((params.acceptance_rule, params.temperature, *cuts, self.vocab_size))  # a string is hashed once

    def logprobs(self, logits: torch.Tensor, token_ids: Sequence[int]) -> list[dict[int, Logprob]]:
        """Give for each row of the target's logits [R, V] its token and the `params.logprobs` most likely ones.

        As vLLM's default: of the logits as the model gave them, before any of the parameters. The chosen token comes
        first in each dict, then the most likely in falling order.
        """
        if self.params.logprobs is None:
            return []
        logprobs = _float_copy(logits[:, : self.vocab_size]).log_softmax(dim=-1)  # [R, vocab_size]
        chosen = logprobs.gather(1, torch.tensor(list(token_ids), device=logits.device)[:, None])  # [R, 1]
        ranks = (logprobs > chosen).sum(dim=-1) + 1  # [R]
        top = logprobs.topk(min(self.params.logprobs, logprobs.shape[1]), dim=-1)
        rows: list[dict[int, Logprob]] = []
        for i, token_id in enumerate(token_ids):
            row = {token_id: Logprob(float(chosen[i]), int(ranks[i]))}
            for rank, (value, other) in enumerate(zip(top.values[i].tolist(), top.indices[i].tolist(), strict=True), 1):
                row.setdefault(other, Logprob(value, rank))
            rows.append(row)
        return rows

    def _fit(self, logits: torch.Tensor) -> torch.Tensor:
        """A copy [R, vocab_size] to work on."""
        fitted = _float_copy(logits[:, : self.vocab_size])
        missing = self.vocab_size - fitted.shape[1]
        return torch.nn.functional.pad(fitted, (0, missing), value=-math.inf) if missing else fitted

    def _mask(self, logits: torch.Tensor, histories: list[Sequence[int]]) -> None:
        for i, history in enumerate(histories):
            banned = self._banned(history)
            if banned:
                logits[i, banned] = -math.inf
        if self._bias:
            ids = torch.tensor(list(self._bias), device=logits.device)
            logits[:, ids] += torch.tensor(list(self._bias.values()), dtype=logits.dtype, device=logits.device)

    def _banned(self, history: Sequence[int]) -> list[int]:
        """Ids that would complete a bad word, or end the output too early, after these draft tokens."""
        banned = self._ends if self._num_output + len(history) < self.params.min_tokens else []
        if not self._bad_words:
            return banned
        tail = (*self._tail, *history)
        return [*banned, *(w[-1] for w in self._bad_words if tail[len(tail) - len(w) + 1 :] == w[:-1])]

    def _penalize(self, logits: torch.Tensor, histories: list[Sequence[int]]) -> None:
        ids, counts, seen = (torch.from_numpy(array).to(logits.device) for array in self._seen.rows(histories))
        logits[:, ids] = self._penalized(logits[:, ids], counts.to(logits.dtype), seen)

    def _penalized(self, values: torch.Tensor, counts: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """Logits, output counts and presence in prompt or output, all [R, C]; committed and draft tokens are alike."""
        params = self.params
        if params.repetition_penalty != 1:
            repeated = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
            values = torch.where(seen, repeated, values)
        return values - params.frequency_penalty * counts - params.presence_penalty * (counts > 0).to(values.dtype)

    def _cut(self, logits: torch.Tensor) -> None:
        """min_p, top_k and top_p on logits whose largest is 0 in each row; what is cut becomes -inf."""
        params = self.params
        if params.min_p > 0:
            logits.masked_fill_(logits < math.log(params.min_p), -math.inf)
        if 0 < params.top_k < self.vocab_size:
            last = logits.topk(params.top_k, dim=-1).values[:, -1:]  # [R, 1]
            logits.masked_fill_(logits < last, -math.inf)
        if params.top_p < 1:
            logits.masked_fill_(logits < _nucleus_edge(logits, params.top_p), -math.inf)


class _TokenCounts:
    """The distinct tokens of a history, and how often each is in the output (not at all, if only in the prompt)."""

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        self.ids = np.unique(np.asarray(prompt_token_ids, dtype=np.int64))  # [C]
        self.counts = np.zeros(len(self.ids))  # [C]
        self._column = {token_id: i for i, token_id in enumerate(self.ids.tolist())}

    def add(self, token_ids: Sequence[int]) -> None:
        new = [t for t in dict.fromkeys(token_ids) if t not in self._column]
        self._column.update({t: len(self.ids) + i for i, t in enumerate(new)})
        self.ids = np.append(self.ids, np.asarray(new, dtype=np.int64))
        self.counts = np.append(self.counts, np.zeros(len(new)))
        for t in token_ids:
            self.counts[self._column[t]] += 1

    def rows(self, histories: list[Sequence[int]]) -> tuple[_Ints, _Floats, _Bools]:
        """Token ids [C + D], and for each row its counts and whether it has seen the token, both [R, C + D].

        D columns are added for draft tokens that the committed history has not; histories[-1] is the longest.
        """
        added = [t for t in dict.fromkeys(histories[-1]) if t not in self._column]
        column = {t: len(self.ids) + i for i, t in enumerate(added)}
        ids = np.append(self.ids, np.asarray(added, dtype=np.int64))
        counts = np.tile(np.append(self.counts, np.zeros(len(added))), (len(histories), 1))
        seen = np.tile(np.arange(len(ids)) < len(self.ids), (len(histories), 1))
        for i, history in enumerate(histories):
            for t in history:
                at = i, self._column[t] if t in self._column else column[t]
                counts[at] += 1
                seen[at] = True
        return ids, counts, seen


def _nucleus_edge(logits: torch.Tensor, top_p: float) -> torch.Tensor:
    """[R, 1]: the smallest logit in the smallest set of the most likely tokens that holds `top_p`.

    Keeping what is at least as large means that equal logits share one fate, so that no order among them matters. Sums
    are in float64 and run from the largest down, so a guess that reaches top_p finds the very edge that sorting the
    whole row would.
    """
    probs = logits.softmax(dim=-1)
    vocab_size = logits.shape[-1]
    size = min(_TOP_P_GUESS, vocab_size)
    while True:
        top = logits.topk(size, dim=-1)  # [R, size], falling
        reached = probs.gather(1, top.indices).double().cumsum(dim=-1) >= top_p
        if size == vocab_size or bool(reached[:, -1].all()):
            break
        size = min(8 * size, vocab_size)
    reached[:, -1] = True  # rounding may keep the whole sum below top_p: keep all
    return top.values.gather(1, reached.int().argmax(dim=-1, keepdim=True))


def _float_copy(logits: torch.Tensor) -> torch.Tensor:
    return logits.to(logits.dtype if logits.dtype == torch.float64 else torch.float32, copy=True)


def _arg_max(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each row of logits [R, V] the first id of the largest, and the largest; NaN is larger than any."""
    if logits.device.type == "cpu" and logits.dtype in (torch.float32, torch.float64):
        ids = torch.from_numpy(logits.numpy().argmax(axis=1))  # several times as fast as PyTorch's
    else:
        ids = logits.argmax(dim=-1)
    return ids, logits.gather(1, ids[:, None])


def _check_largest(rows: torch.Tensor) -> None:
    """rows [R, 1]: the largest logit of each row."""
    readable = rows.isfinite()  # NaN and inf win any maximum
    for largest in [] if bool(readable.all()) else rows[~readable].tolist():
        if math.isnan(largest) or largest == math.inf:
            raise RequestError(
                f"the logits hold {largest} after masks and penalties: the model overflows in this dtype (use bfloat16 "
                "or float32), or repetition_penalty is too small"
            )
        if largest == -math.inf:
            raise RequestError("no token can be drawn: bad_words and min_tokens forbid the whole vocabulary")
