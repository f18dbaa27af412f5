#!/usr/bin/env python3
"""Compare the values that quantized checkpoints have here with those of the library of each format.

usage: .venv/bin/python scripts/quality/quantized_checkpoints.py
           [--rows N] [--columns N] [--only NAME]

For each format, the format's own library quantizes a random matrix. Its tensors are read as those
of a checkpoint (quant/checkpoint/quantized), and the values are compared with those that the
library computes from the same tensors in float32. The script prints the largest difference, also
as the number of float32 steps between the two values (units in the last place).

Needs torch and the libraries, which pip installs: auto-round, autoawq, bitsandbytes,
compressed-tensors, nvidia-modelopt and transformers. A format whose library is missing is not
compared, and its row says so. The exit status is 1 if a value differs by more than one unit in the
last place.
"""

import argparse
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch

from tests.quant.checkpoint.quantized.stored import Stored, floats, restore

NAME = "layer.weight"
DTYPES = {torch.float8_e4m3fn: "F8_E4M3", torch.bfloat16: "BF16"}
# A quantized matrix [rows, columns]: the settings of the checkpoint, its tensors, and the values
# that the library computes from them.
Case = tuple[dict[str, Any], dict[str, torch.Tensor], torch.Tensor]


def main() -> None:
    """Parse the flags, and print one row for each format."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--columns", type=int, default=512)
    parser.add_argument("--only", default="", help="a part of the formats' names")
    args = parser.parse_args()
    print("| format | library | values | largest difference | units in the last place |")
    print("|---|---|---|---|---|")
    worst = 0
    for name, (library, make_case) in CASES.items():
        if args.only not in name:
            continue
        torch.manual_seed(0)
        weight = torch.randn(args.rows, args.columns) * 0.05
        try:
            settings, tensors, expected = make_case(weight)
        except ImportError as error:
            print(f"| {name} | {library}: not installed ({error}) | | | |")
            continue
        actual = decode_matrix(settings, tensors)
        units = int(abs(ordinals(actual) - ordinals(expected.float().numpy())).max())
        difference = float(np.abs(actual - expected.float().numpy()).max())
        version = importlib.metadata.version(library)
        print(f"| {name} | {library} {version} | {actual.size:,} | {difference:g} | {units} |")
        worst = max(worst, units)
    sys.exit(worst > 1)


def decode_matrix(settings: dict[str, Any], tensors: dict[str, torch.Tensor]) -> np.ndarray:
    """Return the values of the matrix that the tensors of a checkpoint contain."""
    arrays: dict[str, Any] = {}
    for name, tensor in tensors.items():
        data = tensor.detach().contiguous()
        if data.dtype in DTYPES:
            size = {1: torch.uint8, 2: torch.int16}[data.itemsize]
            arrays[name] = (DTYPES[data.dtype], data.view(size).numpy())
        else:
            arrays[name] = data.numpy()
    (weight,) = restore(settings, Stored(arrays)).values()
    return floats(weight, rows_per_read=37)


def ordinals(values: np.ndarray) -> np.ndarray:
    """Return the position of each float32 among all float32 numbers in ascending order, so that
    neighbors differ by one. Both zeros have the position 0.
    """
    bits = values.astype(np.float32).view(np.int32).astype(np.int64)
    return np.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


def scales_and_zeros(
    weight: torch.Tensor, bits: int, group: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float16 scales and zeros of groups of columns, `[rows, groups]`."""
    groups = weight.reshape(len(weight), -1, group)
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scales = ((high - low) / (2**bits - 1)).half().float()
    return scales, (-low / scales).round().clamp(1, 2**bits - 1)


