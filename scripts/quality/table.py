"""Storage of compare.py's rows, their comparison with a baseline, and the table of all figures.

A row is one quantized file of one reference model, evaluated on every text. The scores of all
positions are stored next to the rows, so that every figure can be computed again.
"""

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quant.evaluation.divergence import PositionScores
from quant.evaluation.metrics import BaseComparison, compute_metrics

F64 = NDArray[np.float64]
DRAWS = 4000  # draws of the bootstrap
EQUAL_SIZE_SHARE = 0.003  # files whose sizes differ by at most this share count as equally large


@dataclass(frozen=True)
class Key:
    """The identity of a row: all inputs on which its file and its scores depend.

    `source`: digest of the reference model's file. `type`: file type. `seed`: number of the
    calibration text, or -1 without calibration. `calibration`, `texts`: identities of the
    calibration and of the evaluation (see `runs.Setting`).
    """

    teacher: str
    source: str
    type: str
    method: str
    flags: str
    seed: int
    calibration: str
    texts: str

    @property
    def digest(self) -> str:
        """A short hash of the key, which names the row's file of scores."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Row:
    """A quantized file that was evaluated.

    `nbytes`: bytes of its tensors. `file_bytes`: including the header. `seconds`, `cpu`, `rss`:
    cost of the quantization; CPU seconds depend less on other load than wall seconds.
    `statistics_seconds`, `statistics_rss`: cost of the calibration. `equal`: for a baseline, how
    many tensors have the same bytes as those of our default method, such as "40/40 equal".
    `answers`: what an unmodified llama.cpp answered with the file, or "" if it was not run.
    """

    key: Key
    nbytes: int
    file_bytes: int
    seconds: float
    cpu: float
    rss: int
    statistics_seconds: float
    statistics_rss: int
    equal: str
    commit: str
    answers: str = ""


class Ledger:
    """The finished rows in a JSONL file, and their scores in a folder next to it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.file = folder, folder / "rows.jsonl"
        (folder / "scores").mkdir(parents=True, exist_ok=True)

    def rows(self) -> dict[str, Row]:
        """Return the rows that have scores, by the digest of their key. A later line replaces an
        earlier one with the same key. A partial line, left by a killed run, is ignored.
        """
        rows = {}
        for line in self.file.read_text().splitlines() if self.file.exists() else []:
            try:
                raw = json.loads(line)
            except ValueError:
                continue
            row = Row(**{**raw, "key": Key(**raw["key"])})
            if self.scores_path(row.key).exists():
                rows[row.key.digest] = row
        return rows

    def add(self, row: Row, scores: dict[str, tuple[PositionScores, int]]) -> None:
        """Store a row. `scores`: for each text the scores, and the number of scored positions of a
        chunk.
        """
        arrays = {}
        for name, (text_scores, n_positions) in scores.items():
            arrays[name] = np.stack(
                [text_scores.nll, text_scores.base_nll, text_scores.kld, text_scores.same_top]
            ).reshape(4, -1, n_positions)
        # The name is unique, because several runs may share the folder.
        partial = self.scores_path(row.key).with_suffix(".part.npz")
        np.savez(partial, **arrays)
        partial.replace(self.scores_path(row.key))
        with self.file.open("a") as file:
            file.write(json.dumps(asdict(row)) + "\n")

    def scores_path(self, key: Key) -> Path:
        """Return the path of the file with a row's scores."""
        return self.folder / "scores" / f"{key.digest}.npz"

    def scores(self, key: Key) -> dict[str, F64]:
        """Return the scores of a row by text, F64 `[4, chunks, positions]`. The first axis has nll,
        base_nll, kld and same_top (quant/evaluation/divergence.py).
        """
        with np.load(self.scores_path(key)) as file:
            return {name: file[name] for name in file.files}


@dataclass(frozen=True)
class Ratio:
    """A method's mean divergence divided by its baseline's, with the ends of the 95 % bootstrap
    interval over chunks.
    """

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value - 1:+.1%} [{self.low - 1:+.1%}, {self.high - 1:+.1%}]"


def ratio(method: Sequence[F64], baseline: Sequence[F64]) -> Ratio:
    """Return the ratio of a method's to a baseline's mean divergence.

    `method`, `baseline`: for each calibration text, the mean divergence of each chunk, F64
    `[chunks]`. The interval is a paired bootstrap: chunks are drawn with replacement, the same
    chunks for both sides and for all calibration texts.
    """
    method_means, baseline_means = (
        np.mean(np.stack(method), axis=0),
        np.mean(np.stack(baseline), axis=0),
    )
    assert method_means.shape == baseline_means.shape, (method_means.shape, baseline_means.shape)
    draws = np.random.default_rng(1).integers(len(method_means), size=(DRAWS, len(method_means)))
    low, high = np.percentile(
        method_means[draws].sum(1) / baseline_means[draws].sum(1), [2.5, 97.5]
    )
    return Ratio(float(method_means.sum() / baseline_means.sum()), float(low), float(high))


