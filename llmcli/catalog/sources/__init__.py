"""The kinds of sources for weights, by name; each module of this folder defines one."""

from llmcli.catalog.sources.base import ModelSource
from quant.registry import collect

SOURCES: dict[str, ModelSource] = collect(__name__, "SOURCES")
