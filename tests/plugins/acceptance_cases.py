"""Random ragged batches for the acceptance kernels: drafts that agree with their target to a degree, generic draws."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from magicdec.plugins.acceptance import AcceptanceRequest, Rule

MAX_DRAFT_LEN = 4
ALMOST_ONE = 1 - 2.0**-53  # the largest draw there is


@dataclass(frozen=True)
class Batch:
    """What `accept` takes."""

    logits: torch.Tensor  # [N, V]
    draft_probs: torch.Tensor  # [M, V]
    requests: list[AcceptanceRequest]


def random_batch(
    rng: np.random.Generator,
    count: int,
    vocab_size: int,
    dtype: torch.dtype = torch.float32,
    rules: Sequence[Rule] = tuple(Rule),
    min_draft_len: int = 0,
) -> Batch:
    """Peaked and flat rows, hot and cold temperatures, masked tokens, one-hot drafts, drafts equal to their target."""
    parts = [_random_request(rng, vocab_size, dtype, rules, min_draft_len) for _ in range(count)]
    logits, probs, requests = zip(*parts, strict=True)
    return Batch(torch.cat(logits), torch.cat(probs), list(requests))


def at_the_edges(rng: np.random.Generator, batch: Batch) -> Batch:
    """The same with draws of 0 and of the largest number below 1, one in three."""

    def moved(draws: Sequence[float]) -> list[float]:
        return [float(rng.choice([draw, draw, draw, draw, 0.0, ALMOST_ONE])) for draw in draws]

    requests = [
        replace(request, accept_draws=moved(request.accept_draws), sample_draws=moved(request.sample_draws))
        for request in batch.requests
    ]
    return replace(batch, requests=requests)


def _random_request(
    rng: np.random.Generator, vocab_size: int, dtype: torch.dtype, rules: Sequence[Rule], min_draft_len: int
) -> tuple[torch.Tensor, torch.Tensor, AcceptanceRequest]:
    k = int(rng.integers(min_draft_len, MAX_DRAFT_LEN + 1))
    logits = torch.from_numpy(rng.normal(size=(k + 1, vocab_size)) * rng.choice([0.3, 1, 4, 20]))
    if rng.random() < 0.3:
        hidden = torch.from_numpy(rng.random((k + 1, vocab_size)) < 0.4)
        hidden[:, int(rng.integers(vocab_size))] = False
        logits[hidden] = -torch.inf
    logits = logits.to(dtype)
    temperature = float(rng.choice([0.1, 0.7, 1.0, 2.5]))
    noise = torch.from_numpy(rng.normal(size=(k, vocab_size))) * float(rng.choice([0, 0.5, 2]))
    laws = ((logits[:k].double() + noise) / temperature).softmax(-1)  # [k, V]
    tokens = [int(rng.choice(vocab_size, p=row.numpy() / row.sum().item())) for row in laws]
    if rng.random() < 0.2:
        laws = torch.nn.functional.one_hot(torch.tensor(tokens, dtype=torch.long), vocab_size).double()
    request = AcceptanceRequest(
        Rule(int(rng.choice(list(rules)))),
        tokens,
        temperature,
        accept_draws=rng.random(k).tolist(),
        sample_draws=rng.random(k + 1).tolist(),
        seed=int(rng.integers(2**64, dtype=np.uint64)),
        position=int(rng.integers(2000)),
    )
    return logits, laws.to(torch.promote_types(dtype, torch.float32)), request