@dataclass(frozen=True)
class TextResult:
    """The result of a method for one reference model and file type on one text.

    `rows`: one for each calibration text. `scores`: those of the first row, F64 `[4, chunks,
    positions]`. `baseline_nbytes`: bytes of the baseline's tensors, 0 without a baseline. `change`:
    the comparison with the baseline over all calibration texts, None for the baseline itself.
    `changes`: the change against it for each calibration text. `rival`: for our own methods the
    best of the others and the comparison with it.
    """

    text: str
    rows: Sequence[Row]
    scores: F64
    baseline_nbytes: int
    change: Ratio | None
    changes: Sequence[float]
    rival: tuple[str, Ratio] | None

    @property
    def key(self) -> Key:
        """The key of the first row."""
        return self.rows[0].key

    @property
    def comparison(self) -> BaseComparison:
        """The comparison of the first row's file with the original."""
        flat = PositionScores(*self.scores.reshape(4, -1), np.zeros(self.scores[0].size))
        comparison = compute_metrics(flat).comparison
        assert comparison
        return comparison


def results(
    rows: Iterable[Row], ledger: Ledger, baseline: str, own: Collection[str] = ()
) -> Iterator[TextResult]:
    """Yield the results of all rows by reference model, file type, method and text.

    A comparison uses all calibration texts for which both methods have rows: with `baseline`, and
    for the methods `own` with the best of all others, the one with the lowest mean divergence on
    the text.
    """
    groups: dict[tuple[str, str], dict[str, list[Row]]] = {}
    for row in rows:
        groups.setdefault((row.key.teacher, row.key.type), {}).setdefault(
            row.key.method, []
        ).append(row)
    for methods in groups.values():
        for method_rows in methods.values():
            method_rows.sort(key=lambda row: row.key.seed)
        base = methods.get(baseline, [])
        others = {name: method_rows for name, method_rows in methods.items() if name not in own}
        for name, method_rows in methods.items():
            for text, scores in ledger.scores(method_rows[0].key).items():
                pairs = _pairs(method_rows, base, text, ledger) if name != baseline else []
                yield TextResult(
                    text,
                    method_rows,
                    scores,
                    base[0].nbytes if base else 0,
                    ratio(*zip(*pairs, strict=True)) if pairs else None,
                    [ours.sum() / theirs.sum() - 1 for ours, theirs in pairs],
                    _best_rival(method_rows, others, text, ledger) if name in own else None,
                )


def table(rows: Iterable[Row], ledger: Ledger, baseline: str, own: Collection[str] = ()) -> str:
    """Return a Markdown table with a line for each result of `results`. The figures of a line are
    those of the first calibration text.
    """
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
        "against the best of the others",
        "s",
        "CPU s",
        "RSS MiB",
    )
    lines = (_line(result) for result in results(rows, ledger, baseline, own))
    return "\n".join(["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *lines])


def _line(result: TextResult) -> str:
    first, comparison = result.rows[0], result.comparison
    difference = first.nbytes / result.baseline_nbytes - 1 if result.baseline_nbytes else 0.0
    size = f" ({difference:+.2%})" if abs(difference) > EQUAL_SIZE_SHARE else ""
    seeds = ", ".join(f"{change:+.1%}" for change in result.changes)
    name, rival_change = result.rival or ("", None)
    cells = (
        result.key.teacher,
        result.key.type,
        result.key.method,
        result.text,
        f"{first.nbytes:,}{size}",
        f"{comparison.kld.value:.6f} ± {comparison.kld.error:.6f}",
        f"{comparison.klds.percentiles[99.9]:.4f}",
        f"{comparison.same_top.value:.2%}",
        f"{comparison.ratio.value:.4f}",
        str(result.change or ""),
        str(len(result.rows)) + (f": {seeds}" if seeds else ""),
        f"{rival_change} ({name})" if rival_change else "",
        f"{first.statistics_seconds:.0f} + {first.seconds:.1f}",
        f"{first.cpu:.1f}",
        f"{max(first.rss, first.statistics_rss) / 2**20:.0f}",
    )
    return "| " + " | ".join(cells) + " |"


def _pairs(
    method_rows: Sequence[Row], base: Sequence[Row], text: str, ledger: Ledger
) -> list[tuple[F64, F64]]:
    """Return the mean divergence of each chunk, F64 `[chunks]`, of a method and of another one, for
    every pair of rows with the same calibration text. A row without calibration pairs with all.
    """
    pairs = []
    for row in method_rows:
        own_scores = ledger.scores(row.key)[text]
        for base_row in base:
            if base_row.key.seed == row.key.seed or -1 in (row.key.seed, base_row.key.seed):
                base_scores = ledger.scores(base_row.key)[text]
                if own_scores.shape == base_scores.shape:
                    pairs.append((own_scores[2].mean(-1), base_scores[2].mean(-1)))
    return pairs


def _best_rival(
    method_rows: Sequence[Row], rivals: Mapping[str, Sequence[Row]], text: str, ledger: Ledger
) -> tuple[str, Ratio] | None:
    """Return the name of the rival that has the lowest mean divergence on a text, and the
    comparison with it; None without rivals. Rivals with more bytes than a method are left out.
    """
    most = method_rows[0].nbytes * (1 + EQUAL_SIZE_SHARE)
    pairs_by_name = {
        name: pairs
        for name, rows in rivals.items()
        if rows[0].nbytes <= most and (pairs := _pairs(method_rows, rows, text, ledger))
    }
    if not pairs_by_name:
        return None
    best = min(
        pairs_by_name,
        key=lambda name: float(np.mean([rival.mean() for _, rival in pairs_by_name[name]])),
    )
    return best, ratio(*zip(*pairs_by_name[best], strict=True))
