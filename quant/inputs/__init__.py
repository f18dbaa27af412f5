"""INPUTS: the formats of quantized checkpoints that can be read, by config.json's quant_method."""

from quant.inputs.base import Input
from quant.registry import collect

INPUTS: dict[str, Input] = collect(__name__, "INPUTS")
