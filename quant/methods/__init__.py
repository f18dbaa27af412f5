"""METHODS: the quantization methods, by the name that `quantize --method` takes."""

from quant.methods.base import Method
from quant.registry import collect

METHODS: dict[str, Method] = collect(__name__, "METHODS")
