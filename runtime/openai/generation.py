"""The engine's work for one HTTP request: a stream a prompt, read together."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence

from magicdec.errors import MagicDecError
from magicdec.runtime.openai.errors import CLIENT_LEFT, ApiError
from magicdec.runtime.openai.requests.prompts import Prompt
from magicdec.runtime.outputs import RequestOutput
from magicdec.runtime.sampling_params import SamplingParams
from magicdec.runtime.serving.async_llm import AsyncLLM
from magicdec.runtime.serving.request_stream import RequestStream

_Queue = asyncio.Queue[tuple[int, RequestOutput] | Exception]


class Generation:
    """Open requests of the engine. request_id: also the answer's id."""

    def __init__(
        self,
        llm: AsyncLLM,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        request_id: str,
        timeout: float | None,
    ) -> None:
        """Submit all prompts, or none if one of them is refused. timeout: seconds."""
        self.request_id, self.prompts, self.params = request_id, prompts, params
        self._llm = llm
        self._client_left = False
        self._streams: list[RequestStream] = []
        try:
            for index, prompt in enumerate(prompts):
                name = f"{request_id}-{index}"
                self._streams.append(llm.submit(prompt.token_ids, params, request_id=name, timeout=timeout))
        except MagicDecError:
            self.abort()
            raise

    def abort(self) -> None:
        """Free what is not finished, within a step."""
        for stream in self._streams:
            stream.abort()

    def leave(self) -> None:
        """The client has gone."""
        self._client_left = True
        self.abort()

    async def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """(index of the prompt, its newest output) as they come, until all prompts are answered.

        Raises:
            ApiError: a prompt was not answered, for whatever reason; the others are then aborted.
            EngineFailedError: the engine broke down.
        """
        try:
            async with contextlib.aclosing(_merged(self._streams)) as merged:
                async for index, output in merged:
                    self._check(output)
                    yield index, output
        finally:
            self.abort()

    def _check(self, output: RequestOutput) -> None:
        for item in output.outputs:
            if item.finish_reason == "error":
                raise ApiError(500, f"generation failed: {item.error}", code="generation_failed")
            if item.finish_reason == "abort":
                raise self._abortion(item.error or "the request was aborted")

    def _abortion(self, text: str) -> ApiError:
        if self._client_left:
            return ApiError(CLIENT_LEFT, "the client closed the connection", code="client_left")
        if self._llm.status != "ready":
            return ApiError(503, f"{text}; send the request to another one", code="shutting_down")
        return ApiError(504, f"{text}; ask for fewer tokens, or try again later", code="request_timeout")


async def _merged(streams: Sequence[RequestStream]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Outputs of all streams; a slow reader holds the readers of the streams back, so nothing piles up."""
    if len(streams) == 1:
        async for output in streams[0]:
            yield 0, output
        return
    queue: _Queue = asyncio.Queue(maxsize=1)
    tasks = [asyncio.create_task(_pump(index, stream, queue)) for index, stream in enumerate(streams)]
    num_open = len(streams)
    try:
        while num_open:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            num_open -= item[1].finished
            yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(index: int, stream: RequestStream, queue: _Queue) -> None:
    try:
        async for output in stream:
            await queue.put((index, output))
    except Exception as error:
        await queue.put(error)