def load_file(package: str, path: str) -> ModuleType:
    """Return a module of a package that is loaded without the package's other modules."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(package)
    file = Path(spec.submodule_search_locations[0]) / path
    module_spec = importlib.util.spec_from_file_location(file.stem, file)
    assert module_spec is not None and module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    return module


def awq(weight: torch.Tensor) -> Case:
    """AWQ in the gemm layout."""
    packing = load_file("awq", "utils/packing_utils.py")
    scales, zeros = scales_and_zeros(weight, 4, 64)
    steps = weight / scales.repeat_interleave(64, 1) + zeros.repeat_interleave(64, 1)
    codes = steps.round().clamp(0, 15).to(torch.int32)

    def pack(values: torch.Tensor) -> torch.Tensor:
        grouped = values.to(torch.int64).reshape(len(values), -1, 8)[..., packing.AWQ_ORDER]
        words = (grouped << (4 * torch.arange(8))).sum(-1)
        return (words & 0xFFFFFFFF).to(torch.int64).numpy().astype(np.uint32).view(np.int32)

    qweight, qzeros = map(torch.from_numpy, (pack(codes.T), pack(zeros.T)))
    scales = scales.T.contiguous()
    expected = packing.dequantize_gemm(qweight, qzeros, scales, 4, 64).T
    tensors = {"layer.qweight": qweight, "layer.qzeros": qzeros, "layer.scales": scales.half()}
    return {"quant_method": "awq", "bits": 4, "group_size": 64}, tensors, expected


def auto_round(bits: int, packing: str, module: str) -> Callable[[torch.Tensor], Case]:
    """AutoRound in a packing like that of GPTQ."""

    def make_case(weight: torch.Tensor) -> Case:
        layer_class = importlib.import_module(f"auto_round_extension.torch.{module}").QuantLinear
        scales, zeros = scales_and_zeros(weight, bits, 32)
        linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        linear.weight.data = weight
        layer = layer_class(bits, 32, weight.shape[1], weight.shape[0], False)
        layer.device = torch.device("cpu")
        layer.pack(linear, scales, zeros, None, device="cpu")
        tensors = {
            f"layer.{part}": getattr(layer, part) for part in ("qweight", "qzeros", "scales")
        }
        layer.scales = layer.scales.float()
        expected = layer(torch.eye(weight.shape[1])).T
        settings = {"quant_method": "auto-round", "packing_format": packing, "group_size": 32}
        return settings, dict(tensors), expected

    return make_case


def bitsandbytes_4bit(kind: str, nested: bool) -> Callable[[torch.Tensor], Case]:
    """Codes of four bits of bitsandbytes."""

    def make_case(weight: torch.Tensor) -> Case:
        functional = importlib.import_module("bitsandbytes.functional")
        codes, state = functional.quantize_4bit(weight, quant_type=kind, compress_statistics=nested)
        parts = state.as_dict(packed=True)
        tensors = {NAME: codes} | {f"{NAME}.{part}": value for part, value in parts.items()}
        return {"quant_method": "bitsandbytes"}, tensors, functional.dequantize_4bit(codes, state)

    return make_case


def bitsandbytes_8bit(weight: torch.Tensor) -> Case:
    """Integers of eight bits of bitsandbytes."""
    functional = importlib.import_module("bitsandbytes.functional")
    codes, scales, _ = functional.int8_vectorwise_quant(weight.half())
    expected = functional.int8_vectorwise_dequant(codes, scales)
    tensors = {NAME: codes, "layer.SCB": scales}
    return {"quant_method": "bitsandbytes"}, tensors, expected


def compressed(form: str) -> Callable[[torch.Tensor], Case]:
    """A format of compressed-tensors."""

    def make_case(weight: torch.Tensor) -> Case:
        library = importlib.import_module("compressed_tensors.quantization")
        compressors = importlib.import_module("compressed_tensors.compressors")
        forward = importlib.import_module("compressed_tensors.quantization.lifecycle.forward")
        arguments: dict[str, Any] = {
            "nvfp4-pack-quantized": {"type": "float", "strategy": "tensor_group", "group_size": 16},
            "mxfp4-pack-quantized": {"type": "float", "strategy": "group", "group_size": 32},
            "mxfp8-quantized": {"type": "float", "strategy": "group", "group_size": 32},
            "pack-quantized": {"type": "int", "strategy": "group", "group_size": 32},
        }[form]
        bits = 8 if form == "mxfp8-quantized" else 4
        args = library.QuantizationArgs(num_bits=bits, symmetric=True, **arguments)
        scheme = library.QuantizationScheme(targets=["Linear"], weights=args)
        peak = weight.reshape(len(weight), -1, args.group_size).abs().amax(-1)
        state = {"weight": weight, "weight_scale": peak / 7}
        tensor_scale = None
        if form == "nvfp4-pack-quantized":
            tensor_scale = (448 * 6 / weight.abs().max()).reshape(1)
            state["weight_global_scale"] = tensor_scale
            state["weight_scale"] = (peak / 6 * tensor_scale).to(torch.float8_e4m3fn).float()
        elif form == "mxfp4-pack-quantized":
            state["weight_scale"] = 2 ** torch.floor(torch.log2(peak / 4))
        elif form == "mxfp8-quantized":
            state["weight_scale"] = 2 ** torch.floor(torch.log2(peak / 256))
        compressor = compressors.BaseCompressor.get_value_from_registry(form)
        stored = compressor.compress(dict(state), scheme)
        if form == "pack-quantized":
            expected = compressor.decompress(dict(stored), scheme)["weight"]
        elif form == "mxfp8-quantized":  # decompress() rounds to bfloat16
            codes = stored["weight"].float()
            expected = forward.dequantize(codes, state["weight_scale"], args=args)
        else:  # decompress() rounds to bfloat16 here, too
            helpers = importlib.import_module("compressed_tensors.compressors.nvfp4.helpers")
            codes = helpers.unpack_fp4_from_uint8(
                stored["weight_packed"], *weight.shape, dtype=torch.float32
            )
            scale = state["weight_scale"]
            expected = forward.dequantize(
                codes, scale, args=args, dtype=torch.float32, global_scale=tensor_scale
            )
        tensors = {f"layer.{part}": value for part, value in stored.items()}
        groups = {"group_0": {"weights": {"num_bits": bits, **arguments}}}
        settings = {
            "quant_method": "compressed-tensors",
            "format": form,
            "config_groups": groups,
        }
        return settings, tensors, expected

    return make_case


def modelopt_nvfp4(weight: torch.Tensor) -> Case:
    """NVFP4 of ModelOpt."""
    module = importlib.import_module("modelopt.torch.quantization.qtensor.nvfp4_tensor")
    quantized, scale, tensor_scale = module.NVFP4QTensor.quantize(weight.clone(), 16)
    expected = quantized.dequantize(
        torch.float32, scale=scale, double_scale=tensor_scale, block_sizes={-1: 16}
    )
    tensors = {
        NAME: quantized._quantized_data,
        f"{NAME}_scale": scale,
        f"{NAME}_scale_2": tensor_scale,
    }
    return {"quant_method": "modelopt", "quant_algo": "NVFP4"}, tensors, expected


def transformers_mxfp4(weight: torch.Tensor) -> Case:
    """MXFP4 as in gpt-oss, with random codes."""
    module = importlib.import_module("transformers.integrations.mxfp4")
    blocks = (1, len(weight), weight.shape[1] // 32)
    codes = torch.randint(0, 256, (*blocks, 16), dtype=torch.uint8)
    scales = torch.randint(110, 130, blocks, dtype=torch.uint8)
    expected = module.convert_moe_packed_tensors(codes, scales, dtype=torch.float32)
    tensors = {"layer_blocks": codes, "layer_scales": scales}
    return {"quant_method": "mxfp4"}, tensors, expected.transpose(1, 2)


# Format -> (library, function that quantizes a matrix).
CASES: dict[str, tuple[str, Callable[[torch.Tensor], Case]]] = {
    "AWQ, gemm": ("autoawq", awq),
    "AutoRound, auto_gptq, 4 bits": (
        "auto-round",
        auto_round(4, "auto_round:auto_gptq", "qlinear_torch_zp"),
    ),
    "AutoRound, 2 bits": ("auto-round", auto_round(2, "auto_round", "qlinear_torch")),
    "AutoRound, 3 bits": ("auto-round", auto_round(3, "auto_round", "qlinear_torch")),
    "AutoRound, 4 bits": ("auto-round", auto_round(4, "auto_round", "qlinear_torch")),
    "AutoRound, 5 bits": ("auto-round", auto_round(5, "auto_round", "qlinear_torch")),
    "AutoRound, 8 bits": ("auto-round", auto_round(8, "auto_round", "qlinear_torch")),
    "bitsandbytes nf4": ("bitsandbytes", bitsandbytes_4bit("nf4", nested=False)),
    "bitsandbytes nf4, nested": ("bitsandbytes", bitsandbytes_4bit("nf4", nested=True)),
    "bitsandbytes fp4": ("bitsandbytes", bitsandbytes_4bit("fp4", nested=False)),
    "bitsandbytes fp4, nested": ("bitsandbytes", bitsandbytes_4bit("fp4", nested=True)),
    "bitsandbytes int8": ("bitsandbytes", bitsandbytes_8bit),
    "compressed-tensors int4": ("compressed-tensors", compressed("pack-quantized")),
    "compressed-tensors NVFP4": ("compressed-tensors", compressed("nvfp4-pack-quantized")),
    "compressed-tensors MXFP4": ("compressed-tensors", compressed("mxfp4-pack-quantized")),
    "compressed-tensors MXFP8": ("compressed-tensors", compressed("mxfp8-quantized")),
    "ModelOpt NVFP4": ("nvidia-modelopt", modelopt_nvfp4),
    "MXFP4 of gpt-oss": ("transformers", transformers_mxfp4),
}

if __name__ == "__main__":
    main()
