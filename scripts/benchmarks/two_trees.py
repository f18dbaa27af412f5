#!/usr/bin/env python3
"""Compare the speed of two source trees of llmcli: start-up, decode, prefill, first token.

usage: .venv/bin/python scripts/benchmarks/two_trees.py A B [--model GGUF] [--startup-pairs 30]
       [--model-pairs 15] [--prompt-tokens 512] [--predict 128] [--threads N] [--confidence 95]
       [--json]

A and B are folders with a source tree. A pair is one process of each. Start-up is the wall time of
`--help`. With --model, each tree answers one raw prompt with `run --json`, whose document has the
other three figures. A coin decides which tree of a pair runs first, so that drift of the machine
affects both. Flash attention is on and drafts are off, because a tree would otherwise measure the
machine and choose these settings itself.

For each figure the script prints both medians, the median of the pairs' ratios B/A, and the
signed-rank interval of the ratio (llmcli/bench/statistics/paired_test.py). If the interval contains
1, the data show no difference. Both trees run in this Python through PYTHONPATH, with bytecode and
LLMCLI_HOME in temporary folders.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmcli.bench.statistics.paired_test import Design, estimate_ratio

PROGRAM = "import sys; sys.argv[0] = 'llmcli'; from llmcli.app import main; main()"
LOCATION = "import llmcli; print(llmcli.__file__)"
FIXED_FLAGS = [
    "--raw",
    "--temp",
    "0",
    "-s",
    "1",
    "--ignore-eos",
    "-fa",
    "on",
    "--ngram-draft",
    "off",
]
# Figures of `run --json` under "timing", with the unit that is printed.
TIMING = {
    "tokens_per_second": "decode tok/s",
    "prompt_per_second": "prefill tok/s",
    "ttft_ms": "first token ms",
}
STARTUP = "start-up ms"


@dataclass(frozen=True)
class Tree:
    """A source tree, and a scratch folder for its bytecode and its LLMCLI_HOME."""

    path: Path
    scratch: Path

    def run(self, words: Sequence[str]) -> str:
        """Run `python -c *words` with llmcli imported from this tree; return its stdout. Raises
        SystemExit if it fails.
        """
        environment = os.environ | {
            "PYTHONPATH": str(self.path),
            "PYTHONPYCACHEPREFIX": str(self.scratch / "bytecode"),
            "LLMCLI_HOME": str(self.scratch / "home"),
        }
        command = [sys.executable, "-c", *words]
        done = subprocess.run(
            command, cwd=self.scratch, env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            sys.exit(f"{self.path}: {' '.join(words[1:])}: {done.stderr.strip()[-500:]}")
        return done.stdout

    def check(self) -> None:
        """Raise SystemExit unless Python imports llmcli from this tree."""
        location = Path(self.run([LOCATION]).strip())
        if not location.is_relative_to(self.path):
            sys.exit(f"{self.path} is not what Python imports: {location}")

    def startup(self) -> dict[str, float]:
        """Return the wall milliseconds of `llmcli --help`, by the label of the figure."""
        began = time.perf_counter()
        self.run([PROGRAM, "--help"])
        return {STARTUP: (time.perf_counter() - began) * 1000}

    def answer(self, words: Sequence[str]) -> dict[str, float]:
        """Run the command line `words`, which answers a prompt; return its figures by label."""
        timing: dict[str, Any] = json.loads(self.run([PROGRAM, *words]))["timing"]
        return {label: timing[key] for key, label in TIMING.items()}


def main() -> None:
    """Parse the flags, measure, and print a line for each figure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("a", type=Path)
    parser.add_argument("b", type=Path)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--startup-pairs", type=int, default=30)
    parser.add_argument("--model-pairs", type=int, default=15)
    parser.add_argument("--prompt-tokens", type=int, default=512, help="about; default: 512")
    parser.add_argument("--predict", type=int, default=128)
    parser.add_argument("-t", "--threads", type=int)
    parser.add_argument("--confidence", type=float, default=95.0)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trees = []
        for name, path in (("a", arguments.a), ("b", arguments.b)):
            (scratch := Path(folder) / name).mkdir()
            trees.append(Tree(path.resolve(), scratch))
            trees[-1].check()
        rows = pairs(trees, Tree.startup, arguments.startup_pairs)
        if arguments.model:
            words = answer_words(arguments)
            rows |= pairs(trees, lambda tree: tree.answer(words), arguments.model_pairs)
    results = [summary(label, *row, arguments.confidence / 100) for label, row in rows.items()]
    if arguments.json:
        print(json.dumps(results, indent=1))
    else:
        print_results(results, arguments.confidence)


def answer_words(arguments: argparse.Namespace) -> list[str]:
    """Return the arguments of llmcli that answer one prompt of about --prompt-tokens tokens."""
    # Distinct words: a model that repeats itself would end early, and a number is several tokens.
    prompt = " ".join(f"item {number}" for number in range(arguments.prompt_tokens // 4))
    context = str(2 * arguments.prompt_tokens + arguments.predict + 64)
    words = ["run", str(arguments.model.resolve()), prompt, "--json", "--endless", "--no-profile"]
    words += [*FIXED_FLAGS, "-c", context, "-n", str(arguments.predict)]
    return [*words, "-t", str(arguments.threads)] if arguments.threads else words


def pairs(
    trees: Sequence[Tree], measure: Callable[[Tree], dict[str, float]], count: int
) -> dict[str, tuple[list[float], list[float]]]:
    """Measure `count` pairs in random order, after a warm-up run of each tree. Return for each
    figure's label the values of A and of B.
    """
    for tree in trees:
        measure(tree)
    rows: dict[str, tuple[list[float], list[float]]] = {}
    coin = random.Random()
    for number in range(1, count + 1):
        for side in (0, 1) if coin.random() < 0.5 else (1, 0):
            for label, value in measure(trees[side]).items():
                rows.setdefault(label, ([], []))[side].append(value)
        print(f"\rpair {number} of {count}", end="", file=sys.stderr)
    print(file=sys.stderr)
    return rows


def summary(label: str, a: list[float], b: list[float], confidence: float) -> dict[str, Any]:
    """Return the JSON object of one figure: the medians of both trees, the median ratio B/A, and
    the interval of the ratio at `confidence` (a share of 1).
    """
    result = estimate_ratio(a, b, Design(confidence=confidence))
    assert result
    return {
        "figure": label,
        "pairs": len(a),
        "a_median": statistics.median(a),
        "b_median": statistics.median(b),
        "median_ratio": statistics.median(y / x for x, y in zip(a, b, strict=True)),
        "ratio": result.ratio,
        "low": result.low,
        "high": result.high,
        "a": a,
        "b": b,
    }


def print_results(results: Sequence[dict[str, Any]], confidence: float) -> None:
    """Print a table with a line for each figure. `confidence` is in percent."""
    print(f"{'':16}{'A':>10}{'B':>10}{'B/A':>8}  {confidence:g} % interval  pairs")
    for row in results:
        interval = f"{row['low']:.3f}-{row['high']:.3f}"
        print(
            f"{row['figure']:16}{row['a_median']:10.1f}{row['b_median']:10.1f}"
            f"{row['median_ratio']:8.3f}  {interval:>13}  {row['pairs']}"
        )


if __name__ == "__main__":
    main()
