"""Refuses requests that a foreign web page may have made.

A server without keys trusts its machine, and with it every page that a browser there has open. A
foreign page has two ways in. It may send requests to 127.0.0.1: it cannot read the answers, but the
work is done. Browsers send an Origin with everything but plain reading, so an Origin that is
neither ours nor allowed is refused. Or it may let its own name resolve to 127.0.0.1 once it is
loaded (DNS rebinding), and then it reads the answers, too. Then Host is that name, so a foreign
name is refused. An address cannot be rebound: as Host it passes.

2026-11-22: llama-server checks neither and answers every page (its CORS default is *). ollama
checks both, and its issues are full of 403s without a reason. A wrong content type alone is no
reason to refuse: `curl -d` claims to send a form. Programs send no Origin; a request that has one
comes from a page and must be JSON, which no form can send.
"""

import ipaddress
from collections.abc import Mapping
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from llmcli.errors import UserError
from llmcli.serve.problems import Problem, document
from llmcli.serve.settings import Settings
from llmcli.serve.stream import json_response

# What no name server of the world gives out; the last two are how a container calls the machine
# that runs it.
OURS = frozenset({"localhost", "host.docker.internal", "host.containers.internal"})
READING = ("GET", "HEAD", "OPTIONS")
ANY = "*"
USUAL = {"http": ":80", "https": ":443"}  # ports that browsers leave out


class Guard:
    """Middleware, the outermost."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self.app, self._settings = app, settings
        self._hosts = OURS | {settings.host.lower(), *map(_name, settings.allow_hosts)}
        # A page has no key, and none that it could be made to send.
        self._any_host = bool(settings.keys) or ANY in settings.allow_hosts or ANY in settings.cors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or say why not."""
        if scope["type"] in ("http", "websocket"):
            try:
                self.check(scope["type"], scope.get("method", "GET"), Headers(scope=scope))
            except Problem as error:
                if scope["type"] == "websocket":
                    await send(
                        {"type": "websocket.close", "code": 1008, "reason": str(error)[:120]}
                    )
                else:
                    await json_response(document(error, scope["path"]), error.status)(
                        scope, receive, send
                    )
                return
        await self.app(scope, receive, send)

    def check(self, kind: str, method: str, headers: Mapping[str, str]) -> None:
        """Raise Problem for a request that a foreign page sent, or may have sent."""
        host, origin = headers.get("host"), headers.get("origin")
        if host is not None and not self._any_host and not self._ours(host):
            name = _name(host)
            raise Problem(
                f"this server does not go by the name {name!r}; --allow-host {name} lets it in", 403
            )
        if origin is None or (self._settings.keys and kind == "http"):
            return
        own = _netloc(origin) == (host or "").lower() != ""
        if not own and origin not in self._settings.cors and ANY not in self._settings.cors:
            raise Problem(
                f"pages of {origin[:100]!r} may not ask this server; --cors {origin[:100]} lets them",
                403,
            )
        sort = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind == "http" and method not in READING and not (sort.endswith("json") or sort == ""):
            raise Problem(f"a page must send application/json, not {sort[:60]}", 415)

    def _ours(self, host: str) -> bool:
        name = _name(host)
        return name in self._hosts or name.endswith(".localhost") or _number(name)


def origin(text: str) -> str:
    """An origin typed for --cors, in the form that browsers send; `*` is any page, `null` one
    without an address.

    Raises UserError for what is no origin: it would let no page in.
    """
    if text in (ANY, "null"):
        return text
    netloc, (scheme, _, rest) = _netloc(text), text.lower().partition("://")
    if not netloc or rest.rstrip("/") != netloc or "@" in netloc:
        hint = "an origin is how an address begins: --cors https://app.example (* is any page)"
        raise UserError(f"--cors {text!r} is no origin", hint=hint)
    return f"{scheme}://{netloc.removesuffix(USUAL.get(scheme, ' '))}"


def host(text: str) -> str:
    """A name typed for --allow-host. Raises UserError for what is none."""
    found = ANY if text == ANY else _name(text)
    if not found or set(found) & set("/ @?#"):
        raise UserError(
            f"--allow-host {text!r} is no name", hint="--allow-host llm.example, without http://"
        )
    return found


def _netloc(origin: str) -> str:
    """Where a page is from; "" where that is no address."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def _name(host: str) -> str:
    """A Host without its port, small, without the dot that ends a full name."""
    name, _, port = host.rpartition(":")
    found = name if name and port.isdigit() else host
    return found.strip("[]").rstrip(".").lower()[:255]


def _number(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
