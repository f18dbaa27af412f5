#!/usr/bin/env python3
"""Compare ways to quantize: reference model x file type x method, by the answers of the files.

usage: .venv/bin/python scripts/quality/compare.py TEACHER.gguf ... --tools DIR --text NAME=FILE ...
       --calibration FILE ... --out FOLDER

DIR has llama-quantize and llama-imatrix; they and our methods read the same calibration texts, one
per seed. Baselines are llama-quantize alone and with llama-imatrix. Every method is a row of
`METHODS` below; --also adds more. Finished rows stay in FOLDER and are not made again; the table is
printed from it. A reference model's logits are computed once.

Our default method makes the same file as each baseline: `equal` counts the tensors with the same
bytes. With --answers every file is also loaded by an unmodified llama-cli and llama-server
(scripts/reference/stock_llama_cpp.py). The exit code is 1 if one of them fails or a method is
refused.
"""

import argparse
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from quant.model_file import read_header
from scripts.quality.runs import ROOT, Cost, Failed, Judge, Setting, ours, sha, statistics, upstream
from scripts.quality.table import BYTES, Key, Ledger, Row, table
from scripts.reference import stock_llama_cpp
from scripts.reference.quantize import compare

PLAIN, BASELINE = "llama-quantize", "+ llama-imatrix"
PREDICT, UNFIT = (
    8,
    "FAILED",
)  # tokens per answer; prefix of the stored text of a file that did not answer
TYPES = ("Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_M", "Q6_K")
# Flags of `llmcli quantize`. `llmcli calibrate` makes {imatrix} and {moments}; {bytes} is the size
# of the baseline's file.
METHODS = {
    "own imatrix": "--imatrix {imatrix}",
    "search": "--method search --imatrix {imatrix}",
    "search + folds": "--method search --imatrix {imatrix} --fold awq",
    "gptq": "--method gptq --moments {moments}",
    "gptq + folds": "--method gptq --moments {moments} --fold awq",
    # Planned with ggml's codes, which gave less divergence than those of the search.
    "allocation": "--imatrix {imatrix} --target-size {bytes}",
    "gptq + allocation": "--method gptq --moments {moments} --target-size {bytes}",
}


@dataclass(frozen=True)
class Work:
    """The part of the run for one reference model."""

    teacher: Path
    source: str
    setting: Setting
    judge: Judge
    ledger: Ledger
    keep: bool
    tools: Path | None = None  # folder of llama-cli and llama-server, if files must answer in them
    refused: list[str] = field(default_factory=list)  # methods that made no file

    def lacks(self, key: Key) -> bool:
        """Return whether a row must be made: it is missing, or its file has not answered yet and
        should.
        """
        found = self.ledger.rows().get(key.digest)
        return found is None or (self.tools is not None and not found.answers)

    def key(self, kind: str, method: str, flags: str, seed: int) -> Key:
        """Return the key of a row."""
        calibration = self.setting.calibrated(seed) if seed >= 0 else ""
        embedding = f" embedding {self.setting.embedding}" if self.setting.embedding else ""
        return Key(
            self.teacher.stem,
            self.source,
            kind,
            method,
            flags + embedding,
            seed,
            calibration,
            self.setting.read_by(),
        )

    def out(self, key: Key) -> Path:
        """Return the path of a file while it is evaluated."""
        folder = self.setting.folder / "files"
        folder.mkdir(exist_ok=True)
        return folder / f"{key.teacher}-{key.type}-{key.method.replace(' ', '')}-{key.digest}.gguf"

    def finish(
        self, key: Key, file: Path, cost: Cost, before: Cost | None, equal: str = ""
    ) -> None:
        """Evaluate a file and store its row."""
        scores, answers = self.judge.scores(file), self.answers(file)
        row = Row(
            key,
            nbytes(file),
            file.stat().st_size,
            cost.seconds,
            cost.cpu,
            cost.rss,
            before.seconds if before else 0.0,
            before.rss if before else 0,
            equal,
            commit(),
            answers,
        )
        self.ledger.add(row, scores)
        if not self.keep:
            file.unlink()
        told = [
            ", ".join(f"{name} {found.kld.mean():.6f}" for name, (found, _) in scores.items()),
            equal,
            answers,
        ]
        print(
            f"{key.teacher} {key.type} {key.method} {key.seed}: KLD",
            *filter(None, told),
            file=sys.stderr,
            flush=True,
        )

    def answers(self, file: Path) -> str:
        """Return the answers of llama-cli and llama-server with a file, or why they failed."""
        if self.tools is None:
            return ""
        asked = argparse.Namespace(tools=self.tools, predict=PREDICT, threads=self.setting.threads)
        try:
            return stock_llama_cpp.answers(asked, file)
        except stock_llama_cpp.Unfit as problem:
            return f"{UNFIT}: {problem}"


