#!/usr/bin/env python3
"""Let models complete small Python functions, and run their tests.

usage: .venv/bin/python scripts/quality/tasks/code_completion.py FILE.gguf ... [--threads 2]

The problems (code_problems.py) have HumanEval's form: a signature and a docstring, of which the
model writes the body by its likeliest tokens. Each completed function runs in a process of its own
with limits of time, memory and file size. For each file the script prints how many functions pass
their tests, and which problems differ from the first file's.
"""

import argparse
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from scripts.quality.tasks.answers import answer
from scripts.quality.tasks.code_problems import PROBLEMS, CodeProblem

STOPS = ["\ndef ", "\nclass ", "\nif __name__", "\nprint(", "\n#", "\nassert "]
MAX_TOKENS, PARALLEL = 320, 4
CPU_SECONDS, WALL_SECONDS, MEMORY_BYTES = 5, 20, 1 << 29


def main() -> None:
    """Parse the flags, complete all functions with every file and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("-t", "--threads", type=int, default=2)
    args = parser.parse_args()
    print("file | functions that pass | gained and lost against the first file")
    first: list[bool] = []
    for file in args.files:
        passed = [
            passes(problem, body)
            for problem, body in zip(PROBLEMS, bodies(file, args.threads), strict=True)
        ]
        first = first or passed
        gained = names(new and not old for new, old in zip(passed, first, strict=True))
        lost = names(old and not new for new, old in zip(passed, first, strict=True))
        changes = "; ".join(
            f"{word} {', '.join(found)}" for word, found in (("+", gained), ("-", lost)) if found
        )
        print(f"{file.name} | {sum(passed)} of {len(PROBLEMS)} | {changes}", flush=True)


def names(selected: Iterable[bool]) -> list[str]:
    """Return the names of the functions for which the boolean in the same place is true."""
    return [
        problem.prompt.removeprefix("def ").partition("(")[0]
        for problem, flag in zip(PROBLEMS, selected, strict=True)
        if flag
    ]


def bodies(model: Path, threads: int) -> list[str]:
    """Return the body that a model writes for each problem."""
    requests = [
        {"prompt": problem.prompt, "max_tokens": MAX_TOKENS, "stop": STOPS} for problem in PROBLEMS
    ]
    flags = ["-np", str(PARALLEL), "-t", str(threads)]
    responses = answer(model, "/v1/completions", requests, flags)
    return [response["choices"][0]["text"] for response in responses]


def passes(problem: CodeProblem, body: str) -> bool:
    """Return whether a function passes its tests. What a model wrote is untrusted: it runs without
    the site's packages, in an empty folder, within limits.
    """
    program = f"{problem.prompt}{body}\n\n{problem.tests}"
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-S", "-c", program],
                cwd=folder,
                env={},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=WALL_SECONDS,
                check=False,
                preexec_fn=limit_process,
            )
        except subprocess.TimeoutExpired:
            return False
    return done.returncode == 0


def limit_process() -> None:
    """Limit the time, memory and file size of this process."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main()
