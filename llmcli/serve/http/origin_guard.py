"""Refuses requests that a web page of a foreign origin may have sent.

A server without keys trusts all programs on its machine, and so every web page that is open in a
browser there. A foreign page can abuse this in two ways:

- It sends requests to 127.0.0.1. The page cannot read the responses, but the server does the work.
  Browsers add an Origin header to every request except plain reads, so a request with a foreign
  Origin that is not allowed is refused.
- It makes its own host name resolve to 127.0.0.1 after it was loaded (DNS rebinding). Then it can
  read the responses, too. The Host header contains that name, so foreign names are refused. IP
  addresses cannot be rebound and are accepted.

A wrong content type alone is no reason to refuse a request, because `curl -d` sends the content
type of an HTML form. But a request with an Origin comes from a page and must be JSON, which an HTML
form cannot send.
"""

import ipaddress
from collections.abc import Mapping
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from llmcli.api.errors import ApiError, error_document
from llmcli.api.server_settings import ServerSettings
from llmcli.errors import UserError
from llmcli.serve.http.exchange import json_response

# Names that no public name server resolves. In a container, the last two are the names of its host
# machine.
LOCAL_HOSTS = frozenset({"localhost", "host.docker.internal", "host.containers.internal"})
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
ANY_ORIGIN = "*"
DEFAULT_PORTS = {"http": ":80", "https": ":443"}  # ports that browsers leave out of an Origin


class OriginGuard:
    """ASGI middleware that refuses requests of foreign web pages. It must be the outermost
    middleware, so that a refused request causes no work.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self.app, self._settings = app, settings
        self._hosts = LOCAL_HOSTS | {host.lower() for host in settings.hosts}
        self._hosts |= set(map(_host_name, settings.allow_hosts))
        # With keys any host is accepted, because a foreign page does not have a key.
        self._any_host = (
            bool(settings.keys) or ANY_ORIGIN in settings.allow_hosts or ANY_ORIGIN in settings.cors
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application for a request, or refuse the request."""
        if scope["type"] in ("http", "websocket"):
            try:
                self.check_request(scope["type"], scope.get("method", "GET"), Headers(scope=scope))
            except ApiError as error:
                if scope["type"] == "websocket":
                    await send(
                        {"type": "websocket.close", "code": 1008, "reason": str(error)[:120]}
                    )
                else:
                    await json_response(error_document(error, scope["path"]), error.status)(
                        scope, receive, send
                    )
                return
        await self.app(scope, receive, send)

    def check_request(self, kind: str, method: str, headers: Mapping[str, str]) -> None:
        """Raise ApiError if a foreign page may have sent the request. `kind`: "http" or
        "websocket".
        """
        host, origin = headers.get("host"), headers.get("origin")
        if host is not None and not self._any_host and not self._is_own_host(host):
            name = _host_name(host)
            raise ApiError(
                f"this server is not called {name!r};"
                f" start it with --allow-host {name} to accept it",
                403,
            )
        if origin is None or (self._settings.keys and kind == "http"):
            return
        is_own = _netloc(origin) == (host or "").lower() != ""
        if (
            not is_own
            and origin not in self._settings.cors
            and ANY_ORIGIN not in self._settings.cors
        ):
            raise ApiError(
                f"pages of {origin[:100]!r} may not use this server;"
                f" start it with --cors {origin[:100]} to allow them",
                403,
            )
        content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
        if (
            kind == "http"
            and method not in SAFE_METHODS
            and not (content_type.endswith("json") or content_type == "")
        ):
            raise ApiError(f"a web page must send application/json, not {content_type[:60]}", 415)

    def _is_own_host(self, host: str) -> bool:
        """Return whether a Host header names this server."""
        name = _host_name(host)
        return name in self._hosts or name.endswith(".localhost") or _is_ip_address(name)


def parse_origin(text: str) -> str:
    """Return an origin of `--cors` as browsers write it in the Origin header. `*` stands for any
    page, `null` for pages without an address, such as files.

    Raises UserError for any other text, because it would silently allow no page.
    """
    if text in (ANY_ORIGIN, "null"):
        return text
    netloc, (scheme, _, address) = _netloc(text), text.lower().partition("://")
    if not netloc or address.rstrip("/") != netloc or "@" in netloc:
        hint = "an origin is the beginning of an address: --cors https://app.example (* allows any)"
        raise UserError(f"--cors {text!r} is not an origin", hint=hint)
    return f"{scheme}://{netloc.removesuffix(DEFAULT_PORTS.get(scheme, ' '))}"


def parse_host(text: str) -> str:
    """Return a host name of `--allow-host`. Raises UserError for a text that is not a host name."""
    name = ANY_ORIGIN if text == ANY_ORIGIN else _host_name(text)
    if not name or set(name) & set("/ @?#"):
        raise UserError(
            f"--allow-host {text!r} is not a host name",
            hint="--allow-host llm.example, without http://",
        )
    return name


def _netloc(origin: str) -> str:
    """Return the host and the port of an origin in lower case; "" if the origin is invalid."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def _host_name(host: str) -> str:
    """Return the host name of a Host header in lower case, without the port and without a final
    dot.
    """
    name, _, port = host.rpartition(":")
    host_name = name if name and port.isdigit() else host
    return host_name.strip("[]").rstrip(".").lower()[:255]


def _is_ip_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
