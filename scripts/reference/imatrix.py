"""Compare `llmcli calibrate` with llama-imatrix: each tensor's sums of squares on the same text.

    .venv/bin/python scripts/reference/imatrix.py MODEL --text FILE --llama-imatrix PATH
        [--chunks N] [-t N]

For each tensor of both: the length of the difference of the two vectors of sums over the length of
theirs, both divided by their counts. llama-imatrix adds all rows in float32; llmcli adds those of a
pass in float32 and the rest in float64. llama-imatrix leaves out the head (here it gets
--process-output) and a head tied to the embedding. The diagonals of the second moments are compared
with the sums, too, except for the inputs of attention outputs, which come from other rows; and so
is the sum of our file and an older one (.dat) by both programs. The last line says whether all are
within 0.1 %.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from quant.calibration import imatrix, moments
from quant.calibration.imatrix import Imatrix


def run(command: list[str]) -> float:
    """Run a command that must succeed; return its seconds."""
    begun = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: {(done.stdout + done.stderr)[-2000:]}")
    return time.perf_counter() - begun


def means(entry: imatrix.ImatrixEntry) -> np.ndarray:
    """Return the mean squares of all matrices in one row."""
    return entry.mean_squares(0, 1, entry.count)[0].astype(np.float64)


def apart(theirs: Imatrix, mine: Imatrix) -> dict[str, float]:
    """Return the relative difference of each tensor that both have."""
    found = {}
    for name in sorted(theirs.entries.keys() & mine.entries.keys()):
        one, other = theirs.entries[name], mine.entries[name]
        assert one.divisors == other.divisors, (name, one.divisors, other.divisors)
        reference = means(one)
        found[name] = float(np.linalg.norm(means(other) - reference) / np.linalg.norm(reference))
    return found


def added(options: argparse.Namespace, file: Path, folder: Path) -> dict[str, float]:
    """Add our file and one of the older format with both programs; return the differences."""
    tool, older, theirs, mine = (
        str(options.llama_imatrix),
        *(str(folder / name) for name in ("a.dat", "b", "c")),
    )
    context = ["-m", str(options.model), "-c", str(options.ctx), "-b", str(options.ctx)]
    run([tool, "--in-file", str(file), "-o", older, "--output-format", "dat", *context])
    run([tool, "--in-file", str(file), "--in-file", older, "-o", theirs, *context])
    run([sys.executable, "-m", "llmcli.app", "calibrate", "--merge", str(file), older, "-o", mine])
    return apart(imatrix.load_imatrix(Path(theirs)), imatrix.load_imatrix(Path(mine)))


def main() -> int:
    """Run both programs and report; return 1 if the goal is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--llama-imatrix", type=Path, required=True, metavar="PATH")
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--ctx", type=int, default=512)
    parser.add_argument("-t", "--threads", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        mine, theirs, second = (
            Path(place) / name for name in ("mine.gguf", "theirs.gguf", "moments.gguf")
        )
        common = [
            "-c",
            str(options.ctx),
            "-t",
            str(options.threads),
            "--chunks",
            str(options.chunks),
        ]
        ours = [
            sys.executable,
            "-m",
            "llmcli.app",
            "calibrate",
            str(options.model),
            "--text",
            str(options.text),
        ]
        seconds = run([*ours, "-o", str(mine), *common])
        second_seconds = run([*ours, "-o", str(mine), "--moments", str(second), *common])
        their_seconds = run(
            [
                str(options.llama_imatrix),
                "-m",
                str(options.model),
                "-f",
                str(options.text),
                "-o",
                str(theirs),
                "--process-output",
                *common,
            ]
        )
        one, other = imatrix.load_imatrix(theirs), imatrix.load_imatrix(mine)
        found = apart(one, other)
        squares = moments.load_moments(second)
        mixed = {name for part in squares.inputs if part.mixed for name in part.names}
        entering = {
            name: entry for name, entry in squares.imatrix.entries.items() if name not in mixed
        }
        diagonals = apart(other, replace(squares.imatrix, entries=entering))
        merged = added(options, mine, Path(place))
    entries, mine_entries = one.entries, other.entries
    for name, value in sorted(found.items(), key=lambda item: -item[1])[:10]:
        print(f"{name:40}{value:.3e}")
    print(
        f"{len(found)} tensors in both; theirs alone: {sorted(entries.keys() - mine_entries.keys())}"
    )
    print(
        f"diagonals of {len(diagonals)} second moments: relative difference at most {max(diagonals.values()):.3e}"
    )
    print(
        f"{len(merged)} tensors added by both: relative difference at most {max(merged.values()):.3e}"
    )
    print(f"ours alone: {sorted(mine_entries.keys() - entries.keys())}")
    print(
        f"llama-imatrix {their_seconds:.1f} s, calibrate {seconds:.1f} s, with --moments {second_seconds:.1f} s"
    )
    good = all(table and max(table.values()) <= 1e-3 for table in (found, diagonals, merged))
    good = good and not entries.keys() - mine_entries.keys()
    print("every tensor within 0.1 %: " + ("yes" if good else "NO"))
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
