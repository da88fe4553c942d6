"""What all endpoints share: the engine, its name, and the limits."""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from anyio import CapacityLimiter, to_thread
from prometheus_client import CollectorRegistry

from magicdec.runtime.openai.answers.token_text import TokenText
from magicdec.runtime.openai.errors import ApiError
from magicdec.runtime.openai.generation import Generation
from magicdec.runtime.openai.requests.prompts import Prompt, check_lengths
from magicdec.runtime.sampling_params import SamplingParams
from magicdec.runtime.serving.async_llm import AsyncLLM

DEFAULT_BODY_BYTES = 4 << 20
MAX_THREADS = 4  # that tokenize at once; more would only wait for each other, and each keeps memory of its own


@dataclass(frozen=True)
class Limits:
    """What one HTTP request may take. request_timeout: seconds; None for no limit, as with max_prompt_tokens."""

    max_body_bytes: int = DEFAULT_BODY_BYTES
    max_prompt_tokens: int | None = None
    request_timeout: float | None = None


class Service:
    """The engine as it is served. model: the name that requests give; created: seconds since 1970.

    max_seq_len: prompt and output tokens that one sequence may have; max_prompt_tokens: those of a prompt.
    """

    def __init__(self, llm: AsyncLLM, model: str, registry: CollectorRegistry, limits: Limits, *, created: int) -> None:
        self.llm, self.model, self.registry, self.limits, self.created = llm, model, registry, limits, created
        self.tokenizer = llm.tokenizer
        self.token_text = TokenText(self.tokenizer)
        self._threads = CapacityLimiter(MAX_THREADS)
        self.max_seq_len = llm.max_sequence_tokens
        self.max_prompt_tokens = min(limits.max_prompt_tokens or self.max_seq_len, self.max_seq_len - 1)

    def check_model(self, name: str | None) -> None:
        """ApiError 404 for any other model; none means this one."""
        if name not in (None, self.model):
            raise ApiError(
                404,
                f"the model {name!r} is not served here; ask for {self.model!r}",
                param="model",
                code="model_not_found",
            )

    async def generate(
        self,
        kind: str,
        prompts: Callable[[], Sequence[Prompt]],
        params: Callable[[Sequence[Prompt]], SamplingParams],
    ) -> Generation:
        """Tokenize, check and submit, off the event loop. kind: begins the request's id."""

        def start() -> Generation:
            ready = prompts()
            check_lengths(ready, self.max_prompt_tokens)
            return Generation(
                self.llm,
                ready,
                params(ready),
                request_id=f"{kind}-{secrets.token_hex(16)}",
                timeout=self.limits.request_timeout,
            )

        return await to_thread.run_sync(start, limiter=self._threads)
