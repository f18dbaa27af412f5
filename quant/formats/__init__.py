"""FORMATS: the supported block formats, by ggml's type name in capitals."""

from quant.formats.base import Format
from quant.registry import collect

FORMATS: dict[str, Format] = collect(__name__, "FORMATS")
