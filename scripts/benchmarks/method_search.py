#!/usr/bin/env python3
"""Compare `llmcli quantize --method search` with ggml's search in time and in weighted error.

usage: .venv/bin/python scripts/benchmarks/method_search.py
           every block format, on synthetic rows, with one thread
       .venv/bin/python scripts/benchmarks/method_search.py MODEL.gguf --imatrix FILE
           --llama-quantize PATH [--type TYPE …] [--rounds 5] [-t N] [--pure] [--numpy]

The second form compares whole processes of `llmcli quantize` and llama-quantize. The two sides run
in turn, in alternating order. The ratio of speeds is the median of the rounds' ratios, above 1 if
ours is faster. The weighted error is the sum of importance times squared difference over all
tensors that both quantized, ours relative to theirs. --numpy disables our C code. MODEL.gguf must
have float weights.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from quant.calibration import imatrix
from quant.calibration.statistics import InputStatistics
from quant.formats import FORMATS
from quant.methods import METHODS
from quant.methods.search_settings import SEARCH_SETTINGS
from quant.model_file import read_header
from quant.native import ggml
from quant.quantize import write

ROOT = Path(__file__).resolve().parents[2]
ROWS, COLUMNS = 512, 2048
PROGRAM = """
import sys
from quant.native import ggml
if sys.argv.pop(1) == "1":
    ggml.native_search = lambda: None
