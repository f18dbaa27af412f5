"""FORMATS: the block formats whose fields are known here, by ggml's name in capitals."""

from quant.formats.base import Format
from quant.registry import collect

FORMATS: dict[str, Format] = collect(__name__, "FORMATS")
