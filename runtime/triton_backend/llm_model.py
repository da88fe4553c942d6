"""`tensorrt_llm` as Triton's Python backend loads it: token ids in, token ids out."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from magicdec.runtime.llm import LLM
from magicdec.runtime.parallel.leader import leave_ranks
from magicdec.runtime.serving.async_llm import AsyncLLM
from magicdec.runtime.triton_backend import wire
from magicdec.runtime.triton_backend.llm.metrics import TRTLLMMetrics
from magicdec.runtime.triton_backend.llm.request import RequestReader
from magicdec.runtime.triton_backend.llm.service import LLMService
from magicdec.runtime.triton_backend.parameters import LLMParameters

DRAIN_SECONDS: Final = 30.0  # that open requests get to end when the model is unloaded


class LLMModel:
    """Owns the engine. Under mpiexec this process is rank 0, and the engine's other ranks are its workers."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Called once by Triton. args: JSON of the configuration, and names."""
        given = LLMParameters.read(wire.parameters(args["model_config"]))
        llm = LLM(given.engine_dir, **given.engine_options())
        reader = RequestReader(
            eos_token_ids=frozenset(llm.engine.eos_token_ids),
            vocab_size=llm.runner.vocab_size,
            decode=llm.tokenizer.decode,
            decoupled=wire.is_decoupled(args),
            exclude_input=given.exclude_input_in_output,
        )
        labels = {"model": args["model_name"], "version": args["model_version"]}
        self._metrics = TRTLLMMetrics(llm, wire.new_metric_family, labels)
        served = AsyncLLM(llm, max_queue_size=given.max_queue_size, metrics=self._metrics)
        self._service = LLMService(served, reader, period=given.cancellation_check_period_ms / 1000)
        self._service.every(given.stats_check_period_ms / 1000, self._metrics.publish)

    def execute(self, requests: Sequence[Any]) -> None:
        """Hand requests to the engine; answers are sent as they come."""
        for request in requests:
            sender = wire.ResponseSender(request)
            try:
                tensors = wire.read_tensors(request)
            except Exception as error:  # raised from here it would end all requests
                sender.fail(error, final=True)
                continue
            self._service.start(request.request_id(), tensors, sender, timeout=wire.read_timeout(request))

    def finalize(self) -> None:
        """Called once by Triton, when the model is unloaded; its process ends then."""
        self._service.close(DRAIN_SECONDS)
        self._metrics.close()
        leave_ranks()
