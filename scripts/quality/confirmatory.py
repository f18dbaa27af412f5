#!/usr/bin/env python3
"""Run the confirmatory comparison of quantization methods, whose protocol is fixed in this file.

usage: .venv/bin/python scripts/quality/confirmatory.py FOLDER --tools DIR [--teacher NAME ...]
       [--made TEACHER=METHOD=TYPE=SECONDS=FILE ...] [--threads 2]
       confirmatory.py FOLDER --hashes | --summary CSV

The settings of the methods were fixed before these models and texts were looked at
(llmcli/workflows/certification/settings.json). Every row counts, whatever it says. FOLDER has
t1024/ and its GGUF file t1024.gguf (train_teacher.py --set packages), and the two coders without
their published grid, coder-0.5b.gguf and coder-1.5b.gguf (break_lattice.py). All teachers are
scored on t1024's three held-out texts and calibrated with its calibration texts. Finished rows
stay in FOLDER/rows; an interrupted run resumes. --made adds a file of another program (compare.py).
--hashes prints the SHA-256 of the teachers and texts instead. --summary writes all figures of the
finished rows to the file CSV, and prints the table of docs/quality.md.
"""

import argparse
import hashlib
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from scripts.quality import compare, summary
from scripts.quality.table import Ledger, Row, results

COMPARE = Path(__file__).with_name("compare.py")
TEXTS = ("wiki", "scripture", "code")
# Sizes by measured groups of tensors: single tensors take half a day with a large model.
GROUPED = "--probe group --probe-chunks 1 --swaps 0"


@dataclass(frozen=True)
class Teacher:
    """A reference model and how its files are made and scored.

    `ctx`: tokens of a chunk. `chunks`: chunks of each evaluation text. `read`: chunks of
    calibration. `seeds`: number of calibration texts. `size_flags`: flags of the methods that
    choose types for a size.
    """

    name: str
    ctx: int
    chunks: int
    read: int
    seeds: int
    size_flags: str = ""

    def flags(self) -> list[str]:
        """Return the flags of compare.py that depend on the teacher."""
        methods = ["IQ types", "hand-made mix", "own imatrix", "search", "gptq", "gptq + folds"]
        also = {
            "sizes": f"--imatrix {{imatrix}} --target-size {{bytes}} {self.size_flags}",
            "gptq, sizes": (
                f"--method gptq --moments {{moments}} --target-size {{bytes}} {self.size_flags}"
            ),
        }
        return [
            *("--ctx", str(self.ctx), "--chunks", str(self.chunks), "--read", str(self.read)),
            *("--method", *methods),
            *(word for name, value in also.items() for word in ("--also", f"{name}={value}")),
        ]


TEACHERS = (
    Teacher("t1024", 256, 32, 100, 3),
    Teacher("coder-0.5b", 512, 12, 48, 1, GROUPED),
    Teacher("coder-1.5b", 512, 12, 48, 1, GROUPED),
)


def main() -> int:
    """Parse the flags and run compare.py for each teacher. Return 1 if it fails for any."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tools", type=Path, help="folder of llama-quantize and llama-imatrix")
    names = [teacher.name for teacher in TEACHERS]
    parser.add_argument("--teacher", nargs="+", choices=names, default=names)
    parser.add_argument("--type", nargs="+", help="only these types, to share out the work")
    parser.add_argument("--made", action="append", default=[])
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("--hashes", action="store_true")
    parser.add_argument("--summary", type=Path, metavar="CSV")
    args = parser.parse_args()
    if args.summary:
        summarize(args.folder, args.summary)
        return 0
    texts = {name: args.folder / "t1024" / "text" / f"held-{name}.txt" for name in TEXTS}
    calibration = [args.folder / "t1024" / "text" / f"calibration-{seed}.txt" for seed in range(3)]
    if args.hashes:
        files = [args.folder / f"{name}.gguf" for name in names]
        print_hashes([*files, *texts.values(), *calibration])
        return 0
    if args.tools is None:
        parser.error("--tools is needed")
    codes = []
    for teacher in TEACHERS:
        if teacher.name not in args.teacher:
            continue
        command = [
            *(sys.executable, str(COMPARE), str(args.folder / f"{teacher.name}.gguf")),
            *("--tools", str(args.tools), "--out", str(args.folder / "rows")),
            *("--threads", str(args.threads)),
            *(word for name, file in texts.items() for word in ("--text", f"{name}={file}")),
            *("--calibration", *map(str, calibration[: teacher.seeds])),
            *(["--type", *args.type] if args.type else []),
            *teacher.flags(),
        ]
        for made in args.made:
            owner, _, value = made.partition("=")
            command += ["--made", value] if owner == teacher.name else []
        codes.append(subprocess.run(command, check=False).returncode)
    return int(any(codes))


def summarize(folder: Path, file: Path) -> None:
    """Write the figures of all finished rows to a CSV file, and print the table of changes."""
    ledger = Ledger(folder / "rows")
    rows = sorted(ledger.rows().values(), key=_order)
    found = [*results(rows, ledger, compare.BASELINE, compare.own_methods(rows))]
    file.write_text(summary.csv_table(found))
    print(summary.change_table(found, compare.BASELINE))


def _order(row: Row) -> tuple[int, int]:
    """Return the place of a row in the summary: by model, then by type."""
    names = [teacher.name for teacher in TEACHERS]
    return names.index(row.key.teacher), compare.TYPES.index(row.key.type)


def print_hashes(files: list[Path]) -> None:
    """Print the SHA-256 of each file that exists."""
    for path in files:
        if path.exists():
            with path.open("rb") as file:
                print(hashlib.file_digest(file, "sha256").hexdigest(), path.name)


if __name__ == "__main__":
    sys.exit(main())
