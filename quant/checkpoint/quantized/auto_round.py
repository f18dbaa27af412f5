"""AutoRound checkpoints (quant_method auto-round). `packing_format` in the settings says how the
matrices are packed:

- auto_round:auto_gptq and auto_round:gptq: as in GPTQ, each zero stored minus one.
- auto_round and auto_round:gptqmodel: as in GPTQ, the zeros as they are.
- auto_round:auto_awq and auto_round:awq: as in AWQ's gemm layout.
- auto_round:llm_compressor: NVFP4 and MXFP4 as in compressed-tensors.

The layers may have different numbers of bits (`extra_config`). The bits of a matrix follow from the
shapes of its zeros and scales: codes of 2 to 8 bits without unused bits, so that those of 3, 5, 6
and 7 bits may be split over two words (auto_round_extension/torch/qlinear_torch.py).
"""

from quant.checkpoint.config import CheckpointConfig
from quant.checkpoint.quantized import awq, compressed_tensors, gptq
from quant.checkpoint.quantized.base import REFETCH_HINT, QuantizedInput, make_input_error
from quant.checkpoint.safetensors import Tensors

MIN_BITS, MAX_BITS = 2, 8
# Packing -> number that is subtracted from each zero before it is stored.
PACKING_OFFSETS = {
    "auto": 1,
    "auto_gptq": 1,
    "gptq": 1,
    "auto_round": 0,
    "gptqmodel": 0,
}
UNSUPPORTED_SETTINGS = ("rotation_config", "transform_config")


def restore(settings: CheckpointConfig, tensors: Tensors) -> Tensors:
    """Return the tensors with each quantized matrix replaced by one float matrix, and MXFP4 by
    ggml's blocks. Raises UserError for settings and tensors that are not supported.
    """
    values = settings.values
    if unsupported := [key for key in UNSUPPORTED_SETTINGS if values.get(key)]:
        raise make_input_error(
            settings, f"AutoRound with {' and '.join(unsupported)} is not supported"
        )
    packing = str(values.get("packing_format") or "auto_round:auto_gptq")
    packing = packing.removeprefix("auto_round:").partition(":")[0]
    if "llm_compressor" in packing:
        if "e5m3" in packing:
            raise make_input_error(
                settings, "AutoRound's NVFP4 with scales in E5M3 is not supported"
            )
        fp4_settings = CheckpointConfig({"format": "nvfp4-pack-quantized"}, settings.location)
        return compressed_tensors.restore(fp4_settings, tensors)
    if "awq" in packing:
        return awq.restore_matrices(settings, tensors, "gemm")
    if packing not in PACKING_OFFSETS:
        raise make_input_error(settings, f"AutoRound's packing {packing!r} is not supported")

    def find_bits(base: str) -> int:
        scales, qzeros = tensors.get(f"{base}scales"), tensors.get(f"{base}qzeros")
        if scales is None or qzeros is None:
            return MAX_BITS  # the missing tensor is reported later
        bits = 32 * qzeros.shape[-1] // scales.shape[-1]
        if not MIN_BITS <= bits <= MAX_BITS:
            raise make_input_error(
                settings,
                f"{scales.name} {list(scales.shape)} and {qzeros.name} {list(qzeros.shape)} fit no "
                f"codes of {MIN_BITS} to {MAX_BITS} bits",
                hint=REFETCH_HINT,
            )
        return bits

    return gptq.restore_matrices(settings, tensors, find_bits, PACKING_OFFSETS[packing])


INPUTS = (
    QuantizedInput("auto-round", "AutoRound", restore),
    QuantizedInput("intel/auto-round", "AutoRound", restore),
)
