"""The programs that compare.py runs for calibration and quantization, and its evaluation.

A program's seconds, CPU time and peak memory come from the kernel (wait4). The evaluation follows
llama-perplexity through quant/evaluation. A reference model's logits are computed once per text and
stored as float32.
"""

import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmcli.runtime.requests.request import RunOptions
from llmcli.runtime.scoring import chunk_scorer
from llmcli.ui import UI
from llmcli.workflows.evaluation.models import open_scorers, tokenize_text
from llmcli.workflows.evaluation.text import prepare_side, read_evaluation_text
from quant.evaluation import evaluate
from quant.evaluation.divergence import PositionScores, ThreadedScorer

ROOT = Path(__file__).resolve().parents[2]
LLMCLI = [sys.executable, "-m", "llmcli.app"]


class Failed(Exception):
    """The last output of a program that failed."""


@dataclass(frozen=True)
class Cost:
    """The cost of a program: wall seconds, CPU seconds, peak resident bytes."""

    seconds: float
    cpu: float
    rss: int


# This program runs a command and writes its cost to a file. The kernel counts the parent's memory
# at the start as the child's, and this process holds the logits: so this small program is the
# parent.
BETWEEN = """
import json, os, subprocess, sys, time
begun = time.monotonic()
child = subprocess.Popen(sys.argv[2:], stdin=subprocess.DEVNULL)
_, status, usage = os.wait4(child.pid, 0)
child.returncode = os.waitstatus_to_exitcode(status)
cost = [time.monotonic() - begun, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024]
open(sys.argv[1], "w").write(json.dumps(cost))
sys.exit(child.returncode if child.returncode >= 0 else 128 - child.returncode)
"""


def run(command: list[str]) -> Cost:
    """Run a command from the repository root without output. Raises Failed."""
    with tempfile.TemporaryFile() as told, tempfile.NamedTemporaryFile() as cost:
        between = [sys.executable, "-c", BETWEEN, cost.name, *command]
        done = subprocess.run(
            between, stdout=told, stderr=told, stdin=subprocess.DEVNULL, cwd=ROOT, check=False
        )
        if done.returncode:
            told.seek(0)
            raise Failed(
                told.read().decode(errors="replace").strip()[-600:] or f"exit {done.returncode}"
            )
        return Cost(*json.loads(Path(cost.name).read_text()))


@dataclass(frozen=True)
class Setting:
    """The settings of all rows of a run. `texts`: name -> file; `chunks` limits evaluation and
    `read` calibration.
    """

    folder: Path
    tools: Path
    ctx: int
    texts: dict[str, Path]
    calibration: list[Path]
    chunks: int | None
    read: int | None
    threads: int
    embedding: str | None

    def calibrated(self, seed: int) -> str:
        """Return the identity of a calibration."""
        return f"{sha(self.calibration[seed])} {self.ctx} {self.read}"

    def read_by(self) -> str:
        """Return the identity of the evaluations."""
        return " ".join(
            [
                *(f"{name} {sha(file)}" for name, file in self.texts.items()),
                str(self.ctx),
                str(self.chunks),
            ]
        )


