"""Refuses requests that a foreign web page may have sent.

A server without keys trusts its machine, and so every page that a browser there has open. A foreign
page has two ways to abuse that. It may send requests to 127.0.0.1: it cannot read the answers, but
the work is done. Browsers send an Origin with every request except plain reads, so a foreign Origin
that is not allowed is refused. Or it may make its own name resolve to 127.0.0.1 after it was loaded
(DNS rebinding), and then it reads the answers, too. The Host header then has that name, so foreign
names are refused. IP addresses cannot be rebound and are accepted as Host.

A wrong content type alone is not refused, because `curl -d` claims to send a form. Programs send no
Origin; a request with one comes from a page and must be JSON, which an HTML form cannot send.
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

# Names that no public name server resolves; the last two are how a container calls its host
# machine.
LOCAL_HOSTS = frozenset({"localhost", "host.docker.internal", "host.containers.internal"})
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
ANY_ORIGIN = "*"
DEFAULT_PORTS = {"http": ":80", "https": ":443"}  # ports that browsers leave out of an Origin


class OriginGuard:
    """Middleware, the outermost one."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self.app, self._settings = app, settings
        self._hosts = LOCAL_HOSTS | {settings.host.lower(), *map(_host_name, settings.allow_hosts)}
        # With keys the server needs no protection: a page does not know the key.
        self._any_host = (
            bool(settings.keys) or ANY_ORIGIN in settings.allow_hosts or ANY_ORIGIN in settings.cors
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request, or refuse it."""
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
        """Raise ApiError for a request that a foreign page sent or may have sent."""
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
        name = _host_name(host)
        return name in self._hosts or name.endswith(".localhost") or _is_ip_address(name)


def parse_origin(text: str) -> str:
    """Return an origin given to --cors in the form that browsers send. `*` allows any page, `null`
    pages without an address.

    Raises UserError for a text that is not an origin and would therefore allow no page.
    """
    if text in (ANY_ORIGIN, "null"):
        return text
    netloc, (scheme, _, address) = _netloc(text), text.lower().partition("://")
    if not netloc or address.rstrip("/") != netloc or "@" in netloc:
        hint = "an origin is the beginning of an address: --cors https://app.example (* allows any)"
        raise UserError(f"--cors {text!r} is not an origin", hint=hint)
    return f"{scheme}://{netloc.removesuffix(DEFAULT_PORTS.get(scheme, ' '))}"


def parse_host(text: str) -> str:
    """Return a host name given to --allow-host. Raises UserError for a text that is not one."""
    name = ANY_ORIGIN if text == ANY_ORIGIN else _host_name(text)
    if not name or set(name) & set("/ @?#"):
        raise UserError(
            f"--allow-host {text!r} is not a host name",
            hint="--allow-host llm.example, without http://",
        )
    return name


def _netloc(origin: str) -> str:
    """Return the host and port of an origin; "" if it is not an address."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def _host_name(host: str) -> str:
    """Return a Host in lower case, without its port and without the dot that ends a full name."""
    name, _, port = host.rpartition(":")
    host_name = name if name and port.isdigit() else host
    return host_name.strip("[]").rstrip(".").lower()[:255]


def _is_ip_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
