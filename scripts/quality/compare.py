#!/usr/bin/env python3
"""Compare quantization methods by the divergence of the quantized files from a reference model.

usage: .venv/bin/python scripts/quality/compare.py TEACHER.gguf ... --tools DIR --text NAME=FILE ...
       --calibration FILE ... --out FOLDER

A row of the printed table is one file: a reference model (TEACHER.gguf), a file type, and a method.
DIR has llama-quantize and llama-imatrix. They and our methods read the same calibration texts; the
seed of a row is the number of its calibration text. Baselines are llama-quantize alone and with
llama-imatrix. Our methods are the entries of `METHODS` below, and --also adds more. Finished rows
stay in FOLDER and are not made again; the table is printed from it. A reference model's logits are
computed once.

IQ types and hand-made mixes (mixes.py) fill the baseline's bytes with the same importance matrix.
--made adds a file that another program made, such as AutoRound, to the rows of its file type.

Our default method must make the same file as each baseline; `equal` counts the tensors with the
same bytes. With --answers every file is also loaded by an unmodified llama-cli and llama-server
(scripts/reference/stock_llama_cpp.py). The exit code is 1 if one of them fails or if a method is
refused.
"""

import argparse
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from quant.model_file import read_header
from scripts.quality import mixes
from scripts.quality.runs import (
    ROOT,
    Cost,
    Failed,
    Judge,
    Setting,
    make_statistics,
    run_llama_quantize,
    run_llmcli_quantize,
    short_sha256,
)
from scripts.quality.table import EQUAL_SIZE_SHARE, Key, Ledger, Row, table
from scripts.reference import stock_llama_cpp
from scripts.reference.quantize import compare

PLAIN, BASELINE = "llama-quantize", "+ llama-imatrix"
# Mixes for llama-quantize with llama-imatrix's importance matrix, at the baseline's bytes.
IQ, HAND_MADE = "IQ types", "hand-made mix"
OTHERS = (IQ, HAND_MADE)
MADE_PREFIX = "made "  # of the flags of a file of another program; its digest follows
PREDICT = 8  # tokens per answer
UNFIT = "FAILED"  # prefix of the text that is stored for a file that did not answer
TYPES = ("Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_M", "Q6_K")
# Flags of `llmcli quantize`. `llmcli calibrate` makes {imatrix} and {moments}; {bytes} is the size
# of the baseline's file.
METHODS = {
    "own imatrix": "--imatrix {imatrix}",
    "search": "--method search --imatrix {imatrix}",
    "search + folds": "--method search --imatrix {imatrix} --fold awq",
    "gptq": "--method gptq --moments {moments}",
    "gptq + folds": "--method gptq --moments {moments} --fold awq",
    # The allocation is planned with ggml's codes, which give less divergence than the search's.
    "allocation": "--imatrix {imatrix} --target-size {bytes}",
    "gptq + allocation": "--method gptq --moments {moments} --target-size {bytes}",
}


@dataclass(frozen=True)
class MadeFile:
    """A file of a type that another program made in so many seconds: METHOD=TYPE=SECONDS=FILE."""

    method: str
    file_type: str
    seconds: float
    path: Path

    @classmethod
    def parse(cls, text: str) -> "MadeFile":
        """Return the file that an argument of --made describes."""
        method, file_type, seconds, path = text.split("=", 3)
        return cls(method, file_type, float(seconds), Path(path))


@dataclass(frozen=True)
class Work:
    """The settings and results of one reference model.

    `source`: digest of its file. `keep`: do not delete the quantized files. `tools`: folder of
    llama-cli and llama-server if files must answer in them, else None. `made`: files of other
    programs. `refused`: names of the
    methods that made no file.
    """

    teacher: Path
    source: str
    setting: Setting
    judge: Judge
    ledger: Ledger
    keep: bool
    tools: Path | None = None
    made: tuple[MadeFile, ...] = ()
    refused: list[str] = field(default_factory=list)

    def needs_row(self, key: Key) -> bool:
        """Return whether a row must be made. It must if it is missing, or if files must answer and
        its file has not answered yet.
        """
        row = self.ledger.rows().get(key.digest)
        return row is None or (self.tools is not None and not row.answers)

    def key(self, kind: str, method: str, flags: str, seed: int) -> Key:
        """Return the key of the row of a file type, a method and a seed (-1: no calibration)."""
        calibration = self.setting.calibration_id(seed) if seed >= 0 else ""
        embedding = f" embedding {self.setting.embedding}" if self.setting.embedding else ""
        return Key(
            self.teacher.stem,
            self.source,
            kind,
            method,
            flags + embedding,
            seed,
            calibration,
            self.setting.evaluation_id(),
        )

    def file_path(self, key: Key) -> Path:
        """Return the path of a row's quantized file, which is deleted after its evaluation."""
        folder = self.setting.folder / "files"
        folder.mkdir(exist_ok=True)
        return folder / f"{key.teacher}-{key.type}-{key.method.replace(' ', '')}-{key.digest}.gguf"

    def add_row(
        self, key: Key, file: Path, cost: Cost, statistics_cost: Cost | None, equal: str = ""
    ) -> None:
        """Evaluate a quantized file, store its row, and print a line. `cost` is of the
        quantization, `statistics_cost` of the calibration; `equal`: see `Row`.
        """
        scores, answers = self.judge.scores(file), self.answers(file)
        row = Row(
            key,
            nbytes(file),
            file.stat().st_size,
            cost.seconds,
            cost.cpu,
            cost.rss,
            statistics_cost.seconds if statistics_cost else 0.0,
            statistics_cost.rss if statistics_cost else 0,
            equal,
            commit(),
            answers,
        )
        self.ledger.add(row, scores)
        if not self.keep:
            file.unlink()
        details = [
            ", ".join(
                f"{name} {text_scores.kld.mean():.6f}" for name, (text_scores, _) in scores.items()
            ),
            equal,
            answers,
        ]
        print(
            f"{key.teacher} {key.type} {key.method} {key.seed}: KLD",
            *filter(None, details),
            file=sys.stderr,
            flush=True,
        )

    def answers(self, file: Path) -> str:
        """Return the answers of llama-cli and llama-server with a file, or UNFIT with the reason
        why one failed, or "" without `tools`.
        """
        if self.tools is None:
            return ""
        args = argparse.Namespace(tools=self.tools, predict=PREDICT, threads=self.setting.threads)
        try:
            return stock_llama_cpp.answers(args, file)
        except stock_llama_cpp.Unfit as problem:
            return f"{UNFIT}: {problem}"