def sha(path: Path) -> str:
    """Return the beginning of a file's SHA-256."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def statistics(
    setting: Setting, teacher: Path, source: str, seed: int, kind: str
) -> tuple[Path, Cost]:
    """Return a statistics file, made once: "theirs" (llama-imatrix), "imatrix", or "moments"."""
    name = hashlib.sha256(f"{source} {setting.calibrated(seed)} {kind}".encode()).hexdigest()[:16]
    out = setting.folder / "statistics" / f"{name}.gguf"
    cost = out.with_suffix(".json")
    if not cost.exists():
        out.parent.mkdir(exist_ok=True)
        text, chunks = (
            str(setting.calibration[seed]),
            ["--chunks", str(setting.read)] if setting.read else [],
        )
        part = out.with_suffix(".part.gguf")
        common = ["-f", text, "-c", str(setting.ctx), *chunks, "-t", str(setting.threads), "-o"]
        if kind == "theirs":
            took = run(
                [str(setting.tools / "llama-imatrix"), "-m", str(teacher), *common, str(part)]
            )
        elif kind == "imatrix":
            took = run([*LLMCLI, "calibrate", str(teacher), *common, str(part)])
        else:
            beside = out.with_suffix(".imatrix.gguf")
            took = run(
                [*LLMCLI, "calibrate", str(teacher), *common, str(beside), "--moments", str(part)]
            )
        part.replace(out)
        cost.write_text(json.dumps([took.seconds, took.cpu, took.rss]))
    return out, Cost(*json.loads(cost.read_text()))


def upstream(setting: Setting, teacher: Path, out: Path, kind: str, imatrix: Path | None) -> Cost:
    """Run llama-quantize."""
    flags = ["--imatrix", str(imatrix)] if imatrix else []
    flags += ["--token-embedding-type", setting.embedding] if setting.embedding else []
    command = [
        str(setting.tools / "llama-quantize"),
        *flags,
        str(teacher),
        str(out),
        kind,
        str(setting.threads),
    ]
    return run(command)


def ours(setting: Setting, teacher: Path, out: Path, kind: str, flags: list[str]) -> Cost:
    """Run `llmcli quantize`; flags with a size choose the types themselves."""
    sized = any(flag.startswith(("--target", "--plan")) for flag in flags)
    flags = [*flags, *(["--token-embedding-type", setting.embedding] if setting.embedding else [])]
    return run(
        [
            *LLMCLI,
            "quantize",
            str(teacher),
            "-o",
            str(out),
            "--threads",
            str(setting.threads),
            "--force",
            *([] if sized else ["-t", kind]),
            *flags,
        ]
    )


class Judge:
    """One reference model's logits on every text, and the comparison of other files with them."""

    def __init__(self, setting: Setting, teacher: Path, source: str) -> None:
        self.setting, self.teacher, self.source, self.ui = setting, teacher, source, UI()
        self.options = RunOptions(
            setting.ctx, setting.threads, None, 2048, 512, "auto", "auto", "f16", "f16"
        )
        self.texts = {name: self._chunks(file) for name, file in setting.texts.items()}

    def _chunks(self, file: Path) -> evaluate.TextChunks:
        found = tokenize_text(
            prepare_side(self.teacher, self.options, self.ui), read_evaluation_text(file).content
        )
        return evaluate.split_text(found, self.setting.ctx, self.setting.chunks)

    def scores(self, file: Path) -> dict[str, tuple[PositionScores, int]]:
        """Return a file's scores against the reference model per text, and the positions of a
        chunk.
        """
        found, bases = {}, {name: np.load(self._base(name), mmap_mode="r") for name in self.texts}
        with self._opened(file) as (scorer, at_once):
            for name, text in self.texts.items():
                model = Told(scorer)
                base = Stored(bases[name], model)
                lanes = ThreadedScorer(scorer.n_vocab, self.setting.threads)
                try:
                    whole = evaluate.Evaluation(model, base, None, text, lanes)
                    parts = []
                    for numbers in groups(text, at_once[name]):
                        base.numbers = numbers
                        parts += whole.score(numbers)[0]
                finally:
                    lanes.close()
                found[name] = (PositionScores.join(parts), text.scored_count)
        return found

    def _base(self, name: str) -> Path:
        """Return the file of the reference model's logits on a text, F32 `[chunks, positions,
        words]` (.npy).
        """
        text = self.texts[name]
        identity = (
            f"{self.source} {hashlib.sha256(text.ids.tobytes()).hexdigest()} {self.setting.ctx}"
        )
        out = (
            self.setting.folder
            / "base"
            / f"{hashlib.sha256(identity.encode()).hexdigest()[:16]}.npy"
        )
        if out.exists():
            return out
        out.parent.mkdir(exist_ok=True)
        part = out.with_suffix(".part")
        with self._opened(self.teacher) as (scorer, at_once):
            shape = (text.count, text.scored_count, scorer.n_vocab)
            kept = np.lib.format.open_memmap(part, "w+", np.float32, shape)
            for numbers in groups(text, at_once[name]):
                at = 0
                for block in scorer.blocks(text.ids[numbers]):
                    kept[numbers[0] : numbers[-1] + 1, at : at + block.shape[1]] = block
                    at += block.shape[1]
            kept.flush()
        part.replace(out)
        return out

    @contextmanager
    def _opened(self, file: Path) -> Iterator[tuple[chunk_scorer.ChunkScorer, dict[str, int]]]:
        subject = prepare_side(file, self.options, self.ui)
        at_once = {
            name: chunk_scorer.chunks_per_pass(
                text.n_ctx, self.options.batch_size, subject.n_vocab, text.count
            )
            for name, text in self.texts.items()
        }
        with open_scorers(subject, None, max(at_once.values())) as (scorer, _):
            yield scorer, at_once


class Told:
    """A scorer that remembers the number of positions of its last block."""

    def __init__(self, scorer: chunk_scorer.ChunkScorer) -> None:
        self.scorer, self.width = scorer, 0

    def blocks(self, ids: NDArray[np.int32]) -> Iterator[NDArray[np.float32]]:
        """Yield the scorer's blocks."""
        for block in self.scorer.blocks(ids):
            self.width = block.shape[1]
            yield block


class Stored:
    """Stored logits as a scorer of the chunks `numbers`, in blocks as long as those of the other
    scorer.
    """

    def __init__(self, logits: NDArray[np.float32], beside: Told) -> None:
        self.logits, self.beside, self.numbers = logits, beside, [0]

    def blocks(self, ids: NDArray[np.int32]) -> Iterator[NDArray[np.float32]]:
        """Yield the stored logits of these chunks."""
        kept, at = self.logits[self.numbers[0] : self.numbers[-1] + 1], 0
        assert len(kept) == len(ids), (len(kept), len(ids))
        while at < kept.shape[1]:
            width = self.beside.width  # the last block may be shorter
            yield kept[:, at : at + width]
            at += width


def groups(text: evaluate.TextChunks, at_once: int) -> list[list[int]]:
    """Return the numbers of the chunks, grouped by pass."""
    return [list(range(at, min(at + at_once, text.count))) for at in range(0, text.count, at_once)]
