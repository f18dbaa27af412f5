"""INPUTS: the formats of quantized checkpoints that can be read, by config.json's quant_method."""

from quant.checkpoint.quantized.base import QuantizedInput
from quant.registry import collect

INPUTS: dict[str, QuantizedInput] = collect(__name__, "INPUTS")
