"""ROUTES: the routes by their main path."""

from llmcli.serve.http.service import Route
from quant.registry import collect

ROUTES: dict[str, Route] = collect(__name__, "ROUTES", key="path")
