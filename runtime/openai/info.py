"""What a server tells about itself: its model, its version, its state, its numbers."""

from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import Response

from magicdec import __version__
from magicdec.runtime.openai.service import Service


def info_router(service: Service) -> APIRouter:
    """The endpoints that start no work."""
    router = APIRouter()

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(service)]}

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return _model(service)

    @router.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @router.get("/health")
    async def health() -> Response:
        """Whether it is worth keeping alive: a failed engine does not come back."""
        return _state(service, healthy=service.llm.status != "failed")

    @router.get("/ready")
    async def ready() -> Response:
        """Whether requests are taken."""
        return _state(service, healthy=service.llm.status == "ready")

    @router.get("/metrics")
    def metrics() -> Response:
        return Response(generate_latest(service.registry), media_type=CONTENT_TYPE_LATEST)

    return router


def _model(service: Service) -> dict[str, Any]:
    draft = service.llm.config.draft
    return {
        "id": service.model,
        "object": "model",
        "created": service.created,
        "owned_by": "magicdec",
        "max_model_len": service.max_seq_len,
        "magicdec": {"num_draft_tokens": draft.num_draft_tokens, "max_draft_len": draft.max_draft_len},
    }


def _state(service: Service, *, healthy: bool) -> JSONResponse:
    body = {"status": service.llm.status, "error": service.llm.error}
    return JSONResponse(body, 200 if healthy else 503)
