"""Requests to `tensorrt_llm`: handed to the engine at once, answered by one event loop in a thread of its own."""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from magicdec.errors import MagicDecError, RequestError
from magicdec.runtime.outputs import CompletionOutput, RequestOutput
from magicdec.runtime.serving.async_llm import AsyncLLM
from magicdec.runtime.serving.request_stream import RequestStream
from magicdec.runtime.triton_backend.llm.answer import Answer, RowContext, RowStream, Sequences, stack
from magicdec.runtime.triton_backend.llm.request import LLMRow, RequestReader, Tensors
from magicdec.runtime.triton_backend.sender import DeadlineError, Sender

logger = logging.getLogger(__name__)
_LAST_ANSWERS: Final = 5.0  # seconds to send what the engine has answered


@dataclass(eq=False)
class Job:
    """A request that is being answered: a stream for each row of its batch."""

    request_id: str  # the client's, which may be empty and need not be unique
    rows: Sequence[LLMRow]
    streams: Sequence[RequestStream]
    sender: Sender
    num_open_sequences: int
    arrival_ns: int
    cancelled: bool = False

    def abort(self) -> None:
        """End all rows; their streams then end by themselves."""
        for stream in self.streams:
            stream.abort()

    def check_cancelled(self) -> None:
        """Abort if the client has left."""
        if not self.cancelled and self.sender.is_cancelled():
            self.cancelled = True
            self.abort()


class LLMService:
    """Answers requests until it is closed. period: seconds between two looks for clients that have left."""

    def __init__(self, llm: AsyncLLM, reader: RequestReader, *, period: float) -> None:
        self._llm = llm
        self._reader = reader
        self._period = period
        self._jobs: set[Job] = set()
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="magicdec-answers", daemon=True)
        self._thread.start()
        self._run(self._watch())

    def start(self, request_id: str, tensors: Tensors, sender: Sender, *, timeout: float | None) -> None:
        """Take a request, or a request to stop another; whatever is wrong with it goes to the sender.

        Only the loop's thread uses senders.
        """
        try:
            if np.any(tensors.get("stop", False)):
                self._stop(request_id)
                self._loop.call_soon_threadsafe(lambda: sender.send({}, final=True))
            else:
                self._start(request_id, tensors, sender, timeout)
        except Exception as error:
            if not isinstance(error, MagicDecError):
                logger.exception("request %r cannot be read", request_id)
            refusal = error  # which outlives its except clause
            self._loop.call_soon_threadsafe(lambda: sender.fail(refusal, final=True))

    def every(self, period: float, call: Callable[[], None]) -> None:
        """Call something again and again, in the loop's thread, until the service is closed."""
        self._run(_repeat(period, call))

    def close(self, timeout: float) -> None:
        """Take no more requests, answer the open ones within `timeout` seconds, abort the rest."""
        self._llm.drain(timeout)
        if not self._thread.is_alive():
            return
        end = time.monotonic() + _LAST_ANSWERS
        while self._jobs and time.monotonic() < end:  # what has ended is still to be sent
            time.sleep(0.01)
        asyncio.run_coroutine_threadsafe(_end_tasks(), self._loop).result(_LAST_ANSWERS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _start(self, request_id: str, tensors: Tensors, sender: Sender, timeout: float | None) -> None:
        rows = self._reader.rows(tensors)
        with contextlib.ExitStack() as undo:
            streams = []
            for row in rows:
                streams.append(self._llm.submit(row.token_ids, row.params, timeout=timeout))
                undo.callback(streams[-1].abort)
            undo.pop_all()
        job = Job(request_id, rows, streams, sender, sum(row.params.n for row in rows), time.monotonic_ns())
        with self._lock:
            self._jobs.add(job)
        self._run(self._answer(job))

    def _stop(self, request_id: str) -> None:
        if not request_id:
            raise RequestError("A request id must be provided for request cancellation")
        for job in self._open_jobs():
            if job.request_id == request_id:
                job.abort()

    def _open_jobs(self) -> list[Job]:
        with self._lock:
            return list(self._jobs)

    async def _answer(self, job: Job) -> None:
        try:
            if self._reader.decoupled:
                await asyncio.gather(*(self._answer_row(job, index) for index in range(len(job.rows))))
            else:
                await self._answer_all(job)
        except Exception as error:
            logger.exception("request %r cannot be answered", job.request_id)
            job.abort()
            job.sender.fail(error, final=True)
        finally:
            with self._lock:
                self._jobs.discard(job)

    async def _answer_row(self, job: Job, index: int) -> None:
        """Pieces, or whole sequences, as they come; the request's last one ends it."""
        answers = RowStream(self._context(job, index))
        num_open = job.rows[index].params.n
        try:
            async for output in job.streams[index]:
                job.check_cancelled()
                if job.cancelled and not output.finished:
                    continue
                failure = _failure(output)
                if failure is not None:
                    raise failure
                for answer, is_last in answers.answers(output):
                    num_open -= is_last
                    job.num_open_sequences -= is_last
                    job.sender.send(answer, final=job.num_open_sequences == 0)
        except MagicDecError as error:
            job.num_open_sequences -= num_open
            job.sender.fail(error, final=job.num_open_sequences == 0)

    async def _answer_all(self, job: Job) -> None:
        """One answer for all rows."""
        try:
            outputs = [await self._last(job, stream) for stream in job.streams]
            failure = next(filter(None, map(_failure, outputs)), None)
            if failure is not None:
                raise failure
            job.sender.send(stack([self._whole(job, i, out) for i, out in enumerate(outputs)]), final=True)
        except MagicDecError as error:
            job.abort()
            job.sender.fail(error, final=True)

    async def _last(self, job: Job, stream: RequestStream) -> RequestOutput:
        async for output in stream:
            job.check_cancelled()
            if output.finished:
                return output
        raise AssertionError("a stream ends with a finished output")

    def _whole(self, job: Job, index: int, output: RequestOutput) -> Answer:
        return Sequences(self._context(job, index), output, output.outputs).answer()

    def _context(self, job: Job, index: int) -> RowContext:
        return RowContext(
            row=job.rows[index],
            index=index,
            batch_size=len(job.rows),
            arrival_ns=job.arrival_ns,
            block_size=self._llm.block_size,
            decode=self._reader.decode,
        )

    async def _watch(self) -> None:
        """Clients may leave while their request waits, or while its prompt is read."""
        await _repeat(self._period, self._check_cancelled)

    def _check_cancelled(self) -> None:
        for job in self._open_jobs():
            job.check_cancelled()

    def _run(self, coroutine: Any) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop)


def _failure(output: RequestOutput) -> Exception | None:
    """What ended a request without an answer that counts."""
    failed: CompletionOutput | None = next((each for each in output.outputs if each.error is not None), None)
    if failed is None:
        return None
    text = failed.error or ""
    return DeadlineError(text) if failed.finish_reason == "abort" else RequestError(text)


async def _repeat(period: float, call: Callable[[], object]) -> None:
    while True:
        await asyncio.sleep(period)
        try:
            call()
        except Exception:
            logger.exception("what is done every %g s has failed", period)


async def _end_tasks() -> None:
    """Cancel all other tasks of this loop."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
