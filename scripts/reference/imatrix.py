"""Compare the importance matrices of `llmcli calibrate` and llama-imatrix on the same text.

usage: .venv/bin/python scripts/reference/imatrix.py MODEL --text FILE --llama-imatrix PATH
       [--chunks N] [-t N]

An importance matrix has the mean squares of the inputs of each tensor's columns. For each tensor in
both files, the script computes |ours - theirs| / |theirs| of these vectors. Small differences
remain, because llama-imatrix adds all rows in float32, and llmcli only the rows of one pass.
llama-imatrix does not measure the output head without --process-output, which is passed here, and
never a head that is tied to the embedding.

Two more results are compared in the same way: the diagonals of our second moments with our mean
squares (except for the inputs of attention outputs, which come from other rows), and the merging of
our file with an older one (.dat) by both programs. The last line says whether all differences are
at most 0.1 %.
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
    """Run a command; return its seconds. Exits with the command's output if it fails."""
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: {(done.stdout + done.stderr)[-2000:]}")
    return time.perf_counter() - began


def means(entry: imatrix.ImatrixEntry) -> np.ndarray:
    """Return the mean squares of all matrices of a tensor (such as experts) as one vector."""
    return entry.mean_squares(0, 1, entry.count)[0].astype(np.float64)


def relative_differences(theirs: Imatrix, ours: Imatrix) -> dict[str, float]:
    """Return the relative difference of the mean squares of each tensor that is in both files."""
    differences = {}
    for name in sorted(theirs.entries.keys() & ours.entries.keys()):
        their_entry, our_entry = theirs.entries[name], ours.entries[name]
        assert their_entry.divisors == our_entry.divisors, (
            name,
            their_entry.divisors,
            our_entry.divisors,
        )
        reference = means(their_entry)
        differences[name] = float(
            np.linalg.norm(means(our_entry) - reference) / np.linalg.norm(reference)
        )
    return differences


def merge_with_both_programs(
    args: argparse.Namespace, file: Path, folder: Path
) -> dict[str, float]:
    """Merge our file with one of the older format by both programs; return the relative
    differences. `folder` is for the files.
    """
    tool, older, theirs, ours = (
        str(args.llama_imatrix),
        *(str(folder / name) for name in ("a.dat", "b", "c")),
    )
    context = ["-m", str(args.model), "-c", str(args.ctx), "-b", str(args.ctx)]
    run([tool, "--in-file", str(file), "-o", older, "--output-format", "dat", *context])
    run([tool, "--in-file", str(file), "--in-file", older, "-o", theirs, *context])
    run([sys.executable, "-m", "llmcli.app", "calibrate", "--merge", str(file), older, "-o", ours])
    return relative_differences(
        imatrix.load_imatrix(Path(theirs)), imatrix.load_imatrix(Path(ours))
    )


def main() -> int:
    """Parse the flags, run both programs and print; return 1 if a difference is above 0.1 %."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--llama-imatrix", type=Path, required=True, metavar="PATH")
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--ctx", type=int, default=512)
    parser.add_argument("-t", "--threads", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        our_path, their_path, moments_path = (
            Path(temporary) / name for name in ("mine.gguf", "theirs.gguf", "moments.gguf")
        )
        common = [
            "-c",
            str(args.ctx),
            "-t",
            str(args.threads),
            "--chunks",
            str(args.chunks),
        ]
        command = [
            sys.executable,
            "-m",
            "llmcli.app",
            "calibrate",
            str(args.model),
            "--text",
            str(args.text),
        ]
        seconds = run([*command, "-o", str(our_path), *common])
        second_seconds = run(
            [*command, "-o", str(our_path), "--moments", str(moments_path), *common]
        )
        their_seconds = run(
            [
                str(args.llama_imatrix),
                "-m",
                str(args.model),
                "-f",
                str(args.text),
                "-o",
                str(their_path),
                "--process-output",
                *common,
            ]
        )
        their_imatrix, our_imatrix = (
            imatrix.load_imatrix(their_path),
            imatrix.load_imatrix(our_path),
        )
        sum_differences = relative_differences(their_imatrix, our_imatrix)
        second_moments = moments.load_moments(moments_path)
        mixed_inputs = {
            name for moment in second_moments.inputs if moment.mixed for name in moment.names
        }
        comparable = {
            name: entry
            for name, entry in second_moments.imatrix.entries.items()
            if name not in mixed_inputs
        }
        diagonals = relative_differences(
            our_imatrix, replace(second_moments.imatrix, entries=comparable)
        )
        merged = merge_with_both_programs(args, our_path, Path(temporary))
    their_entries, our_entries = their_imatrix.entries, our_imatrix.entries
    for name, value in sorted(sum_differences.items(), key=lambda item: -item[1])[:10]:
        print(f"{name:40}{value:.3e}")
    print(
        f"{len(sum_differences)} tensors in both; theirs alone: {sorted(their_entries.keys() - our_entries.keys())}"
    )
    print(
        f"diagonals of {len(diagonals)} second moments: relative difference at most {max(diagonals.values()):.3e}"
    )
    print(
        f"{len(merged)} tensors added by both: relative difference at most {max(merged.values()):.3e}"
    )
    print(f"ours alone: {sorted(our_entries.keys() - their_entries.keys())}")
    print(
        f"llama-imatrix {their_seconds:.1f} s, calibrate {seconds:.1f} s, with --moments {second_seconds:.1f} s"
    )
    passed = all(
        differences and max(differences.values()) <= 1e-3
        for differences in (sum_differences, diagonals, merged)
    )
    passed = passed and not their_entries.keys() - our_entries.keys()
    print("every tensor within 0.1 %: " + ("yes" if passed else "NO"))
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
