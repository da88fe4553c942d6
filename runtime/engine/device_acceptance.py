"""Acceptance of a whole batch where its logits lie, for the requests that the fused kernel can serve.

The kernel divides by the temperature and nothing else. A request that asks for more is left to `sampler.verify`, as is
one whose logits cannot be read; the choice depends on the request alone, never on its neighbours.
"""

import importlib.util
from collections.abc import Callable, Sequence

import torch

from magicdec.plugins.acceptance import MAX_VOCAB_SIZE, AcceptanceRequest, Outcome, Rule
from magicdec.runtime.engine.request import Request
from magicdec.runtime.sampling.acceptance import VerifyOutput
from magicdec.runtime.sampling.draft import Draft
from magicdec.runtime.sampling.draws import Purpose, uniform
from magicdec.runtime.sampling_params import SamplingParams

# (logits [N, V], draft_probs [M, V], requests) -> outcomes, None where the logits cannot be read
Accept = Callable[[torch.Tensor, torch.Tensor, Sequence[AcceptanceRequest]], list[Outcome | None]]


def supported(params: SamplingParams) -> bool:
    """Whether temperature (or greedy) is all that stands between logits and probabilities."""
    cuts = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
    penalties = params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
    masks = bool(params.logit_bias or params.bad_words or params.min_tokens)
    return not (cuts or penalties or masks)


def kernel_acceptance(device: torch.device | str) -> "DeviceAcceptance | None":
    """The fused kernel on CUDA, if triton is installed; None elsewhere."""
    if torch.device(device).type != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    from magicdec.plugins import acceptance_kernel

    return DeviceAcceptance(acceptance_kernel.accept)


class DeviceAcceptance:
    """Decides all requests of a step that are supported, and whose logits lie on such a device, in one `accept`."""

    def __init__(self, accept: Accept, device_type: str = "cuda") -> None:
        self._accept = accept
        self._device_type = device_type

    def verify(
        self, requests: Sequence[Request], logits: Sequence[torch.Tensor], drafts: Sequence[Draft]
    ) -> list[VerifyOutput | None]:
        """What `sampler.verify` would say of each request; None for those that it has to decide.

        logits: [k + 1, V] each, or no row where nothing is to be decided.
        """
        verdicts: list[VerifyOutput | None] = [None] * len(requests)
        served = [i for i, request in enumerate(requests) if self._reaches(logits[i]) and _serves(request)]
        if not served:
            return verdicts
        rows = torch.cat([logits[i][:, : requests[i].logits_processor.vocab_size] for i in served])  # [N, V]
        probs = torch.cat([_draft_table(drafts[i], rows) for i in served])  # [M, V]
        asked = [acceptance_request(requests[i], drafts[i].token_ids) for i in served]
        for i, outcome in zip(served, self._accept(rows, probs, asked), strict=True):
            if outcome is not None:
                accepted = drafts[i].token_ids[: outcome.num_accepted]
                verdicts[i] = VerifyOutput(outcome.num_accepted, (*accepted, outcome.token_id))
        return verdicts

    def _reaches(self, logits: torch.Tensor) -> bool:
        return len(logits) > 0 and logits.device.type == self._device_type


def acceptance_request(request: Request, draft_token_ids: list[int]) -> AcceptanceRequest:
    """What decides about these draft tokens, with the very draws that `sampler.verify` would take."""
    params, first, k = request.params, len(request.token_ids), len(draft_token_ids)
    if params.greedy:
        return AcceptanceRequest(Rule.GREEDY, draft_token_ids)
    if params.acceptance_rule == "coupled":
        return AcceptanceRequest(Rule.COUPLED, draft_token_ids, params.temperature, seed=request.seed, position=first)
    return AcceptanceRequest(
        Rule.REJECTION,
        draft_token_ids,
        params.temperature,
        accept_draws=[uniform(request.seed, position, Purpose.ACCEPT) for position in range(first, first + k)],
        sample_draws=[uniform(request.seed, position, Purpose.SAMPLE) for position in range(first, first + k + 1)],
    )


def _draft_table(draft: Draft, rows: torch.Tensor) -> torch.Tensor:
    """draft_probs [k, V], where the logits rows [N, V] lie."""
    return draft.rows(rows.shape[1]).to(rows.device)


def _serves(request: Request) -> bool:
    return supported(request.params) and request.logits_processor.vocab_size <= MAX_VOCAB_SIZE
