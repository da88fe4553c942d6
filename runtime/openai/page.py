"""The page at `/`: one HTML document with its style and scripts inside, which shows what speculation does."""

import base64
import hashlib
from functools import cache
from importlib.resources import files

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

SCRIPTS = ("stream.js", "answer.js", "run.js", "plots.js", "page.js")  # in this order; the last one starts the page
page_router = APIRouter()


@page_router.get("/", include_in_schema=False)
def page() -> HTMLResponse:
    """The page, for anyone: it holds nothing that a key protects."""
    document, policy = built_page()
    return HTMLResponse(document, headers={"Content-Security-Policy": policy, "Cache-Control": "no-cache"})


@cache
def built_page() -> tuple[str, str]:
    """The document, and a policy that lets it run these scripts alone and talk to this server alone."""
    style, script = _read("style.css"), "\n".join(['"use strict";', *map(_read, SCRIPTS)])
    document = _read("page.html").replace("{{style}}", style).replace("{{script}}", script)
    policy = (
        f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return document, policy


def _read(name: str) -> str:
    return (files("magicdec.runtime.openai") / "web" / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
