#!/usr/bin/env python3
"""Compare time and weighted error of `--method search` with ggml's search, and with llama-quantize.

usage: .venv/bin/python scripts/benchmarks/method_search.py
           each type, synthetic rows, one thread
       .venv/bin/python scripts/benchmarks/method_search.py MODEL.gguf --imatrix FILE
           --llama-quantize PATH [-t TYPE …] [--rounds 5] [--threads N] [--pure] [--numpy]

Both sides run in turn, in alternating order. The ratio is the median of the rounds' ratios, above 1
if ours is faster. The error is the sum of importance times squared difference over all tensors that
both quantized, ours relative to theirs. --numpy disables our C code. MODEL must have float weights.
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
    """Measure and print a line for each type."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--imatrix", type=Path)
    parser.add_argument("--llama-quantize", type=Path)
    parser.add_argument(
        "-t", "--type", nargs="+", default=["Q4_K_M", "Q2_K", "Q3_K_M", "Q5_K_M", "Q6_K", "Q8_0"]
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--pure", action="store_true")
    parser.add_argument("--numpy", action="store_true")
    asked = parser.parse_args()
    if asked.numpy:
        ggml.native_search = lambda: None  # type: ignore[assignment]
    print(f"search in {'C' if ggml.native_search() else 'numpy'}, {asked.rounds} rounds")
    if asked.model is None:
        for name in SEARCH_SETTINGS:
            per_type(name, asked.rounds)
        return
    if not (asked.imatrix and asked.llama_quantize):
        parser.error(
            "pass the importance matrix with --imatrix and llama.cpp's tool with --llama-quantize"
        )
    with tempfile.TemporaryDirectory() as place:
        for name in asked.type:
            whole_run(asked, name, Path(place))


def in_turn(
    ours: Callable[[], float], theirs: Callable[[], float], rounds: int
) -> tuple[float, float, float]:
    """Return the medians of both sides' seconds, and of the rounds' ratios theirs / ours."""
    pairs = []
    for turn in range(rounds):
        if turn % 2:
            other = theirs()
            pairs.append((ours(), other))
        else:
            own = ours()
            pairs.append((own, theirs()))
    own, other = (statistics.median(side) for side in zip(*pairs, strict=True))
    return own, other, statistics.median(b / a for a, b in pairs)


def per_type(name: str, rounds: int) -> None:
    """Measure one type with one thread on Student-t rows (one value in a hundred is eight times as
    large) and log-normal importance.
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
        made = {}

        def timed(method: str) -> float:
            solve, began = (
                METHODS[method].make_encoder(FORMATS[name], evidence),
                time.perf_counter(),
            )
            parts = [solve(rows[at : at + 32], at) for at in range(0, ROWS, 32)]
            seconds = time.perf_counter() - began
            made[method] = np.concatenate(parts)
            return seconds

        own, other, ratio = in_turn(lambda: timed("search"), lambda: timed("ggml"), rounds)
    errors = [
        float(
            np.square(
                ggml.decode(made[method], name, COLUMNS, label=name) - rows, dtype=np.float64
            ).sum(0)
            @ vector
        )
        for method in ("search", "ggml")
    ]
    speed = [rows.size / seconds / 1e6 for seconds in (own, other)]
    print(
        f"{name:5} search {speed[0]:6.1f} Mw/s  ggml {speed[1]:6.1f} Mw/s  speed {ratio:5.2f}x"
        f"  weighted error {errors[0] / errors[1] - 1:+7.2%}",
        flush=True,
    )


def whole_run(asked: argparse.Namespace, name: str, place: Path) -> None:
    """Measure whole processes with the same file and the same importance matrix."""
    ours, theirs = place / "ours.gguf", place / "theirs.gguf"
    pure = ["--pure"] if asked.pure else []
    own_words = [
        sys.executable,
        "-c",
        PROGRAM,
        str(int(asked.numpy)),
        "quantize",
        asked.model,
        "-t",
        name,
        "-o",
        ours,
        "--method",
        "search",
        "--imatrix",
        asked.imatrix,
        "--threads",
        asked.threads,
        "--force",
        "--json",
        *pure,
    ]
    words = [
        asked.llama_quantize,
        *pure,
        "--imatrix",
        asked.imatrix,
        asked.model,
        theirs,
        name,
        asked.threads,
    ]
    seconds_of(own_words, ours)  # not timed: Python writes its bytecode
    own, other, ratio = in_turn(
        lambda: seconds_of(own_words, ours), lambda: seconds_of(words, theirs), asked.rounds
    )
    lost = [
        lost_by(asked.model, made, imatrix.load_imatrix(asked.imatrix)) for made in (ours, theirs)
    ]
    common = lost[0].keys() & lost[1].keys()
    error = (
        sum(lost[0][tensor] for tensor in common) / sum(lost[1][tensor] for tensor in common) - 1
    )
    sizes = ours.stat().st_size / theirs.stat().st_size - 1
    print(
        f"{name:7} search {own:6.2f} s  llama-quantize {other:6.2f} s  speed {ratio:5.2f}x"
        f"  weighted error {error:+7.2%} of {len(common)} tensors, bytes {sizes:+.3%}",
        flush=True,
    )


def seconds_of(words: list[object], out: Path) -> float:
    """Return the seconds of a command, after pending writes reached the disk."""
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


def lost_by(source: Path, made: Path, sums: imatrix.Imatrix) -> dict[str, float]:
    """Return the importance-weighted squared error of every tensor."""
    before = {weight.name: weight for weight in write.open_gguf(source).weights}
    lost = {}
    for tensor in read_header.read_header(made).tensors:
        weight, entry = before[tensor.name], sums.entries.get(tensor.name)
        if not ggml.is_quantized(tensor.type) or entry is None or len(weight.shape) != 2:
            continue
        rows = ggml.decode(
            weight.read(0, weight.rows), weight.type, weight.columns, label=tensor.name
        )
        codes = np.fromfile(tensor.file, np.uint8, tensor.nbytes, offset=tensor.offset)
        off = ggml.decode(codes, tensor.type, weight.columns, label=tensor.name) - rows
        squares = np.square(off, out=off).sum(0, dtype=np.float64)
        lost[tensor.name] = float(squares @ entry.mean_squares(0, 1, weight.columns)[0])
    return lost


if __name__ == "__main__":
    main()
