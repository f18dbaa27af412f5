"""FORMATS: the block formats of ggml that this package can pack and unpack, by their type name in
capitals ("Q4_K").
"""

from quant.formats.base import BlockFormat
from quant.registry import collect

FORMATS: dict[str, BlockFormat] = collect(__name__, "FORMATS")
