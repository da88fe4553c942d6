"""/v1/chat/completions."""

from collections.abc import Sequence

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from magicdec.runtime.openai.answers.answer import Answer
from magicdec.runtime.openai.answers.formats import ChatFormat
from magicdec.runtime.openai.requests.body import read_json
from magicdec.runtime.openai.requests.prompts import Prompt, chat_messages
from magicdec.runtime.openai.requests.protocol import ChatCompletionRequest, check_num_choices, parse
from magicdec.runtime.openai.respond import respond
from magicdec.runtime.openai.service import Service
from magicdec.runtime.sampling_params import SamplingParams


def chat_router(service: Service) -> APIRouter:
    """The endpoint, on this engine."""
    router = APIRouter()

    @router.post("/v1/chat/completions")
    async def chat(http: Request) -> Response:
        request = parse(ChatCompletionRequest, await read_json(http, service.limits.max_body_bytes))
        service.check_model(request.model)
        messages = chat_messages(request.messages)

        def prompts() -> list[Prompt]:
            return [Prompt(service.tokenizer.encode_chat(messages), None)]

        def params(ready: Sequence[Prompt]) -> SamplingParams:
            """As many tokens as there is room for, unless the client says how many."""
            room = max(service.max_seq_len - len(ready[0].token_ids), 1)
            asked = request.sampling_params(max_tokens=room, logprobs=request.num_logprobs)
            check_num_choices(1, asked.n)
            return asked

        generation = await service.generate("chatcmpl", prompts, params)
        shape = ChatFormat(service.token_text, request.top_logprobs or 0)
        answer = Answer(generation, request, shape, model=service.model, log=http.state.log)
        return await respond(http, generation, answer, stream=request.stream)

    return router
