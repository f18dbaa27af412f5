"""`/openapi.json` and `/docs`: the paths of the server, and the fields of their requests."""

import functools
import html
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llmcli import __version__
from llmcli.api.bodies.base import RequestBody
from llmcli.api.bodies.openapi import Operation, describe_api
from llmcli.api.bodies.reference import inner_bodies, rows_of
from llmcli.serve.http.exchange import json_response
from llmcli.serve.http.routes.page import source_hash
from llmcli.serve.http.service import Route, Service

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; width: 100% }
th, td { border-bottom: 1px solid #8886; padding: .3rem .6rem; text-align: left; vertical-align: top }
code { font-family: ui-monospace, monospace }
:root { color-scheme: light dark }
"""
HEAD = (
    '<!doctype html><html lang="en"><meta charset="utf-8"><title>llmcli serve</title>'
    '<meta name="viewport" content="width=device-width">'
    "<style>{style}</style><h1>llmcli serve {version}</h1>"
    '<p>The same as JSON: <a href="openapi.json">openapi.json</a></p>'
)


async def show_openapi(service: Service, request: Request) -> Response:
    """Respond with the description of the server's paths in the format of OpenAPI."""
    routes = tuple(service.routes)
    return await service.bridge.run_in_worker(openapi_response, routes)


async def show_docs(service: Service, request: Request) -> Response:
    """Respond with a page that lists the paths and the fields of their requests. It has no script,
    and its Content-Security-Policy allows none.
    """
    return await service.bridge.run_in_worker(docs_response, tuple(service.routes))


def openapi_response(routes: Sequence[Route]) -> Response:
    """Return the response of show_openapi() for these routes."""
    return json_response(_describe(routes))


def docs_response(routes: Sequence[Route]) -> Response:
    """Return the response of show_docs() for these routes."""
    policy = f"default-src 'none'; style-src {source_hash(STYLE)}; frame-ancestors 'none'"
    headers = {"content-security-policy": policy, "x-content-type-options": "nosniff"}
    return Response(_page(routes), headers=headers, media_type="text/html; charset=utf-8")


@functools.cache
def _describe(routes: Sequence[Route]) -> dict[str, Any]:
    """Return the description of the routes in the format of OpenAPI."""
    return describe_api(_operations(routes), __version__)


@functools.cache
def _page(routes: Sequence[Route]) -> str:
    """Return the page as HTML."""
    return "".join([HEAD.format(style=STYLE, version=__version__), *_sections(routes)])


def _sections(routes: Sequence[Route]) -> Iterator[str]:
    schemas = _describe(routes)["components"]["schemas"]
    shown: dict[type[RequestBody], None] = {}
    yield "<h2>Paths</h2>"
    rows = []
    for operation in _operations(routes):
        body_type = operation.body_type
        link = f'<a href="#{body_type.__name__}">{body_type.__name__}</a>' if body_type else ""
        methods = " ".join(operation.methods)
        rows.append((methods, _code(operation.path), html.escape(operation.summary), link))
        if body_type:
            shown |= dict.fromkeys([body_type, *inner_bodies(body_type)])
    yield _table(("method", "path", "what it does", "body"), rows)
    for body_type in shown:
        name = body_type.__name__
        yield f'<h2 id="{name}">{name}</h2><p>{html.escape(inspect.getdoc(body_type) or "")}</p>'
        yield _table(
            ("field", "values", "of", "what the server does with it"),
            [
                (_code(row.name), *map(html.escape, (row.values, row.origin, row.description)))
                for row in rows_of(body_type, schemas[name])
            ],
        )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of cells in HTML."""
    titles = "".join(f"<th>{title}" for title in head)
    lines = "".join("<tr>" + "".join(f"<td>{cell}" for cell in row) for row in rows)
    return f"<table><tr>{titles}{lines}</table>"


def _code(text: str) -> str:
    return f"<code>{html.escape(text)}</code>"


def _operations(routes: Sequence[Route]) -> Iterator[Operation]:
    """Yield the operations of the server, also those of further paths. WebSockets have none."""
    for route in routes:
        for path in (route.path, *route.further_paths) if not route.is_websocket else ():
            yield Operation(
                path.replace(":path}", "}"),
                route.methods,
                _summary(route.handle, route.body_type),
                route.body_type,
                route.is_public,
            )


def _summary(handle: Callable[..., Any], body_type: type[RequestBody] | None) -> str:
    """Return what a path does: the first sentence about its handler, or about its body."""
    function = handle.func if isinstance(handle, functools.partial) else handle
    text = " ".join((inspect.getdoc(function) or inspect.getdoc(body_type) or "").split())
    return text.split(". ")[0].split(": ")[0].rstrip(".")


ROUTES = (
    Route("/openapi.json", show_openapi, is_public=True),
    Route("/docs", show_docs, is_public=True),
)
