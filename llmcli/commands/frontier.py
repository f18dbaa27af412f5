"""Several quantizations of one model beside one another: each is made, evaluated against the same
kept logits of the base, and measured in turn with it. What is finished is a file of its own: an
interrupted run goes on.

It joins quant with evaluation and bench for `llmcli pareto`, which parses and prints. A base's
logits are kept as `eval --save-base` keeps them (256 tokens of a row and 64 drawn from the rest,
2.6 KB a position; 32 chunks of a vocabulary of 49,152 would be 1.6 GB whole): read once for all
settings, and the same for all, so that they can be held against each other. What that adds to the
error of a divergence is told with it.
"""

import hashlib
import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from math import sqrt
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from llmcli import __version__
from llmcli.catalog import store
from llmcli.catalog.partial import make_folder, write_whole
from llmcli.commands import bases, evaluating, scorers, verifying
from llmcli.commands.eval import side
from llmcli.hardware import cluster, host
from llmcli.runtime.binding.library import version
from llmcli.runtime.request import RunOptions
from llmcli.units import size
from quant import baselogits, evaluate
from quant import quantize as road
from quant.certificate import Answers, Speed
from quant.untrusted import parse

if TYPE_CHECKING:
    from llmcli.commands.scorers import Side
    from llmcli.config import Config
    from llmcli.ui import UI
    from quant.baselogits import BaseLogits
    from quant.planning import Plan
    from quant.source import Source

LONGEST = 1 << 20  # characters of a finished setting
POSITION = 2700  # bytes that are kept of the base's logits


@dataclass(frozen=True, slots=True)
class Point:
    """A finished setting. `doubt`: what the part of the base's logits that was kept adds to the
    divergence's error; `seconds` quantizing took, 0 where an earlier run had made a part of it or
    all; `klds` are the mean divergences of the chunks.
    """

    name: str
    file_type: str
    method: str
    fold: str
    settings: str
    nbytes: int
    bits_per_weight: float
    answers: Answers
    doubt: float
    speed: tuple[Speed, ...]
    seconds: float
    klds: tuple[float, ...]

    @property
    def generation(self) -> Speed | None:
        """How fast it generates, where that was measured."""
        return next((one for one in self.speed if one.test.startswith("tg")), None)


@dataclass(frozen=True, slots=True)
class Wish:
    """What is compared: plans of one source by their names, read over `text` (its words and name)
    in chunks. `seconds` of speed for each test, 0 for none; `keep` is the folder that files stay
    in, None: they are removed.
    """

    source: "Source"
    plans: dict[str, "Plan"]
    text: tuple[str, str]
    n_ctx: int
    chunks: int
    threads: int
    seconds: float
    keep: Path | None
    fresh: bool

    @property
    def options(self) -> RunOptions:
        """How all of them are read."""
        return RunOptions(self.n_ctx, self.threads or None)

    @property
    def identity(self) -> str:
        """All that a finished setting's figures depend on, beside the setting."""
        said = [
            self.source.fingerprint,
            hashlib.sha256(self.text[0].encode()).hexdigest(),
            self.n_ctx,
            self.chunks,
            self.threads or host.cores(),
            self.seconds,
            version(),
            __version__,
            cluster.identity(),
            self.source.changed,
        ]
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:32]


def run(wish: Wish, config: "Config", ui: "UI") -> list[Point]:
    """All settings in their order. What is finished is kept at any Ctrl-C or kill. Raises Refusal."""
    folder = config.cache / "pareto" / wish.identity
    make_folder(folder)
    with store.locked(folder / "lock", ui, f"the same comparison of {wish.source.name}"):
        found = (
            {}
            if wish.fresh
            else {name: point for name in wish.plans if (point := _finished(wish, name, folder))}
        )
        if found:
            ui.note(
                f"{len(found)} of {len(wish.plans)} settings were finished before (--fresh makes them anew)"
            )
        left = [name for name in wish.plans if name not in found]
        if left:
            _room(wish, left, folder, config, ui)
            found |= _measured(wish, left, folder, config, ui)
        _clean(folder)
    return [found[name] for name in wish.plans]


def dominated(points: Sequence[Point]) -> dict[str, str]:
    """Settings that another one beats, and the nearest one that does: it is no larger, no farther
    from the base, better in one of the two, and not slower. Of two files of one size the nearer is
    better where the chunks, held against each other in pairs, support it by two standard errors;
    slower is what the noise supports.
    """
    found = {}
    for one in points:
        better = [other for other in points if _beats(other, one)]
        if better:
            found[one.name] = min(
                better, key=lambda other: (other.answers.kld.value, other.nbytes)
            ).name
    return found


def _beats(one: Point, other: Point) -> bool:
    nearer, error = _nearer(one, other)
    if (
        one.nbytes > other.nbytes
        or nearer < 0
        or (one.nbytes == other.nbytes and nearer <= 2 * error)
    ):
        return False
    fast, slow = other.generation, one.generation
    known = fast and slow and fast.low is not None and slow.high is not None
    return not (known and fast and slow and (fast.low or 0) > (slow.high or 0))


def _nearer(one: Point, other: Point) -> tuple[float, float]:
    """How much nearer to the base `one` is than `other`, and the standard error of that over the
    chunks they share.
    """
    apart = [theirs - mine for mine, theirs in zip(one.klds, other.klds, strict=True)]
    middle = fmean(apart)
    spread = sum((value - middle) ** 2 for value in apart) / max(1, len(apart) - 1)
    return middle, sqrt(spread / len(apart))