def main() -> int:
    """Make the missing rows and print the table. Return 1 if a file did not answer or a method was
    refused.
    """
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    ledger = Ledger(args.out)
    if args.show:
        finished = [*ledger.rows().values()]
        print(table(finished, ledger, BASELINE, own_methods(finished)))
        return 0
    texts = dict(pair.split("=", 1) for pair in args.text)
    setting = Setting(
        args.out,
        args.tools,
        args.ctx,
        {name: Path(file) for name, file in texts.items()},
        args.calibration,
        args.chunks,
        args.read,
        args.threads,
        args.embedding,
    )
    methods: dict[str, str | None] = dict.fromkeys(name for name in OTHERS if name in args.method)
    methods |= {name: flags for name, flags in METHODS.items() if name in args.method}
    methods |= dict(pair.split("=", 1) for pair in args.also)
    digests, refused = [], []
    for teacher in args.teachers:
        source = short_sha256(teacher)
        work = Work(
            teacher,
            source,
            setting,
            Judge(setting, teacher, source),
            ledger,
            args.keep,
            args.answers,
            tuple(args.made),
        )
        for kind in args.type:
            for key in rows(work, kind, methods, range(len(args.calibration)), fresh=args.fresh):
                digests.append(key.digest)
        refused += work.refused
    done = ledger.rows()
    rows_shown = [done[digest] for digest in dict.fromkeys(digests) if digest in done]
    print(table(rows_shown, ledger, BASELINE, own_methods(rows_shown)))
    failed = [row for row in rows_shown if row.answers.startswith(UNFIT)]
    if args.answers:
        print(f"{len(rows_shown) - len(failed)} of {len(rows_shown)} files load and answer")
    return 1 if failed or refused else 0


def own_methods(rows: Iterable[Row]) -> set[str]:
    """Return the names of llmcli's methods among those of rows."""
    return {
        row.key.method
        for row in rows
        if row.key.method not in (PLAIN, BASELINE, *OTHERS)
        and not row.key.flags.startswith(MADE_PREFIX)
    }


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
    parser.add_argument(
        "--method", nargs="*", default=[*OTHERS, *METHODS], choices=[*OTHERS, *METHODS]
    )
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
    parser.add_argument("-t", "--threads", type=int, default=1)
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
    parser.add_argument(
        "--made",
        action="append",
        default=[],
        type=MadeFile.parse,
        metavar="METHOD=TYPE=SECONDS=FILE",
        help="add a file of another program; with one teacher only",
    )
    parser.add_argument("--keep", action="store_true", help="leave the files in FOLDER/files")
    args = parser.parse_args()
    if args.made and len(args.teachers) > 1:
        parser.error("--made needs a single teacher")
    for pair in [*args.text, *args.also]:
        if "=" not in pair:
            parser.error(f"{pair} is not NAME=VALUE")
    return args


