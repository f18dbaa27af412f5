"""`/`: the chat page. It is a single HTML document without external resources. Browsers run its
scripts and apply its style because the Content-Security-Policy lists their hashes.
"""

import base64
import functools
import hashlib
import re
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from llmcli.serve.http.service import Route, Service

PAGE_FOLDER = Path(__file__).parents[1] / "page"
STYLE = "page.css"
# In this order, because each script uses the names of those before it.
SCRIPTS = (
    "vendor/marked.umd.js",
    "vendor/purify.min.js",
    "api.js",
    "markdown.js",
    "attachments.js",
    "conversation.js",
    "store.js",
    "live.js",
    "page.js",
)
SOURCE_MAP = re.compile(r"^//# sourceMappingURL=.*$", re.MULTILINE)


@functools.cache
def build_page() -> tuple[str, dict[str, str]]:
    """Return the HTML document and its HTTP headers. The headers allow the page to run only its own
    scripts and to connect only to this server.
    """
    style = _read_part(STYLE)
    scripts = [_read_part(name) for name in SCRIPTS]
    assert "</style" not in style and not any("</script" in text for text in scripts)
    elements = "\n".join(f"<script>{text}</script>" for text in scripts)
    document = _read_part("page.html")
    document = document.replace(f"{{{{{STYLE}}}}}", style).replace("{{scripts}}", elements)
    policy = {
        "default-src": "'none'",
        "script-src": " ".join(source_hash(text) for text in scripts),
        "connect-src": "'self'",
        "img-src": "data:",
        # The script may set the style of an element, but a style attribute in the document itself
        # would be blocked.
        "style-src": source_hash(style),
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        # Only the sanitizer may turn text into elements.
        "require-trusted-types-for": "'script'",
        "trusted-types": "dompurify",
    }
    return document, {
        "content-security-policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
        "cross-origin-opener-policy": "same-origin",
    }


def _read_part(name: str) -> str:
    """Return the text of a file of the page, without the names of source maps, which are not
    served.
    """
    return SOURCE_MAP.sub("", (PAGE_FOLDER / name).read_text(encoding="utf-8"))


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
