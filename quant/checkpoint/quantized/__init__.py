"""INPUTS: the formats of quantized checkpoints that can be read, by config.json's quant_method."""

from quant.checkpoint.quantized.base import Input
from quant.registry import collect

INPUTS: dict[str, Input] = collect(__name__, "INPUTS")
