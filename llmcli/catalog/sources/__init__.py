"""The kinds of sources from which weights can be fetched, such as the hub. Each module of this
folder exports a tuple SOURCES.
"""

from llmcli.catalog.sources.base import ModelSource
from quant.registry import collect

SOURCES: dict[str, ModelSource] = collect(__name__, "SOURCES")
