"""The kinds of places that weights come from, by name; each module here is one."""

from llmcli.catalog.sources.base import Source
from quant.registry import collect

SOURCES: dict[str, Source] = collect(__name__, "SOURCES")
