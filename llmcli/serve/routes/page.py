"""`/`: a page to talk with the model. One document that loads nothing; what it may run is named by
its hash.
"""

import base64
import functools
import hashlib
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from llmcli.serve.routes.base import Route, Service

PARTS = Path(__file__).parents[1] / "page"


@functools.cache
def page() -> tuple[str, dict[str, str]]:
    """The document and its headers: nothing runs or is asked for but what stands in it and this
    server's API.
    """
    parts = {
        name: (PARTS / file).read_text("utf-8")
        for name, file in (("style", "page.css"), ("script", "page.js"))
    }
    document = (PARTS / "page.html").read_text(encoding="utf-8")
    for name, text in parts.items():
        assert f"</{name}" not in text, name
        document = document.replace(f"{{{{{name}}}}}", text)
    policy = {
        "default-src": "'none'",
        "script-src": _hash(parts["script"]),
        "connect-src": "'self'",
        "img-src": "data:",
        # What the script sets on an element's style is not of this: a style in the document's text
        # would be.
        "style-src": _hash(parts["style"]),
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return document, {
        "content-security-policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
        "cross-origin-opener-policy": "same-origin",
    }


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


async def show(service: Service, request: Request) -> Response:
    """The page; it holds no secret, and asks for a key where the API wants one."""
    document, headers = page()
    return Response(document, headers=headers, media_type="text/html; charset=utf-8")


ROUTES = (Route("/", show, paths=("/index.html",), open=True),)
