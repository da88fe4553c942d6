"""/v1/completions."""

from collections.abc import Sequence

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from magicdec.runtime.openai.answers.answer import Answer
from magicdec.runtime.openai.answers.formats import CompletionFormat
from magicdec.runtime.openai.errors import ApiError
from magicdec.runtime.openai.requests.body import read_json
from magicdec.runtime.openai.requests.prompts import Prompt, completion_prompts
from magicdec.runtime.openai.requests.protocol import CompletionRequest, check_num_choices, parse
from magicdec.runtime.openai.respond import respond
from magicdec.runtime.openai.service import Service
from magicdec.runtime.sampling_params import SamplingParams


def completions_router(service: Service) -> APIRouter:
    """The endpoint, on this engine."""
    router = APIRouter()

    @router.post("/v1/completions")
    async def completions(http: Request) -> Response:
        request = parse(CompletionRequest, await read_json(http, service.limits.max_body_bytes))
        service.check_model(request.model)
        if request.echo and request.logprobs is not None:
            raise ApiError(
                400, "echo does not go with logprobs: only those of output tokens are supported", param="echo"
            )
        params = request.sampling_params(logprobs=request.logprobs)

        def checked(prompts: Sequence[Prompt]) -> SamplingParams:
            check_num_choices(len(prompts), params.n)
            return params

        generation = await service.generate(
            "cmpl", lambda: completion_prompts(request.prompt, service.tokenizer), checked
        )
        echo = [_text(prompt, service) for prompt in generation.prompts] if request.echo else None
        shape = CompletionFormat(service.token_text)
        answer = Answer(generation, request, shape, model=service.model, log=http.state.log, echo=echo)
        return await respond(http, generation, answer, stream=request.stream)

    return router


def _text(prompt: Prompt, service: Service) -> str:
    return service.tokenizer.decode(prompt.token_ids) if prompt.text is None else prompt.text
