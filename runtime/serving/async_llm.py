"""Many callers, one engine: requests from any thread or event loop, served by one background thread."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from dataclasses import dataclass, replace
from typing import Literal

from magicdec.errors import EngineFailedError, NotReadyError, QueueFullError, RequestError
from magicdec.pair.config import PairConfig
from magicdec.runtime.engine.admission import CheckedRequest, id_in_use
from magicdec.runtime.llm import LLM, Prompt
from magicdec.runtime.outputs import RequestOutput
from magicdec.runtime.sampling_params import SamplingParams
from magicdec.runtime.serving.engine_events import EngineEvents
from magicdec.runtime.serving.request_stream import RequestStream
from magicdec.runtime.text.tokenizer import HFTokenizer

logger = logging.getLogger(__name__)
Status = Literal["ready", "draining", "failed", "stopped"]


@dataclass(frozen=True)
class _Submission:
    """A request that is open."""

    stream: RequestStream
    request: CheckedRequest
    timeout: float | None  # seconds
    deadline: float  # of time.monotonic()


class AsyncLLM:
    """Owns an `LLM` and runs its engine in a thread of its own, which steps while there is work.

    max_queue_size: how many requests may be open at once, those that run included. metrics: told of what happens.

    Nobody else may call the LLM's engine meanwhile. An error that the engine cannot pin on one request ends every open
    one with EngineFailedError, and status becomes "failed".
    """

    def __init__(self, llm: LLM, *, max_queue_size: int = 256, metrics: EngineEvents | None = None) -> None:
        if max_queue_size < 1:
            raise RequestError(f"max_queue_size is {max_queue_size}; give 1 or more")
        self._llm, self._engine = llm, llm.engine
        self.max_queue_size = max_queue_size
        self._events = metrics or EngineEvents()
        self._ids = itertools.count()
        self._changed = threading.Condition()  # guards all that follows
        self._status: Status = "ready"
        self._error: str | None = None
        self._open: dict[str, _Submission] = {}
        self._new: list[_Submission] = []
        self._aborted: list[_Submission] = []
        self._abort_at = float("inf")  # of time.monotonic(): when draining must be over
        self._thread = threading.Thread(target=self._serve, name="magicdec-engine", daemon=True)
        self._thread.start()

    @property
    def status(self) -> Status:
        """The state of the engine; requests are taken while it is "ready"."""
        return self._status

    @property
    def error(self) -> str | None:
        """What ended the engine, if its status is "failed"."""
        return self._error

    @property
    def config(self) -> PairConfig:
        """The pair's configuration with the LLM's options."""
        return self._llm.config

    @property
    def tokenizer(self) -> HFTokenizer:
        """The pair's tokenizer; any thread may use it."""
        return self._llm.tokenizer

    @property
    def block_size(self) -> int:
        """Tokens of one block of the target's KV cache."""
        return self._engine.blocks.block_size

    @property
    def num_used_blocks(self) -> int:
        """Blocks of the target's KV cache that requests hold at this moment."""
        return self._engine.blocks.num_used_blocks

    @property
    def max_sequence_tokens(self) -> int:
        """Prompt and output tokens that one sequence may have: what the pair was built for, or what the cache holds."""
        return min(self._engine.max_seq_len, self._engine.blocks.num_blocks * self.block_size)

    @property
    def num_open_requests(self) -> int:
        """Requests that are not yet answered in full."""
        return len(self._open)

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        timeout: float | None = None,
    ) -> RequestStream:
        """Queue a request, from any thread; does not wait for the engine.

        timeout: seconds from now, after which the request is aborted; its outputs then say so in `error`.

        Raises:
            RequestError: it can never be served; the text says why.
            QueueFullError, NotReadyError: not now.
        """
        try:
            return self._submit(prompt, params or SamplingParams(), request_id, timeout)
        except RequestError:
            self._events.refused("bad_request")
            raise
        except QueueFullError:
            self._events.refused("queue_full")
            raise
        except NotReadyError:
            self._events.refused("not_ready")
            raise

    def abort(self, request_id: str) -> bool:
        """End a request within a step, from any thread; False if there is none that is open."""
        with self._changed:
            submission = self._open.get(request_id)
        return submission is not None and self._abort(submission.stream)

    def drain(self, timeout: float) -> None:
        """Refuse new requests, let open ones end, abort those still open after `timeout` seconds; then stop."""
        with self._changed:
            if self._status == "ready":
                self._status = "draining"
            self._abort_at = min(self._abort_at, time.monotonic() + timeout)
            self._changed.notify_all()
        self._thread.join()

    def __enter__(self) -> AsyncLLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.drain(0)

    def _submit(
        self, prompt: Prompt, params: SamplingParams, request_id: str | None, timeout: float | None
    ) -> RequestStream:
        if timeout is not None and not timeout > 0:
            raise RequestError(f"timeout is {timeout} s; give a time above 0, or None for no limit")
        text = prompt if isinstance(prompt, str) else None
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        checked = self._engine.check(ids, params, text)
        with self._changed:
            self._check_open()
            name = self._new_id() if request_id is None else request_id
            if name in self._open:
                raise id_in_use(name)
            submission = _Submission(
                stream=RequestStream(name, self._abort),
                request=checked,
                timeout=timeout,
                deadline=float("inf") if timeout is None else time.monotonic() + timeout,
            )
            self._open[name] = submission
            self._new.append(submission)
            self._events.submitted(name)
            self._changed.notify_all()
        return submission.stream

    def _abort(self, stream: RequestStream) -> bool:
        """By the stream itself: another request may have its id by now."""
        with self._changed:
            submission = self._open.get(stream.request_id)
            if submission is None or submission.stream is not stream:
                return False
            self._aborted.append(submission)
        return True

    def _check_open(self) -> None:
        if self._status == "failed":
            raise NotReadyError(f"the engine has failed ({self._error}); restart the server")
        if self._status != "ready":
            raise NotReadyError("the server is shutting down; send the request to another one")
        if len(self._open) >= self.max_queue_size:
            raise QueueFullError(
                f"{len(self._open)} requests are open, and max_queue_size is {self.max_queue_size}; try again later"
            )

    def _new_id(self) -> str:
        return next(name for name in map(str, self._ids) if name not in self._open)

    def _serve(self) -> None:
        """The engine's thread."""
        try:
            while self._wait_for_work():
                self._admit()
                self._end_overdue()
                self._step()
        except BaseException as error:  # whatever it is, nobody may wait for an answer that never comes
            logger.exception("the engine has failed")
            self._fail(f"{type(error).__name__}: {error}")

    def _step(self) -> None:
        start = time.perf_counter()
        outputs = self._engine.step()
        self._events.stepped(outputs, time.perf_counter() - start)  # before a reader can ask for the numbers
        for output in outputs:
            self._deliver(output)

    def _wait_for_work(self) -> bool:
        """Sleep while there is nothing to do; False when all is done."""
        with self._changed:
            self._changed.wait_for(lambda: self._open or self._status == "draining")
            if self._open:
                return True
            self._status = "stopped"
        return False

    def _admit(self) -> None:
        """Hand what was submitted and aborted since the last step to the engine."""
        with self._changed:
            new, self._new = self._new, []
            aborted, self._aborted = self._aborted, []
        for each in new:
            self._hand_over(each)
        for each in aborted:
            self._end(each)

    def _hand_over(self, each: _Submission) -> None:
        try:
            self._engine.add(each.stream.request_id, each.request)
        except RequestError as error:
            self._events.failed(each.stream.request_id)
            self._close(each)
            each.stream.fail(error)

    def _end_overdue(self) -> None:
        now = time.monotonic()
        with self._changed:
            submissions = list(self._open.values())
        for each in submissions:
            if now >= each.deadline:
                self._end(each, f"the request's time limit of {each.timeout:g} s is over")
            elif now >= self._abort_at:
                self._end(each, "the server is shutting down")

    def _end(self, submission: _Submission, error: str | None = None) -> None:
        """Abort a request, with what went wrong as the text of its unfinished outputs."""
        if self._open.get(submission.stream.request_id) is not submission:
            return  # it has ended meanwhile
        output = self._engine.abort(submission.stream.request_id)
        if output is None:
            return  # submitted, and not yet handed to the engine
        outputs = [replace(each, error=error) if each.finish_reason == "abort" else each for each in output.outputs]
        output = replace(output, outputs=outputs)
        self._events.finished(output)
        self._deliver(output)

    def _deliver(self, output: RequestOutput) -> None:
        submission = self._open[output.request_id]
        if output.finished:
            self._close(submission)
        submission.stream.put(output)

    def _close(self, submission: _Submission) -> None:
        with self._changed:
            del self._open[submission.stream.request_id]

    def _fail(self, text: str) -> None:
        with self._changed:
            self._status, self._error = "failed", text
            failed, self._open = self._open, {}
        for each in failed.values():
            each.stream.fail(EngineFailedError(f"the engine has failed: {text}"))
        for name in failed:
            self._events.failed(name)
