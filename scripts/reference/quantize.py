"""Compare quantized files of this project with those of llama.cpp's llama_model_quantize, byte by
byte.

usage: .venv/bin/python scripts/reference/quantize.py MODEL.gguf … [--type TYPE …] [--imatrix FILE]

For each model and file type the script prints how many tensors have the same type and bytes, and
the seconds of both programs. It exits with 1 if a tensor differs.
"""

import argparse
import ctypes
import tempfile
import time
from pathlib import Path

import llama_cpp
import numpy as np

from llmcli.runtime.binding.contract import set_fields
from quant.calibration import imatrix
from quant.model_file import read_header
from quant.native import ggml
from quant.quantize import write
from quant.quantize.plan import plan_quantization
from quant.recipes import tensor_types


def run_llama_quantize(
    source: Path, out: Path, number: int, threads: int, weights: imatrix.Imatrix | None
) -> float:
    """Quantize `source` to `out` with llama_model_quantize, which may also requantize; return the
    seconds. `number`: llama.cpp's number of the file type. `weights`: importance matrix. Raises
    SystemExit if llama.cpp refuses.
    """
    params = llama_cpp.llama_model_quantize_default_params()
    set_fields(params, ftype=number, allow_requantize=True, nthread=threads)
    if weights:
        arrays = {
            name: entry.mean_squares(0, 1, entry.count) for name, entry in weights.entries.items()
        }
        pointer = ctypes.POINTER(ctypes.c_float)
        data = [
            (name.encode(), values.ctypes.data_as(pointer), values.size)
            for name, values in arrays.items()
        ]
        data.append((None, None, 0))
        set_fields(params, imatrix=(llama_cpp.llama_model_imatrix_data * len(data))(*data))
    began = time.monotonic()
    failed = llama_cpp.llama_model_quantize(
        str(source).encode(), str(out).encode(), ctypes.byref(params)
    )
    if failed:
        raise SystemExit(f"llama_model_quantize refused {source}")
    return time.monotonic() - began


def compare(ours: Path, theirs: Path) -> tuple[int, int, list[str]]:
    """Compare the tensors of two GGUF files. Return the number of equal ones, the number of all,
    and a line of text for each that differs in type, shape or bytes.
    """
    our_tensors = {tensor.name: tensor for tensor in read_header.read_header(ours).tensors}
    their_tensors = {tensor.name: tensor for tensor in read_header.read_header(theirs).tensors}
    differing = sorted(our_tensors.keys() ^ their_tensors.keys())
    for name in our_tensors.keys() & their_tensors.keys():
        a, b = our_tensors[name], their_tensors[name]
        if (a.type, a.shape) != (b.type, b.shape):
            differing.append(f"{name}: {a.type} against {b.type}")
        elif not np.array_equal(
            *(np.fromfile(t.file, np.uint8, t.nbytes, offset=t.offset) for t in (a, b))
        ):
            differing.append(f"{name}: bytes of {a.type}")
    return (
        len(our_tensors | their_tensors) - len(differing),
        len(our_tensors | their_tensors),
        sorted(differing),
    )


def main() -> None:
    """Parse the flags, and compare every model in every type; exit with 1 if a tensor differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--type", nargs="+", default=["Q4_K_M", "Q2_K"])
    parser.add_argument("--imatrix", type=Path)
    parser.add_argument("-t", "--threads", type=int, default=2)
    args = parser.parse_args()
    weights = imatrix.load_imatrix(args.imatrix) if args.imatrix else None
    ggml.open_library()
    print(f"{'model':40} {'type':8} {'equal':>9} {'ours s':>8} {'llama.cpp s':>12}")
    unequal = False
    for model in args.models:
        for type_name in args.type:
            file_type = tensor_types.parse_file_type(type_name)
            with tempfile.TemporaryDirectory() as folder:
                ours, theirs = Path(folder) / "ours.gguf", Path(folder) / "theirs.gguf"
                quantization = plan_quantization(
                    write.open_gguf(model), file_type.name, imatrix=weights
                )
                seconds = write.write_model(quantization, ours, threads=args.threads).seconds
                their_seconds = run_llama_quantize(
                    model, theirs, file_type.number, args.threads, weights
                )
                equal, total, differing = compare(ours, theirs)
            line = f"{model.name:40} {file_type.name:8} {f'{equal}/{total}':>9}"
            print(
                f"{line} {seconds:8.2f} {their_seconds:12.2f}",
                *differing[:5],
                sep="\n    " if differing else " ",
            )
            unequal |= bool(differing)
    raise SystemExit(unequal)


if __name__ == "__main__":
    main()
