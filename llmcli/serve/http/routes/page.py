"""`/`: the chat page. It is a single HTML document without external resources. Browsers run its
script and apply its style because the Content-Security-Policy lists their hashes.
"""

import base64
import functools
import hashlib
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from llmcli.serve.http.service import Route, Service

PAGE_FOLDER = Path(__file__).parents[1] / "page"


@functools.cache
def build_page() -> tuple[str, dict[str, str]]:
    """Return the HTML document and its HTTP headers. The headers allow the page to run only its own
    script and to connect only to this server.
    """
    parts = {
        name: (PAGE_FOLDER / file).read_text("utf-8")
        for name, file in (("style", "page.css"), ("script", "page.js"))
    }
    document = (PAGE_FOLDER / "page.html").read_text(encoding="utf-8")
    for name, text in parts.items():
        assert f"</{name}" not in text, name
        document = document.replace(f"{{{{{name}}}}}", text)
    policy = {
        "default-src": "'none'",
        "script-src": source_hash(parts["script"]),
        "connect-src": "'self'",
        "img-src": "data:",
        # The script may set the style of an element, but a style attribute in the document itself
        # would be blocked.
        "style-src": source_hash(parts["style"]),
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


def source_hash(text: str) -> str:
    """Return the hash of a script or style as it is written in a Content-Security-Policy."""
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


async def show_page(service: Service, request: Request) -> Response:
    """Respond with the page. It needs no API key, because it contains no secret; the page asks for
    a key if the API needs one.
    """
    document, headers = build_page()
    return Response(document, headers=headers, media_type="text/html; charset=utf-8")


ROUTES = (Route("/", show_page, further_paths=("/index.html",), is_public=True),)