def rows(
    work: Work, kind: str, methods: dict[str, str | None], seeds: range, fresh: list[str]
) -> Iterator[Key]:
    """Make the missing rows of one file type, and yield the keys of all its rows, the baselines
    first. `methods`: flags by name, None for a mix of llama-quantize. `fresh`: methods whose rows
    are made again.
    """
    yield make_plain_row(work, kind)
    sizes = {}
    for seed in seeds:
        key = work.key(kind, BASELINE, "", seed)
        if work.needs_row(key):
            imatrix, statistics_cost = make_statistics(
                work.setting, work.teacher, work.source, seed, "theirs"
            )
            file = work.file_path(key)
            cost = run_llama_quantize(work.setting, work.teacher, file, kind, imatrix)
            work.add_row(
                key,
                file,
                cost,
                statistics_cost,
                count_equal(work, file, kind, ["--imatrix", str(imatrix)]),
            )
        sizes[seed] = work.ledger.rows()[key.digest]
        yield key
    for name, flags in methods.items():
        if name == HAND_MADE and kind not in mixes.SMALLER_TYPE:
            continue
        for seed in seeds:
            key = work.key(kind, name, flags or "", seed)
            if work.needs_row(key) or name in fresh:
                try:
                    file, cost, statistics_cost = (
                        make_file(work, key, sizes[seed].file_bytes)
                        if flags is not None
                        else make_mix(work, key, sizes[seed].nbytes)
                    )
                except Failed as problem:
                    print(
                        f"{key.teacher} {kind} {name}: {refusal(problem)}",
                        file=sys.stderr,
                        flush=True,
                    )
                    work.refused.append(name)
                    break
                if abs(nbytes(file) / sizes[seed].nbytes - 1) > EQUAL_SIZE_SHARE:
                    print(f"{key.teacher} {kind} {name}: not the baseline's size", file=sys.stderr)
                work.add_row(key, file, cost, statistics_cost)
            yield key
    for made in work.made:
        if made.file_type == kind:
            yield add_made_row(work, made)


def add_made_row(work: Work, made: MadeFile) -> Key:
    """Evaluate a file of another program if its row is missing; return its key."""
    key = work.key(made.file_type, made.method, MADE_PREFIX + short_sha256(made.path), -1)
    if work.needs_row(key):
        linked = work.file_path(key)
        linked.unlink(missing_ok=True)
        linked.symlink_to(made.path.absolute())
        work.add_row(key, linked, Cost(made.seconds, 0.0, 0), None)
        linked.unlink(missing_ok=True)
    return key


def make_mix(work: Work, key: Key, size: int) -> tuple[Path, Cost, Cost]:
    """Make the file of a row by llama-quantize with a mix of at most `size` bytes of tensors."""
    imatrix, statistics_cost = make_statistics(
        work.setting, work.teacher, work.source, key.seed, "theirs"
    )
    mix = (
        mixes.iq_mix(work.teacher, imatrix, size, work.setting.embedding)
        if key.method == IQ
        else mixes.hand_made_mix(work.teacher, imatrix, key.type, size, work.setting.embedding)
    )
    file = work.file_path(key)
    cost = run_llama_quantize(work.setting, work.teacher, file, mix.file_type, imatrix, mix.flags)
    return file, cost, statistics_cost


def refusal(problem: Failed) -> str:
    """Return the error and the hint in the output of a program that failed, or its last line."""
    lines = str(problem).splitlines()
    first = max(
        (number for number, line in enumerate(lines) if line.startswith("error: ")),
        default=len(lines) - 1,
    )
    return "; ".join(lines[first:])


def make_plain_row(work: Work, kind: str) -> Key:
    """Make the row of llama-quantize without an importance matrix if it is missing; return its
    key.
    """
    key = work.key(kind, PLAIN, "", -1)
    if work.needs_row(key):
        file = work.file_path(key)
        cost = run_llama_quantize(work.setting, work.teacher, file, kind, None)
        work.add_row(key, file, cost, None, count_equal(work, file, kind, []))
    return key


def make_file(work: Work, key: Key, size: int) -> tuple[Path, Cost, Cost | None]:
    """Make the file of a row with one of our methods. `size`: bytes of the baseline's file. Return
    the file, its cost, and the cost of its calibration. Raises Failed if the method is refused.
    """
    flags, statistics_cost = key.flags.split(" embedding ")[0], None
    values = {"bytes": str(size)}
    for kind in ("imatrix", "moments"):
        if f"{{{kind}}}" in flags:
            path, statistics_cost = make_statistics(
                work.setting, work.teacher, work.source, key.seed, kind
            )
            values[kind] = str(path)
    file = work.file_path(key)
    cost = run_llmcli_quantize(
        work.setting,
        work.teacher,
        file,
        key.type,
        [word.format(**values) for word in flags.split()],
    )
    return file, cost, statistics_cost


def count_equal(work: Work, theirs: Path, kind: str, flags: list[str]) -> str:
    """Quantize with our default method, and return how many tensors have the same bytes as in the
    file `theirs`, such as "40/40 equal".
    """
    ours = theirs.with_suffix(".ours.gguf")
    run_llmcli_quantize(work.setting, work.teacher, ours, kind, flags)
    same, count, _ = compare(ours, theirs)
    ours.unlink()
    return f"{same}/{count} equal"


def nbytes(file: Path) -> int:
    """Return the bytes of a file's tensors. Headers differ between tools and are not counted."""
    return sum(tensor.nbytes for tensor in read_header.read_header(file).tensors)


def commit() -> str:
    """Return `git describe` of this checkout, which is stored with a row."""
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT
    ).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