def main() -> int:
    """Make missing rows and print the table; return 1 if a file did not answer or a method was
    refused.
    """
    asked = arguments()
    asked.out.mkdir(parents=True, exist_ok=True)
    ledger = Ledger(asked.out)
    if asked.show:
        print(table(ledger.rows().values(), ledger, BASELINE))
        return 0
    texts = dict(pair.split("=", 1) for pair in asked.text)
    setting = Setting(
        asked.out,
        asked.tools,
        asked.ctx,
        {name: Path(file) for name, file in texts.items()},
        asked.calibration,
        asked.chunks,
        asked.read,
        asked.threads,
        asked.embedding,
    )
    methods = {name: flags for name, flags in METHODS.items() if name in asked.method}
    methods |= dict(pair.split("=", 1) for pair in asked.also)
    shown, refused = [], []
    for teacher in asked.teachers:
        source = sha(teacher)
        work = Work(
            teacher,
            source,
            setting,
            Judge(setting, teacher, source),
            ledger,
            asked.keep,
            asked.answers,
        )
        for kind in asked.type:
            for key in rows(work, kind, methods, range(len(asked.calibration)), fresh=asked.fresh):
                shown.append(key.digest)
        refused += work.refused
    done = ledger.rows()
    found = [done[digest] for digest in dict.fromkeys(shown) if digest in done]
    print(table(found, ledger, BASELINE))
    failed = [row for row in found if row.answers.startswith(UNFIT)]
    if asked.answers:
        print(f"{len(found) - len(failed)} of {len(found)} files load and answer")
    return 1 if failed or refused else 0


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("teachers", nargs="+", type=Path)
    parser.add_argument("--tools", type=Path, required=True)
    parser.add_argument(
        "--text", action="append", required=True, metavar="NAME=FILE", help="evaluation; repeatable"
    )
    parser.add_argument("--calibration", nargs="+", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--type", nargs="+", default=list(TYPES))
    parser.add_argument("--method", nargs="*", default=list(METHODS), choices=list(METHODS))
    parser.add_argument(
        "--also", action="append", default=[], metavar="NAME=FLAGS", help="add a method"
    )
    parser.add_argument(
        "--fresh",
        nargs="*",
        default=[],
        metavar="METHOD",
        help="make the rows of these methods again",
    )
    parser.add_argument("--ctx", type=int, default=512)
    parser.add_argument("--chunks", type=int, help="evaluate at most this many chunks of a text")
    parser.add_argument("--read", type=int, help="calibrate with at most this many chunks")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--embedding", metavar="TYPE", help="one type for token_embd.weight on every side"
    )
    parser.add_argument(
        "--show", action="store_true", help="print the table of the finished rows, make nothing"
    )
    parser.add_argument(
        "--answers",
        type=Path,
        metavar="DIR",
        help="folder of llama-cli and llama-server; each file must answer",
    )
    parser.add_argument("--keep", action="store_true", help="leave the files in FOLDER/files")
    asked = parser.parse_args()
    for pair in [*asked.text, *asked.also]:
        if "=" not in pair:
            parser.error(f"{pair} is not NAME=VALUE")
    return asked


def rows(
    work: Work, kind: str, methods: dict[str, str], seeds: range, fresh: list[str]
) -> Iterator[Key]:
    """Make the missing rows of one type; yield all keys, the baselines first."""
    yield plain(work, kind)
    sizes = {}
    for seed in seeds:
        key = work.key(kind, BASELINE, "", seed)
        if work.lacks(key):
            imatrix, before = statistics(work.setting, work.teacher, work.source, seed, "theirs")
            file = work.out(key)
            cost = upstream(work.setting, work.teacher, file, kind, imatrix)
            work.finish(
                key, file, cost, before, alike(work, file, kind, ["--imatrix", str(imatrix)])
            )
        sizes[seed] = work.ledger.rows()[key.digest]
        yield key
    for name, flags in methods.items():
        for seed in seeds:
            key = work.key(kind, name, flags, seed)
            if work.lacks(key) or name in fresh:
                try:
                    file, cost, before = made(work, key, sizes[seed].file_bytes)
                except Failed as problem:
                    print(
                        f"{key.teacher} {kind} {name}: {refusal(problem)}",
                        file=sys.stderr,
                        flush=True,
                    )
                    work.refused.append(name)
                    break
                if abs(nbytes(file) / sizes[seed].nbytes - 1) > BYTES:
                    print(f"{key.teacher} {kind} {name}: not the baseline's size", file=sys.stderr)
                work.finish(key, file, cost, before)
            yield key


def refusal(problem: Failed) -> str:
    """Return the error and hint in a program's output, or its last line."""
    lines = str(problem).splitlines()
    first = max(
        (number for number, line in enumerate(lines) if line.startswith("error: ")),
        default=len(lines) - 1,
    )
    return "; ".join(lines[first:])


def plain(work: Work, kind: str) -> Key:
    """Quantize with llama-quantize without statistics."""
    key = work.key(kind, PLAIN, "", -1)
    if work.lacks(key):
        file = work.out(key)
        cost = upstream(work.setting, work.teacher, file, kind, None)
        work.finish(key, file, cost, None, alike(work, file, kind, []))
    return key


def made(work: Work, key: Key, size: int) -> tuple[Path, Cost, Cost | None]:
    """Make a file with one of our methods; return it, its cost and the cost of its statistics.
    Raises Failed.
    """
    flags, before = key.flags.split(" embedding ")[0], None
    values = {"bytes": str(size)}
    for kind in ("imatrix", "moments"):
        if f"{{{kind}}}" in flags:
            path, before = statistics(work.setting, work.teacher, work.source, key.seed, kind)
            values[kind] = str(path)
    file = work.out(key)
    cost = ours(
        work.setting,
        work.teacher,
        file,
        key.type,
        [word.format(**values) for word in flags.split()],
    )
    return file, cost, before


def alike(work: Work, theirs: Path, kind: str, flags: list[str]) -> str:
    """Return how many tensors our default method makes with the same bytes, of how many."""
    mine = theirs.with_suffix(".ours.gguf")
    ours(work.setting, work.teacher, mine, kind, flags)
    same, count, _ = compare(mine, theirs)
    mine.unlink()
    return f"{same}/{count} equal"


def nbytes(file: Path) -> int:
    """Return the bytes of a file's tensors; the rest of the file differs between tools."""
    return sum(tensor.nbytes for tensor in read_header.read_header(file).tensors)


def commit() -> str:
    """Return the commit that makes a row."""
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT
    ).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
