"""The calibration, quantization and evaluation of files for compare.py.

Programs run in processes, whose CPU time and peak memory the kernel reports (wait4). Evaluation
uses quant/evaluation, which follows llama-perplexity. A reference model's logits are computed once
per text and stored as float32.
"""

import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
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
    """A program failed; the message is the end of its output."""


@dataclass(frozen=True)
class Cost:
    """The cost of running a program: wall seconds, CPU seconds, peak resident bytes."""

    seconds: float
    cpu: float
    rss: int


# This program runs a command and writes its cost to a file. The kernel counts the memory of the
# parent at the start as memory of the child. This process has large logits in memory, so the
# command needs a small parent.
LAUNCHER = """
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
    """Run a command from the repository root without showing its output; return its cost. Raises
    Failed if it fails.
    """
    with tempfile.TemporaryFile() as output, tempfile.NamedTemporaryFile() as cost:
        command_line = [sys.executable, "-c", LAUNCHER, cost.name, *command]
        done = subprocess.run(
            command_line,
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
            cwd=ROOT,
            check=False,
        )
        if done.returncode:
            output.seek(0)
            raise Failed(
                output.read().decode(errors="replace").strip()[-600:] or f"exit {done.returncode}"
            )
        return Cost(*json.loads(Path(cost.name).read_text()))


@dataclass(frozen=True)
class Setting:
    """The settings that all rows of a run of compare.py share.

    `folder`: where results are stored. `tools`: folder of llama-quantize and llama-imatrix. `ctx`:
    tokens of a chunk. `texts`: evaluation texts by name. `calibration`: the calibration text of
    each seed. `chunks`, `read`: the largest number of chunks for evaluation and for calibration,
    or None. `embedding`: the type of token_embd.weight, or None for the method's choice.
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

    def calibration_id(self, seed: int) -> str:
        """Return a string that differs between calibrations with different results."""
        return f"{short_sha256(self.calibration[seed])} {self.ctx} {self.read}"

    def evaluation_id(self) -> str:
        """Return a string that differs between evaluations with different results."""
        return " ".join(
            [
                *(f"{name} {short_sha256(file)}" for name, file in self.texts.items()),
                str(self.ctx),
                str(self.chunks),
            ]
        )


