"""The application: endpoints, errors and what is around them."""

from collections.abc import Sequence

from fastapi import FastAPI

from magicdec import __version__
from magicdec.runtime.openai.chat import chat_router
from magicdec.runtime.openai.completions import completions_router
from magicdec.runtime.openai.errors import install_error_handlers
from magicdec.runtime.openai.info import info_router
from magicdec.runtime.openai.middleware import ApiKeys, RequestLog
from magicdec.runtime.openai.page import page_router
from magicdec.runtime.openai.service import Service


def make_app(service: Service, api_keys: Sequence[str] = ()) -> FastAPI:
    """An ASGI application that serves one engine. api_keys: what /v1 asks for; none leaves it open."""
    # FastAPI's own pages are off: they load scripts from elsewhere.
    app = FastAPI(title="MagicDec", version=__version__, openapi_url=None)
    for router in (completions_router(service), chat_router(service), info_router(service), page_router):
        app.include_router(router)
    install_error_handlers(app)
    if api_keys:
        app.add_middleware(ApiKeys, keys=api_keys)
    app.add_middleware(RequestLog)
    return app
