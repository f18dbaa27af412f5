#!/usr/bin/env python3
"""Compare drafting in llmcli with llama.cpp's llama-speculative-simple and llama-lookahead, in turn.

usage: .venv/bin/python scripts/benchmarks/llama_speculative.py MODEL.gguf
       --simple LLAMA_SPECULATIVE_SIMPLE [--lookahead LLAMA_LOOKAHEAD] [-md DRAFT.gguf]
       [--heads HEADS.gguf] [--tasks summary,edit,extraction,code,free] [-n 128] [-t N] [--rounds 3]
       [--only plain,auto]

Each program continues one prompt of each kind of `llmcli bench spec` greedily by -n tokens, in a
process of its own. The prompts are raw text without control tokens, so that all programs read the
same tokens. A round runs all programs once for a prompt, in random order. For each method the script
prints the median tokens per second after the first token, as each program reports them, and the
median ratios with 95 % intervals: to plain decoding of llmcli, and to the program of llama.cpp with
the same method and its default settings. It also prints how many texts begin like those of plain
decoding, with the first COMPARED characters: others continue where two tokens are almost equally
likely.
"""

import argparse
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from llmcli.bench.spec.task_kinds import TASK_NAMES, load_task_kind
from scripts.benchmarks.paired_runs import LLMCLI, document, interval

PROMPT = "Question: {}\nAnswer:"
COMPARED = 60
SPEED = re.compile(r"decoded\s+\d+ tokens in\s+[\d.]+ seconds, speed:\s+([\d.]+) t/s")
# the methods of llmcli with the program of llama.cpp that drafts in the same way
PEERS = {
    "ngram": "simple ngram-simple",
    "model": "simple draft-simple",
    "lookahead": "lookahead of llama.cpp",
}


@dataclass(frozen=True)
class Continuation:
    """What a program has written, without the prompt, and its tokens per second."""

    speed: float
    text: str

    @property
    def beginning(self) -> str:
        return self.text.strip()[:COMPARED]


Program = Callable[[Path], Continuation]


def ours(model: Path, flags: list[str], args: argparse.Namespace) -> Program:
    """Return a function that continues a prompt with llmcli."""

    def run(prompt: Path) -> Continuation:
        words = ["run", str(model), "--raw", "-f", str(prompt), "--json", "--temp", "0"]
        options = ["-n", str(args.n), "-t", str(args.threads), "--ignore-eos", "-c", "4096"]
        found = document([*LLMCLI, *words, *options, *flags])
        seconds = sum(token["ms"] for token in found["tokens"][1:]) / 1e3
        return Continuation((len(found["tokens"]) - 1) / seconds, found["text"])

    return run


def theirs(program: Path, model: Path, flags: list[str], args: argparse.Namespace) -> Program:
    """Return a function that continues a prompt with a program of llama.cpp."""

    def run(prompt: Path) -> Continuation:
        words = [str(program), "-m", str(model), "-f", str(prompt), "--temp", "0", "-c", "4096"]
        options = ["-n", str(args.n), "-t", str(args.threads), "--ignore-eos"]
        done = subprocess.run([*words, *options, *flags], capture_output=True, text=True)
        found = SPEED.search(done.stderr + done.stdout)
        if found is None:
            sys.exit(f"{program.name}: {done.stderr[-500:]}")
        text = done.stdout.split(prompt.read_text(), 1)[-1]
        return Continuation(float(found[1]), text)

    return run


def programs(args: argparse.Namespace) -> dict[str, Program]:
    """Return the programs to run by the name of their method."""
    model, simple = args.model, args.simple
    found = {
        "plain": ours(model, ["--draft", "off"], args),
        "auto": ours(model, [], args),
        "ngram": ours(model, ["--draft", "ngram"], args),
        "simple ngram-simple": theirs(simple, model, ["--spec-type", "ngram-simple"], args),
    }
    if args.draft:
        draft = ["-md", str(args.draft)]
        found["model"] = ours(model, ["--draft", "model", *draft], args)
        found["model and ngram"] = ours(model, draft, args)
        flags = ["--spec-type", "draft-simple", *draft]
        found["simple draft-simple"] = theirs(simple, model, flags, args)
    if args.heads:
        found["heads"] = ours(model, ["-md", str(args.heads)], args)
    if args.lookahead:
        found["lookahead"] = ours(model, ["--draft", "lookahead"], args)
        found["lookahead of llama.cpp"] = theirs(args.lookahead, model, [], args)
    return found


def main() -> None:
    """Parse the flags, run the programs and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--simple", type=Path, required=True)
    parser.add_argument("--lookahead", type=Path)
    parser.add_argument("-md", "--draft", type=Path)
    parser.add_argument("--heads", type=Path)
    parser.add_argument("--tasks", default=",".join(TASK_NAMES))
    parser.add_argument("-n", type=int, default=128)
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", help="programs to run, with plain")
    args = parser.parse_args()
    runs, rng = programs(args), random.Random(1)
    if args.only:
        names = args.only.split(",")
        if unknown := {*names} - runs.keys():
            parser.error(f"--only has {min(unknown)}; with these files it takes {', '.join(runs)}")
        runs = {name: run for name, run in runs.items() if name in ("plain", *names)}
    speeds: dict[str, list[float]] = defaultdict(list)
    beginnings: dict[str, list[str]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        for task in args.tasks.split(","):
            file = Path(folder) / "prompt.txt"
            file.write_text(PROMPT.format(load_task_kind(task).prompts[0]))
            first = len(next(iter(speeds.values()), []))
            for _ in range(args.rounds):
                for name in rng.sample(list(runs), len(runs)):
                    found = runs[name](file)
                    speeds[name].append(found.speed)
                    beginnings[name].append(found.beginning)
            print_table(task, {name: rates[first:] for name, rates in speeds.items()})
    print_table("all", speeds)
    plain = beginnings["plain"]
    equal = {
        name: sum(one == two for one, two in zip(found, plain, strict=True))
        for name, found in beginnings.items()
    }
    print(f"texts of {len(plain)} that begin like those of plain decoding: {json.dumps(equal)}")


def print_table(task: str, speeds: dict[str, list[float]]) -> None:
    """Print a line for each method, and a document of all speeds."""
    print(f"{task}:", flush=True)
    for name, found in speeds.items():
        line = f"  {name:22} {statistics.median(found):7.1f} tok/s"
        peer = PEERS.get(name, "")
        for other in ("plain", peer):
            if other in speeds and other != name:
                ratios = [one / two for one, two in zip(found, speeds[other], strict=True)]
                low, high = interval(ratios)
                line += f"  {statistics.median(ratios):.2f} ({low:.2f} to {high:.2f}) of {other}"
        print(line, flush=True)
    if task == "all":
        print(json.dumps(speeds))


if __name__ == "__main__":
    main()