from llmcli.app import main
main()
"""


def main() -> None:
    """Parse the flags, measure, and print a line for each type."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--imatrix", type=Path)
    parser.add_argument("--llama-quantize", type=Path)
    parser.add_argument(
        "--type", nargs="+", default=["Q4_K_M", "Q2_K", "Q3_K_M", "Q5_K_M", "Q6_K", "Q8_0"]
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("-t", "--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--pure", action="store_true")
    parser.add_argument("--numpy", action="store_true")
    args = parser.parse_args()
    if args.numpy:
        ggml.native_search = lambda: None  # type: ignore[assignment]
    print(f"search in {'C' if ggml.native_search() else 'numpy'}, {args.rounds} rounds")
    if args.model is None:
        for name in SEARCH_SETTINGS:
            compare_encoders(name, args.rounds)
        return
    if not (args.imatrix and args.llama_quantize):
        parser.error(
            "pass the importance matrix with --imatrix and llama.cpp's tool with --llama-quantize"
        )
    with tempfile.TemporaryDirectory() as folder:
        for name in args.type:
            compare_processes(args, name, Path(folder))


def in_turn(
    ours: Callable[[], float], theirs: Callable[[], float], rounds: int
) -> tuple[float, float, float]:
    """Run both functions, which return seconds, once per round in alternating order. Return our
    median seconds, their median seconds, and the median of the rounds' ratios theirs / ours.
    """
    pairs = []
    for round_number in range(rounds):
        if round_number % 2:
            their_seconds = theirs()
            pairs.append((ours(), their_seconds))
        else:
            our_seconds = ours()
            pairs.append((our_seconds, theirs()))
    our_seconds, their_seconds = (statistics.median(side) for side in zip(*pairs, strict=True))
    return our_seconds, their_seconds, statistics.median(b / a for a, b in pairs)


def compare_encoders(name: str, rounds: int) -> None:
    """Encode synthetic weights in one type by both methods with one thread, and print a line. The
    weights have a Student-t distribution, with one in a hundred eight times as large; the
    importance of the columns is log-normal.
    """
    rng = np.random.default_rng(0)
    rows = rng.standard_t(5, (ROWS, COLUMNS)) * 0.02
    rows = np.where(rng.random(rows.shape) < 0.01, 8 * rows, rows).astype(np.float32)
    vector = np.exp(rng.normal(0, 1, COLUMNS)).astype(np.float32)
    with tempfile.NamedTemporaryFile() as file:
        file.write(vector.tobytes())
        file.flush()
        evidence = InputStatistics(
            name, COLUMNS, ROWS, 1, imatrix.ImatrixEntry(Path(file.name), 0, COLUMNS, (1.0,))
        )
        encoded = {}

        def timed(method: str) -> float:
            encode, began = (
                METHODS[method].make_encoder(FORMATS[name], evidence),
                time.perf_counter(),
            )
            pieces = [encode(rows[at : at + 32], at) for at in range(0, ROWS, 32)]
            seconds = time.perf_counter() - began
            encoded[method] = np.concatenate(pieces)
            return seconds

        our_seconds, their_seconds, ratio = in_turn(
            lambda: timed("search"), lambda: timed("ggml"), rounds
        )
    errors = [
        float(
            np.square(
                ggml.decode(encoded[method], name, COLUMNS, label=name) - rows, dtype=np.float64
            ).sum(0)
            @ vector
        )
        for method in ("search", "ggml")
    ]
    speed = [rows.size / seconds / 1e6 for seconds in (our_seconds, their_seconds)]
    print(
        f"{name:5} search {speed[0]:6.1f} Mw/s  ggml {speed[1]:6.1f} Mw/s  speed {ratio:5.2f}x"
        f"  weighted error {errors[0] / errors[1] - 1:+7.2%}",
        flush=True,
    )


def compare_processes(args: argparse.Namespace, name: str, folder: Path) -> None:
    """Quantize the same file with the same importance matrix by `llmcli quantize` and by
    llama-quantize, and print a line. `folder` is for the output files.
    """
    ours, theirs = folder / "ours.gguf", folder / "theirs.gguf"
    pure = ["--pure"] if args.pure else []
    our_command = [
        sys.executable,
        "-c",
        PROGRAM,
        str(int(args.numpy)),
        "quantize",
        args.model,
        "--type",
        name,
        "-o",
        ours,
        "--method",
        "search",
        "--imatrix",
        args.imatrix,
        "--threads",
        args.threads,
        "--force",
        "--json",
        *pure,
    ]
    their_command = [
        args.llama_quantize,
        *pure,
        "--imatrix",
        args.imatrix,
        args.model,
        theirs,
        name,
        args.threads,
    ]
    seconds_of(our_command, ours)  # not counted, because Python writes its bytecode
    our_seconds, their_seconds, ratio = in_turn(
        lambda: seconds_of(our_command, ours),
        lambda: seconds_of(their_command, theirs),
        args.rounds,
    )
    errors = [
        weighted_errors(args.model, path, imatrix.load_imatrix(args.imatrix))
        for path in (ours, theirs)
    ]
    common = errors[0].keys() & errors[1].keys()
    error = (
        sum(errors[0][tensor] for tensor in common) / sum(errors[1][tensor] for tensor in common)
        - 1
    )
    sizes = ours.stat().st_size / theirs.stat().st_size - 1
    print(
        f"{name:7} search {our_seconds:6.2f} s  llama-quantize {their_seconds:6.2f} s  speed {ratio:5.2f}x"
        f"  weighted error {error:+7.2%} of {len(common)} tensors, bytes {sizes:+.3%}",
        flush=True,
    )


def seconds_of(words: list[object], out: Path) -> float:
    """Run a command that writes `out`, and return its seconds. Pending writes reach the disk before
    it starts. Exits with the command's error text if it fails.
    """
    out.unlink(missing_ok=True)
    os.sync()
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    began = time.perf_counter()
    done = subprocess.run(
        [str(word) for word in words], capture_output=True, cwd=ROOT, env=env, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr.decode(errors="replace")[-2000:])
    return time.perf_counter() - began


def weighted_errors(source: Path, quantized: Path, sums: imatrix.Imatrix) -> dict[str, float]:
    """Return the importance-weighted squared error of every matrix that is quantized in the file
    `quantized` and has an entry in the importance matrix `sums`. `source` has the float weights.
    """
    before = {weight.name: weight for weight in write.open_gguf(source).weights}
    errors = {}
    for tensor in read_header.read_header(quantized).tensors:
        weight, entry = before[tensor.name], sums.entries.get(tensor.name)
        if not ggml.is_quantized(tensor.type) or entry is None or len(weight.shape) != 2:
            continue
        rows = ggml.decode(
            weight.read(0, weight.rows), weight.type, weight.columns, label=tensor.name
        )
        codes = np.fromfile(tensor.file, np.uint8, tensor.nbytes, offset=tensor.offset)
        difference = ggml.decode(codes, tensor.type, weight.columns, label=tensor.name) - rows
        squares = np.square(difference, out=difference).sum(0, dtype=np.float64)
        errors[tensor.name] = float(squares @ entry.mean_squares(0, 1, weight.columns)[0])
    return errors


if __name__ == "__main__":
    main()
