"""The rows of compare_quants.py: kept as they are made, held against a baseline, printed as a
table.

A row is one file of one teacher, evaluated on every text. Its scores lie beside the ledger,
position by position, so that every figure can be made again. Knows figures, neither models nor
programs.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quant.evaluation.divergence import PositionScores
from quant.evaluation.metrics import compute_metrics

F64 = NDArray[np.float64]
DRAWS = 4000  # of the bootstrap
BYTES = 0.003  # files are of equal size within this share


@dataclass(frozen=True)
class Key:
    """What makes a row another row. `seed` is the number of the calibration text; -1 where none was
    read.
    """

    teacher: str
    source: str  # digest of the teacher's file
    type: str
    method: str
    flags: str
    seed: int
    calibration: str
    texts: str

    @property
    def digest(self) -> str:
        """Names the row's scores."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Row:
    """A finished file: tensors' bytes, seconds and peak memory of making it, and what its
    statistics took.

    `equal` tells, of a baseline, how many tensors our own default method made alike, of how many;
    `answers` what an unmodified llama.cpp said with the file, "" where it was not asked.
    """

    key: Key
    nbytes: int
    file_bytes: int  # with names, vocabulary and what else stands before the tensors
    seconds: float
    # seconds of processor time: what is left of `seconds` on a machine that does other work, too
    cpu: float
    rss: int
    statistics_seconds: float
    statistics_rss: int
    equal: str
    commit: str
    answers: str = ""


class Ledger:
    """Finished rows in a file of JSON lines, and their scores in a folder beside it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.file = folder, folder / "rows.jsonl"
        (folder / "scores").mkdir(parents=True, exist_ok=True)

    def rows(self) -> dict[str, Row]:
        """By the digests of their keys; a later line replaces an earlier one, half a line is none."""
        found = {}
        for line in self.file.read_text().splitlines() if self.file.exists() else []:
            try:
                raw = json.loads(line)
            except ValueError:
                continue
            row = Row(**{**raw, "key": Key(**raw["key"])})
            if self.place(row.key).exists():
                found[row.key.digest] = row
        return found

    def add(self, row: Row, scores: dict[str, tuple[PositionScores, int]]) -> None:
        """Keep a row. Per text its scores, and the positions of a chunk."""
        arrays = {}
        for name, (found, scored) in scores.items():
            arrays[name] = np.stack([found.nll, found.base_nll, found.kld, found.same_top]).reshape(
                4, -1, scored
            )
        part = self.place(row.key).with_suffix(".part.npz")  # its own: runs may share the folder
        np.savez(part, **arrays)
        part.replace(self.place(row.key))
        with self.file.open("a") as file:
            file.write(json.dumps(asdict(row)) + "\n")

    def place(self, key: Key) -> Path:
        """Where a row's scores lie."""
        return self.folder / "scores" / f"{key.digest}.npz"

    def scores(self, key: Key) -> dict[str, F64]:
        """Per text nll, base's nll, divergence and same-top, F64 [4, chunks, positions]."""
        with np.load(self.place(key)) as file:
            return {name: file[name] for name in file.files}


@dataclass(frozen=True)
class Ratio:
    """A method's mean divergence over its baseline's, and the 95 % interval of it over draws of
    chunks.
    """

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value - 1:+.1%} [{self.low - 1:+.1%}, {self.high - 1:+.1%}]"


def ratio(method: Sequence[F64], baseline: Sequence[F64]) -> Ratio:
    """Of chunks' mean divergences, F64 [chunks], one for each calibration text; chunks are drawn
    with replacement, the same ones for both sides and all calibration texts (a paired bootstrap).
    """
    mine, other = np.mean(np.stack(method), axis=0), np.mean(np.stack(baseline), axis=0)
    assert mine.shape == other.shape, (mine.shape, other.shape)
    drawn = np.random.default_rng(1).integers(len(mine), size=(DRAWS, len(mine)))
    low, high = np.percentile(mine[drawn].sum(1) / other[drawn].sum(1), [2.5, 97.5])
    return Ratio(float(mine.sum() / other.sum()), float(low), float(high))


def figures(scores: F64) -> tuple[str, str, str, str]:
    """Mean divergence ± its standard error, its 99.9th percentile, same-top, ratio of perplexities:
    of one file.
    """
    flat = PositionScores(*scores.reshape(4, -1), np.zeros(scores[0].size))
    against = compute_metrics(flat).comparison
    assert against
    return (
        f"{against.kld.value:.6f} ± {against.kld.error:.6f}",
        f"{against.klds.percentiles[99.9]:.4f}",
        f"{against.same_top.value:.2%}",
        f"{against.ratio.value:.4f}",
    )


def table(rows: Iterable[Row], ledger: Ledger, baseline: str) -> str:
    """Markdown: for each teacher and type the methods' figures per text, over all calibration
    texts.

    Figures of a file are those of the first calibration text; "against" joins all of them that both
    sides have.
    """
    groups: dict[tuple[str, str], dict[str, list[Row]]] = {}
    for row in rows:
        groups.setdefault((row.key.teacher, row.key.type), {}).setdefault(
            row.key.method, []
        ).append(row)
    lines = []
    for (teacher, kind), methods in groups.items():
        base = sorted(methods.get(baseline, ()), key=lambda row: row.key.seed)
        for name, found in methods.items():
            found.sort(key=lambda row: row.key.seed)
            lines += _lines(teacher, kind, name, found, base, ledger)
    head = (
        "teacher",
        "type",
        "method",
        "text",
        "bytes",
        "KLD ± SE",
        "99.9 %",
        "same top",
        "PPL ratio",
        f"KLD against {baseline}",
        "seeds",
        "s",
        "CPU s",
        "RSS MiB",
    )
    return "\n".join(["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *lines])


def _lines(
    teacher: str, kind: str, name: str, found: Sequence[Row], base: Sequence[Row], ledger: Ledger
) -> Iterable[str]:
    first, scores = found[0], [ledger.scores(row.key) for row in found]
    others = [(row, ledger.scores(row.key)) for row in base]
    for text in scores[0]:
        told, seeds = "", str(len(found))
        pairs = [
            (mine[text][2].mean(-1), other[text][2].mean(-1))
            for row, mine in zip(found, scores, strict=True)
            for beside, other in others
            if row.key.seed in (beside.key.seed, -1) and mine[text].shape == other[text].shape
        ]
        if pairs and found[0].key.method != base[0].key.method:
            told = str(ratio([mine for mine, _ in pairs], [other for _, other in pairs]))
            each = [mine.sum() / other.sum() - 1 for mine, other in pairs]
            seeds = f"{len(found)}: " + ", ".join(f"{share:+.1%}" for share in each)
        off = first.nbytes / base[0].nbytes - 1 if base else 0.0
        size = f"{first.nbytes:,}" + (f" ({off:+.2%})" if abs(off) > BYTES else "")
        took = f"{first.statistics_seconds:.0f} + {first.seconds:.1f}"
        yield (
            "| "
            + " | ".join(
                (
                    teacher,
                    kind,
                    name,
                    text,
                    size,
                    *figures(scores[0][text]),
                    told,
                    seeds,
                    took,
                    f"{first.cpu:.1f}",
                    f"{max(first.rss, first.statistics_rss) / 2**20:.0f}",
                )
            )
            + " |"
        )
