#!/usr/bin/env python3
"""Record what all commands of a source tree print and write, and compare two such records.

usage: .venv/bin/python scripts/reference/json_documents.py --record TREE OUT.json
           [--python PYTHON] [--work FOLDER]
       .venv/bin/python scripts/reference/json_documents.py --compare A.json B.json

A record has the exit code and the parsed output of every command of recorded_commands.py, the
answer to every request of recorded_requests.py, the flags of every --help, the files that the
commands leave in LLMCLI_HOME, and the sha256 of quantized files. PYTHON (default: this one) runs
TREE through PYTHONPATH, so that TREE needs no installation. SmolLM2 comes from the package index;
nothing else is downloaded.

A comparison requires equal exit codes and equal sets of keys everywhere. Values must be equal,
except for those that document_masks.py masks: times, rates, free memory, random identifiers,
versions, and text for people. The script prints every difference and exits with 1 if there is one.

Both records must be made in a work folder with the same path, because files and caches contain it.

A quantized file has the same bytes in every run. The only exception is a file with a certificate
(--verify), which contains a date and speeds; it is compared as a document.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from scripts.reference import recorded_commands
from scripts.reference.document_masks import differences
from scripts.reference.recorded_tree import RecordedTree

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    """Parse the flags, and record a tree or compare two records."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--record", nargs=2, metavar=("TREE", "OUT.json"), type=Path)
    action.add_argument("--compare", nargs=2, metavar=("A.json", "B.json"), type=Path)
    parser.add_argument("--python", default=sys.executable, help="runs the tree; default: this one")
    parser.add_argument(
        "--work", type=Path, help="an empty folder to keep; default: a temporary one"
    )
    arguments = parser.parse_args()
    if arguments.compare:
        raise SystemExit(compare(*arguments.compare))
    tree, out = (path.resolve() for path in arguments.record)
    work = (arguments.work or Path(tempfile.gettempdir(), "llmcli-record")).resolve()
    if work.exists():
        raise SystemExit(f"{work} exists: remove it, or give another folder with --work")
    work.mkdir(parents=True)
    try:
        unexpected = record(tree, out, arguments.python, work)
    finally:
        if not arguments.work:
            shutil.rmtree(work)
    raise SystemExit(bool(unexpected))


def record(tree: Path, out: Path, python: str, work: Path) -> list[str]:
    """Record a tree in the file `out`. Return the commands with an unexpected exit code. `python`
    runs the tree; `work` is the work folder.
    """
    began = time.monotonic()
    recorded_commands.write_inputs(work, ROOT / "tests/data/stories260K")
    recorded = RecordedTree(tree, python, work)
    recorded.check_imports()
    recorded.record_flags()
    for group in (
        recorded_commands.MODEL_COMMANDS,
        recorded_commands.QUANTIZE_COMMANDS,
        recorded_commands.RUN_COMMANDS,
        recorded_commands.CHAT_COMMANDS,
    ):
        recorded.run_all(group)
    recorded.record_server()
    recorded.record_worker(recorded_commands.WORKER_COMMANDS)
    for group in (
        recorded_commands.PLAN_COMMANDS,
        recorded_commands.BENCH_COMMANDS,
        recorded_commands.FAILURES,
    ):
        recorded.run_all(group)
    recorded.record_home()
    recorded.run_all(recorded_commands.CLOSING_COMMANDS)
    out.write_text(
        json.dumps(recorded.entries, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    seconds = time.monotonic() - began
    print(f"{len(recorded.entries)} entries of {tree} in {seconds:.0f} s: {out}")
    for name in recorded.unexpected:
        print(f"wrong exit code: {name}: {json.dumps(recorded.entries[name])[:1500]}")
    return recorded.unexpected


def compare(first: Path, second: Path) -> int:
    """Print every difference between two records; return 1 if there is one, else 0."""
    records: list[dict[str, Any]] = [
        json.loads(path.read_text(encoding="utf-8")) for path in (first, second)
    ]
    found = differences(*records)
    print("\n".join(found))
    print(f"{len(found)} differences in {len(records[0])} and {len(records[1])} entries")
    return int(bool(found))


if __name__ == "__main__":
    main()
