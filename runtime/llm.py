"""The Python interface: load a pair, generate."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

from magicdec.errors import RequestError
from magicdec.pair.config import DrafterChoice
from magicdec.runtime.engine.drafting import Drafting
from magicdec.runtime.loading import load
from magicdec.runtime.outputs import RequestOutput
from magicdec.runtime.sampling_params import SamplingParams

Prompt = str | Sequence[int]
# Called after every step with (request outputs that changed, prompt tokens computed, prompt tokens in all).
OnGenerateProgress = Callable[[Sequence[RequestOutput], int, int], None]


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
        loaded = load(
            Path(engine_dir),
            kv_cache_tokens=kv_cache_tokens,
            dtype=dtype,
            device=device,
            max_batch_size=max_batch_size,
            max_num_tokens=max_num_tokens,
            max_seq_len=max_seq_len,
            num_draft_tokens=num_draft_tokens,
            drafter=drafter,
            window_size=window_size,
        )
        self.config, self.tokenizer, self.engine = loaded.config, loaded.tokenizer, loaded.engine
        self.runner, self.draft_runner = loaded.runner, loaded.draft_runner
        self._loaded = loaded
        self._ids = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_progress: OnGenerateProgress | None = None,
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
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        on_progress: OnGenerateProgress | None = None,
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
        return self._loaded.memory()

    def auto_drafting(self, *, every: bool) -> Drafting:
        """Drafting under a new controller, by the pair's own proposer, or by every one that it has."""
        return self._loaded.auto_drafting(every=every)

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
