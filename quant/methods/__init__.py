"""METHODS: the quantization methods by their name in `quantize --method`."""

from quant.methods.base import Method
from quant.registry import collect

METHODS: dict[str, Method] = collect(__name__, "METHODS")
