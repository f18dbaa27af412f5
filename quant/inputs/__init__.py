"""INPUTS: the quantized formats that checkpoints may come in, by the quant_method of config.json."""

from quant.inputs.base import Input
from quant.registry import collect

INPUTS: dict[str, Input] = collect(__name__, "INPUTS")