def _measured(
    wish: Wish, left: Sequence[str], folder: Path, config: "Config", ui: "UI"
) -> dict[str, Point]:
    """The settings that are not there yet, one after the other."""
    found = {}
    with ExitStack() as stack:
        path = stack.enter_context(bases.runnable(wish.source, config, ui, wish.threads))
        base = side(path, wish.options, ui)
        logits = folder / "base.logits"
        _tell(wish, base, len(left), logits, ui)
        words, _ = wish.text
        evaluating.run(
            evaluating.Wish(base, None, None, words, wish.chunks, logits, quiet=True), config, ui
        )
        kept = baselogits.load(logits)
        stack.callback(kept.close)
        for number, name in enumerate(left, 1):
            ui.note(f"{name} ({number} of {len(left)})")
            found[name] = _point(wish, name, (base, kept), folder, config, ui)
            write_whole(_place(wish, name, folder), json.dumps(asdict(found[name])).encode())
    return found


def _point(
    wish: Wish, name: str, base: "tuple[Side, BaseLogits]", folder: Path, config: "Config", ui: "UI"
) -> Point:
    """One setting made, read and timed; its file goes again unless it is to be kept."""
    plan = wish.plans[name]
    out = (wish.keep or folder) / _file(wish, name)
    make_folder(out.parent)
    began = time.monotonic()
    with ui.bar(f"quantize to {name}", len(plan.steps), unit="tensors") as bar:
        report = road.run(plan, out, threads=wish.threads, watch=lambda progress: bar.advance(1))
    seconds = 0.0 if report.present or report.resumed_bytes else time.monotonic() - began
    model = side(out, wish.options, ui)
    outcome = evaluating.run(
        evaluating.Wish(model, None, base[1], None, wish.chunks, quiet=True), config, ui
    )
    against = outcome.quality.against
    assert against is not None
    answers = verifying.figures(
        outcome, wish.text, base[0].header.file_type, verifying.steering(plan)
    )
    speed = (
        verifying.speeds(model, base[0], wish.threads or host.cores(), ui, wish.seconds)
        if wish.seconds
        else ()
    )
    if wish.keep is None:
        out.unlink()
    return Point(
        name,
        plan.file_type.name,
        plan.method.name,
        plan.source.folded,
        plan.settings,
        plan.bytes_after,
        plan.bits_per_weight,
        answers,
        against.doubt,
        speed,
        seconds,
        outcome.klds,
    )


def _tell(wish: Wish, base: "Side", count: int, logits: Path, ui: "UI") -> None:
    """How long it will take, by one chunk of the base; Ctrl-C and going on are told too."""
    tokens = scorers.tokens(base, wish.text[0])
    text = evaluate.chunks(tokens, wish.n_ctx, wish.chunks)
    with scorers.opened(base, None, 1) as (scorer, _):
        began = time.monotonic()
        for _block in scorer.blocks(text.ids[:1]):
            pass
        each = time.monotonic() - began
    rounds = count + (not logits.exists())
    reading, timing = each * text.count * rounds, count * len(verifying.TESTS) * wish.seconds
    ui.note(
        f"{count} settings, {text.count} chunks of {wish.n_ctx} tokens each: about {_time(reading)} to read them, "
        f"{_time(timing)} to measure speed, and the quantizing; Ctrl-C keeps what is finished"
    )


def _room(wish: Wish, left: Sequence[str], folder: Path, config: "Config", ui: "UI") -> None:
    """Refuse before the first file where the disk is too small; say what it takes."""
    sizes = [wish.plans[name].nbytes for name in left]
    files = sum(sizes) if wish.keep else max(sizes)
    copy, logits = bases.copied(wish.source), wish.chunks * wish.n_ctx // 2 * POSITION
    cached = logits + (copy.nbytes if copy else 0)
    bases.room(
        {
            (wish.keep or folder): files + (0 if wish.keep else cached),
            **({folder: cached} if wish.keep else {}),
        }
    )
    parts = [f"{size(files)} for {'all files' if wish.keep else 'the largest file'}"]
    parts += [f"{size(copy.nbytes)} for the copy of a folder that is run"] if copy else []
    parts.append(f"{size(logits)} for the base's logits")
    ui.note("disk: " + ", ".join(parts) + ("" if wish.keep else "; all but the figures goes again"))


def _clean(folder: Path) -> None:
    """Remove what only an unfinished comparison needs: files that a kill left, the base's logits."""
    for path in folder.iterdir():
        if path.suffix != ".json" and path.name != "lock":
            path.unlink()


def _finished(wish: Wish, name: str, folder: Path) -> Point | None:
    """A setting that is there, whatever it was called then; None where it is not, or was made of
    other settings.
    """
    try:
        found = parse(Point, _place(wish, name, folder).read_text(encoding="utf-8"), LONGEST)
    except (OSError, ValueError):
        return None
    plan = wish.plans[name]
    kept = wish.keep is None or road.finished(plan, wish.keep / _file(wish, name))
    return replace(found, name=name) if found.settings == plan.settings and kept else None


def _file(wish: Wish, name: str) -> str:
    return f"{wish.source.name}-{name.replace(' ', '-')}.gguf"


def _place(wish: Wish, name: str, folder: Path) -> Path:
    return folder / f"{hashlib.sha256(wish.plans[name].settings.encode()).hexdigest()[:16]}.json"


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} minutes"
