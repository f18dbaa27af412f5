"""`llmcli calibrate` beside llama-imatrix: one model, one text, and how far each tensor's sums of squares are apart.

    .venv/bin/python scripts/compare_imatrix.py MODEL --text FILE --llama-imatrix PATH [--chunks N] [-t N]

For each tensor both have: the length of the difference of the two vectors of sums over the length of theirs, both
divided by their counts. The last line says whether the largest is within 0.1 %. llama-imatrix adds all rows in float32,
ours those of a pass, and float64 above; it leaves out the head (here told with --process-output) and a head tied to
the embedding.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from quant import imatrix


def run(command: list[str]) -> float:
    """Seconds of a command that must succeed."""
    begun = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: {(done.stdout + done.stderr)[-2000:]}")
    return time.perf_counter() - begun


def means(entry: imatrix.Entry) -> np.ndarray:
    """Mean squares of all matrices in one row."""
    return entry.vectors(0, 1, entry.count)[0].astype(np.float64)


def main() -> int:
    """Run both and tell; 1 where the goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--llama-imatrix", type=Path, required=True, metavar="PATH")
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--ctx", type=int, default=512)
    parser.add_argument("-t", "--threads", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mine, theirs = Path(folder) / "mine.gguf", Path(folder) / "theirs.gguf"
        common = ["-c", str(options.ctx), "-t", str(options.threads), "--chunks", str(options.chunks)]
        seconds = run([
            sys.executable, "-m", "llmcli.app", "calibrate", str(options.model), "-o", str(mine), "--text",
            str(options.text), *common,
        ])  # fmt: skip
        their_seconds = run([
            str(options.llama_imatrix), "-m", str(options.model), "-f", str(options.text), "-o", str(theirs),
            "--process-output", *common,
        ])  # fmt: skip
        one, other = imatrix.load(theirs).entries, imatrix.load(mine).entries
        apart = {}
        for name in sorted(one.keys() & other.keys()):
            assert one[name].divisors == other[name].divisors, (name, one[name].divisors, other[name].divisors)
            reference = means(one[name])
            apart[name] = float(np.linalg.norm(means(other[name]) - reference) / np.linalg.norm(reference))
    for name, value in sorted(apart.items(), key=lambda item: -item[1])[:10]:
        print(f"{name:40}{value:.3e}")
    print(f"{len(apart)} tensors in both; theirs alone: {sorted(one.keys() - other.keys())}")
    print(f"ours alone: {sorted(other.keys() - one.keys())}")
    print(f"llama-imatrix {their_seconds:.1f} s, llmcli calibrate {seconds:.1f} s")
    good = bool(apart) and max(apart.values()) <= 1e-3 and not one.keys() - other.keys()
    print("every tensor within 0.1 %: " + ("yes" if good else "NO"))
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