def short_sha256(path: Path) -> str:
    """Return the first 16 hexadecimal digits of a file's SHA-256."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def make_statistics(
    setting: Setting, teacher: Path, source: str, seed: int, kind: str
) -> tuple[Path, Cost]:
    """Return a file with calibration statistics, and the cost of making it. It is made once and
    reused.

    `kind`: "theirs" (an importance matrix by llama-imatrix), "imatrix" or "moments" (both by
    `llmcli calibrate`). `source`: digest of the reference model's file.
    """
    name = hashlib.sha256(f"{source} {setting.calibration_id(seed)} {kind}".encode()).hexdigest()[
        :16
    ]
    out = setting.folder / "statistics" / f"{name}.gguf"
    cost = out.with_suffix(".json")
    if not cost.exists():
        out.parent.mkdir(exist_ok=True)
        text, chunks = (
            str(setting.calibration[seed]),
            ["--chunks", str(setting.read)] if setting.read else [],
        )
        partial = out.with_suffix(".part.gguf")
        common = ["-f", text, "-c", str(setting.ctx), *chunks, "-t", str(setting.threads), "-o"]
        if kind == "theirs":
            measured = run(
                [str(setting.tools / "llama-imatrix"), "-m", str(teacher), *common, str(partial)]
            )
        elif kind == "imatrix":
            measured = run([*LLMCLI, "calibrate", str(teacher), *common, str(partial)])
        else:
            imatrix_path = out.with_suffix(".imatrix.gguf")
            measured = run(
                [
                    *LLMCLI,
                    "calibrate",
                    str(teacher),
                    *common,
                    str(imatrix_path),
                    "--moments",
                    str(partial),
                ]
            )
        partial.replace(out)
        cost.write_text(json.dumps([measured.seconds, measured.cpu, measured.rss]))
    return out, Cost(*json.loads(cost.read_text()))


def run_llama_quantize(
    setting: Setting,
    teacher: Path,
    out: Path,
    kind: str,
    imatrix: Path | None,
    mix_flags: Sequence[str] = (),
) -> Cost:
    """Quantize `teacher` to the type `kind` with llama-quantize; return the cost. `mix_flags`:
    flags with the types of single tensors.
    """
    flags = [*(["--imatrix", str(imatrix)] if imatrix else []), *mix_flags]
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


def run_llmcli_quantize(
    setting: Setting, teacher: Path, out: Path, kind: str, flags: list[str]
) -> Cost:
    """Quantize `teacher` with `llmcli quantize`; return the cost. `kind` is not passed if `flags`
    have a target size or a plan, which determine the types.
    """
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
            *([] if sized else ["--type", kind]),
            *flags,
        ]
    )


class Judge:
    """Compares quantized files with one reference model on every evaluation text."""

    def __init__(self, setting: Setting, teacher: Path, source: str) -> None:
        self.setting, self.teacher, self.source, self.ui = setting, teacher, source, UI()
        self.options = RunOptions(
            setting.ctx, setting.threads, None, 2048, 512, "auto", "auto", "f16", "f16"
        )
        self.texts = {name: self._chunks(file) for name, file in setting.texts.items()}

    def _chunks(self, file: Path) -> evaluate.TextChunks:
        token_ids = tokenize_text(
            prepare_side(self.teacher, self.options, self.ui), read_evaluation_text(file).content
        )
        return evaluate.split_text(token_ids, self.setting.ctx, self.setting.chunks)

    def scores(self, file: Path) -> dict[str, tuple[PositionScores, int]]:
        """Return for each text the scores of a file against the reference model, and the number of
        scored positions of a chunk.
        """
        results, base_logits = (
            {},
            {name: np.load(self._base(name), mmap_mode="r") for name in self.texts},
        )
        with self._open_scorer(file) as (scorer, at_once):
            for name, text in self.texts.items():
                model = WidthRecorder(scorer)
                base = StoredLogits(base_logits[name], model)
                threaded_scorer = ThreadedScorer(scorer.n_vocab, self.setting.threads)
                try:
                    evaluation = evaluate.Evaluation(model, base, None, text, threaded_scorer)
                    partial_scores = []
                    for numbers in chunk_groups(text, at_once[name]):
                        base.numbers = numbers
                        partial_scores += evaluation.score(numbers)[0]
                finally:
                    threaded_scorer.close()
                results[name] = (PositionScores.join(partial_scores), text.scored_count)
        return results

    def _base(self, name: str) -> Path:
        """Return the .npy file of the reference model's logits on a text, F32 `[chunks, positions,
        vocabulary]`. It is made once and reused.
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
        partial = out.with_suffix(".part")
        with self._open_scorer(self.teacher) as (scorer, at_once):
            shape = (text.count, text.scored_count, scorer.n_vocab)
            stored = np.lib.format.open_memmap(partial, "w+", np.float32, shape)
            for numbers in chunk_groups(text, at_once[name]):
                at = 0
                for block in scorer.blocks(text.ids[numbers]):
                    stored[numbers[0] : numbers[-1] + 1, at : at + block.shape[1]] = block
                    at += block.shape[1]
            stored.flush()
        partial.replace(out)
        return out

    @contextmanager
    def _open_scorer(self, file: Path) -> Iterator[tuple[chunk_scorer.ChunkScorer, dict[str, int]]]:
        subject = prepare_side(file, self.options, self.ui)
        at_once = {
            name: chunk_scorer.chunks_per_pass(
                text.n_ctx, self.options.batch_size, subject.n_vocab, text.count
            )
            for name, text in self.texts.items()
        }
        with open_scorers(subject, None, max(at_once.values())) as (scorer, _):
            yield scorer, at_once


class WidthRecorder:
    """A scorer that passes on another scorer's blocks, and records the positions of the last one
    as `width`.
    """

    def __init__(self, scorer: chunk_scorer.ChunkScorer) -> None:
        self.scorer, self.width = scorer, 0

    def blocks(self, ids: NDArray[np.int32]) -> Iterator[NDArray[np.float32]]:
        """Yield the blocks of logits that the scorer yields for the chunks `ids`."""
        for block in self.scorer.blocks(ids):
            self.width = block.shape[1]
            yield block


class StoredLogits:
    """A scorer that reads stored logits. Its blocks have as many positions as those of another
    scorer, `recorder`, which must run in step with it. `numbers`: the chunks of the next pass.
    """

    def __init__(self, logits: NDArray[np.float32], recorder: WidthRecorder) -> None:
        self.logits, self.recorder, self.numbers = logits, recorder, [0]

    def blocks(self, ids: NDArray[np.int32]) -> Iterator[NDArray[np.float32]]:
        """Yield the stored logits of the chunks `numbers` in blocks. `ids` are their tokens, of
        which only the number of chunks is used.
        """
        logits, at = self.logits[self.numbers[0] : self.numbers[-1] + 1], 0
        assert len(logits) == len(ids), (len(logits), len(ids))
        while at < logits.shape[1]:
            width = self.recorder.width  # the last block may be shorter
            yield logits[:, at : at + width]
            at += width


def chunk_groups(text: evaluate.TextChunks, at_once: int) -> list[list[int]]:
    """Return the numbers of all chunks of a text, grouped by forward pass of `at_once` chunks."""
    return [list(range(at, min(at + at_once, text.count))) for at in range(0, text.count, at_once)]
