"""The rows of compare.py: stored as they are made, compared with a baseline, printed as a table.

A row is one file of one reference model, evaluated on every text. Its scores are stored next to the
ledger, position by position, so that every figure can be computed again.
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
DRAWS = 4000  # draws of the bootstrap
BYTES = 0.003  # files are of equal size within this share


@dataclass(frozen=True)
class Key:
    """The identity of a row. `seed`: number of the calibration text, or -1 without one."""

    teacher: str
    source: str  # digest of the reference model's file
    type: str
    method: str
    flags: str
    seed: int
    calibration: str
    texts: str

    @property
    def digest(self) -> str:
        """Return the name of the row's scores."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Row:
    """A finished file: bytes of its tensors, seconds and peak memory to make it, and the cost of
    its statistics.

    `equal`: for a baseline, how many tensors our default method makes with the same bytes, of how
    many. `answers`: what an unmodified llama.cpp answered with the file, "" if it was not run.
    """

    key: Key
    nbytes: int
    file_bytes: int  # including names, vocabulary and the rest of the header
    seconds: float
    # CPU seconds, which depend less on other load than `seconds`
    cpu: float
    rss: int
    statistics_seconds: float
    statistics_rss: int
    equal: str
    commit: str
    answers: str = ""


class Ledger:
    """Finished rows in a file of JSON lines, and their scores in a folder next to it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.file = folder, folder / "rows.jsonl"
        (folder / "scores").mkdir(parents=True, exist_ok=True)

    def rows(self) -> dict[str, Row]:
        """Return the rows by key digest; a later line replaces an earlier one, and a partial line
        is ignored.
        """
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
        """Store a row. `scores`: per text the scores, and the positions of a chunk."""
        arrays = {}
        for name, (found, scored) in scores.items():
            arrays[name] = np.stack([found.nll, found.base_nll, found.kld, found.same_top]).reshape(
                4, -1, scored
            )
        # a unique name, because several runs may share the folder
        part = self.place(row.key).with_suffix(".part.npz")
        np.savez(part, **arrays)
        part.replace(self.place(row.key))
        with self.file.open("a") as file:
            file.write(json.dumps(asdict(row)) + "\n")

    def place(self, key: Key) -> Path:
        """Return the path of a row's scores."""
        return self.folder / "scores" / f"{key.digest}.npz"

    def scores(self, key: Key) -> dict[str, F64]:
        """Return nll, base nll, divergence and same-top per text, F64 `[4, chunks, positions]`."""
        with np.load(self.place(key)) as file:
            return {name: file[name] for name in file.files}


@dataclass(frozen=True)
class Ratio:
    """A method's mean divergence over its baseline's, with the 95 % interval over draws of chunks."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value - 1:+.1%} [{self.low - 1:+.1%}, {self.high - 1:+.1%}]"


def ratio(method: Sequence[F64], baseline: Sequence[F64]) -> Ratio:
    """Compare the chunks' mean divergences, F64 `[chunks]`, one array per calibration text.

    Chunks are drawn with replacement, the same ones for both sides and all calibration texts (a
    paired bootstrap).
    """
    mine, other = np.mean(np.stack(method), axis=0), np.mean(np.stack(baseline), axis=0)
    assert mine.shape == other.shape, (mine.shape, other.shape)
    drawn = np.random.default_rng(1).integers(len(mine), size=(DRAWS, len(mine)))
    low, high = np.percentile(mine[drawn].sum(1) / other[drawn].sum(1), [2.5, 97.5])
    return Ratio(float(mine.sum() / other.sum()), float(low), float(high))


def figures(scores: F64) -> tuple[str, str, str, str]:
    """Return mean divergence ± standard error, 99.9th percentile, same-top, and ratio of
    perplexities.
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
    """Return a Markdown table: the methods' figures by reference model, type and text.

    The figures of a file are those of the first calibration text; "against" uses all texts that
    both sides have.
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
