"""INPUTS: the quantized checkpoint formats that can be read, by the value of quant_method in
config.json.
"""

from quant.checkpoint.quantized.base import QuantizedInput
from quant.registry import collect

INPUTS: dict[str, QuantizedInput] = collect(__name__, "INPUTS")
