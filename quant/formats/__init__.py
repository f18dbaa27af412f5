"""FORMATS: the supported block formats, by ggml's type name in capitals ("Q4_K")."""

from quant.formats.base import BlockFormat
from quant.registry import collect

FORMATS: dict[str, BlockFormat] = collect(__name__, "FORMATS")
