"""What `quantize` measures for a target size, if the user does not say: single tensors, on so many
chunks, and so many alternative mixes. This module imports nothing, because --help shows its values.
"""

PROBE_UNIT, PROBE_CHUNKS, SWAPS = "tensor", 4, 6
