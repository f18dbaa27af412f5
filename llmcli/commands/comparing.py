"""What `bench compare` does between its flags and its table: settings become tests, comparisons
become words.
"""

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from llmcli.bench import grid
from llmcli.bench import saved as keeping
from llmcli.bench import sides as measuring
from llmcli.bench.grid import Test
from llmcli.bench.history import History, path
from llmcli.bench.paired import Comparison, Design, tenths, wander
from llmcli.bench.saved import Saved
from llmcli.bench.sides import Side
from llmcli.commands.ready import ready
from llmcli.config import Config
from llmcli.errors import UsageError, UserError
from llmcli.hardware import host
from llmcli.runtime.binding.cache_types import FLASH, KV_TYPES, check_cache
from llmcli.ui import UI

# Spellings of a setting, and the field of a Test that it chooses.
SETTINGS = {
    "threads": ("n_threads", "-t", "--threads"),
    "batch": ("n_batch", "-b", "--batch-size"),
    "ubatch": ("n_ubatch", "-ub", "--ubatch-size"),
    "type_k": ("type_k", "-ctk", "--cache-type-k"),
    "type_v": ("type_v", "-ctv", "--cache-type-v"),
    "gpu_layers": ("n_gpu_layers", "-ngl", "--n-gpu-layers", "--gpu-layers"),
    "flash": ("flash_attn", "-fa", "--flash-attn"),
}
KNOWN = "-t -b -ub -ctk -ctv -ngl -fa"


@dataclass(frozen=True, slots=True)
class Named:
    """One side as it was asked for: a model's name, file and own settings; or a run's name, no
    path, and what it measured.
    """

    name: str
    path: str | None
    own: str
    sides: tuple[Side, ...] = ()

    @property
    def words(self) -> str:
        """Name and own settings."""
        return f"{self.name} {self.own}".strip()


@dataclass(frozen=True, slots=True)
class Told:
    """All comparisons of a command. `interleaved` False: of saved runs. `differing` is what their
    runs differ in, test by test; `seconds` were allowed for each test.
    """

    a: Named
    b: Named
    tests: tuple[str, ...]
    found: tuple[Comparison, ...]
    design: Design
    interleaved: bool
    differing: tuple[tuple[tuple[str, Any, Any], ...], ...] = ()


def saved(a: str, b: str | None, config: Config, ui: UI) -> tuple[Saved, Saved] | None:
    """The runs that both words name, None where they name models; raises UsageError where it is one
    of each.
    """

    def named(text: str | None) -> Saved | None:
        return (
            keeping.read(text, lambda number: History(path(config), ui).find(number).document)
            if text
            else None
        )

    one, other = named(a), named(b)
    if one and other:
        return one, other
    if one or other:
        run, model = (a, b or "nothing") if one else (b, a)
        raise UsageError(
            f"{run} is a saved run, and {model} is none", hint="llmcli bench compare 12 15"
        )
    return None


def nothing_measured(given: Sequence[object]) -> None:
    """Raise UsageError where a flag would choose what is measured, but saved runs are compared."""
    if any(given):
        raise UsageError(
            "saved runs were measured already",
            hint="leave out the flags that choose a test or a setting",
        )


def runs(a: Saved, b: Saved, confidence: float, anyway: bool, ui: UI) -> Told:
    """Compare what was measured before."""
    pairs = keeping.match(a, b, anyway)
    each = 1 - (1 - confidence) / len(pairs)
    found = tuple(
        keeping.compare(pair.a["samples_ts"], pair.b["samples_ts"], each) for pair in pairs
    )
    ui.note(
        "saved runs were not interleaved: what the machine did between them widens the interval"
    )
    names = tuple(_both(keeping.name(pair.a), keeping.name(pair.b)) for pair in pairs)
    one, other = (Named(side.name, None, side.about) for side in (a, b))
    differing = tuple(tuple(pair.differing()) for pair in pairs)
    return Told(one, other, names, found, Design(confidence=confidence), False, differing)


def tests(
    prompts: Sequence[str] | None, gens: Sequence[str] | None, depths: Sequence[str] | None
) -> list[Test]:
    """What is measured, with llama-bench's defaults for all settings; raises UserError where it is
    nothing.
    """
    base = Test(0, 0, 0, 2048, 512, "f16", "f16", host.cores(), -1, "auto")
    lengths = [(count, 0) for count in grid.numbers("-p", prompts or ["512"]) if count]
    lengths += [(0, count) for count in grid.numbers("-n", gens or ["128"]) if count]
    found = [
        replace(base, n_prompt=prompt, n_gen=gen, n_depth=depth)
        for depth in grid.numbers("-d", depths or ["0"])
        for prompt, gen in lengths
    ]
    if not found:
        raise UserError(
            "there is no test to run", hint="give -p or -n a number above 0, e.g. -p 512 -n 128"
        )
    return found


def settled(
    wanted: Sequence[Test], both: Mapping[str, str | None], flag: str, own: str
) -> list[Test]:
    """The tests with the settings of both sides, and with the `own` of one as typed after `flag`.
    Raises UserError.
    """
    chosen = {
        **{name: text for name, text in both.items() if text is not None},
        **_typed(flag, own),
    }
    fields: dict[str, Any] = {
        SETTINGS[name][0]: _value(name, text) for name, text in chosen.items()
    }
    made = [replace(test, **fields) for test in wanted]
    check_cache(made[0].type_k, made[0].type_v, made[0].flash_attn)
    return made


def named(ref: str, own: str, tests: Sequence[Test], config: Config, ui: UI) -> Named:
    """A model in all its tests. Raises Refusal."""
    model = ready(ref, None, config, ui)
    return Named(
        model.name, str(model.path), own.strip(), tuple(Side(model.path, test) for test in tests)
    )


def design(seconds: float | None, precision: float | None, confidence: float) -> Design:
    """How long and how exactly is measured, from the flags: seconds, percent, percent."""
    usual = Design()
    precise = usual.precision if precision is None else precision / 100
    return Design(usual.seconds if seconds is None else seconds, precise, confidence / 100)


def measured(a: Named, b: Named, design: Design, apart: bool, ui: UI) -> Told:
    """Compare what can be measured now."""
    pairs = list(zip(a.sides, b.sides, strict=True))
    found = tuple(measuring.run(pairs, design, ui, apart or None))
    return Told(a, b, tuple(side.test.name for side in a.sides), found, design, True)


def document(told: Told) -> dict[str, Any]:
    """One JSON document; null is what too few pairs cannot tell."""
    rows = [
        {
            "test": name,
            "ratio": one.ratio,
            "low": one.low or None,
            "high": _finite(one.high),
            "confidence": one.confidence,
            "differs": one.differs,
            "resolution": _finite(one.resolution),
            "settled": one.settled,
            "noisy": one.noisy,
            "verdict": one.words(),
            "pairs": _pairs(one, told),
            "a_median_ts": median(one.a),
            "b_median_ts": median(one.b),
            "a_samples_ts": one.a,
            "b_samples_ts": one.b,
            "differing": [list(field) for field in told.differing[at]] if told.differing else [],
        }
        for at, (name, one) in enumerate(zip(told.tests, told.found, strict=True))
    ]
    named = {
        side: {"name": one.name, "path": one.path, "settings": one.own if one.path else None}
        for side, one in (("a", told.a), ("b", told.b))
    }
    return {
        **named,
        "interleaved": told.interleaved,
        "confidence": told.design.confidence,
        "tests": rows,
    }


def tell(told: Told, ui: UI) -> None:
    """The table, a verdict a line, and what is to be known about them."""
    ui.text(f"A  {told.a.words}")
    ui.text(f"B  {told.b.words}")
    ui.text()
    for field, one, other in dict.fromkeys(field for fields in told.differing for field in fields):
        ui.text(f"{field}: {one} in A, {other} in B")
    columns = ("test", "A tok/s", "B tok/s", "B / A", "interval", "pairs")
    rows = [
        (
            name,
            f"{median(one.a):.1f}",
            f"{median(one.b):.1f}",
            f"{one.ratio:.3f}",
            _span(one),
            str(_pairs(one, told) or f"{len(one.a)} and {len(one.b)} apart"),
        )
        for name, one in zip(told.tests, told.found, strict=True)
    ]
    ui.table(columns, rows, right=columns[1:])
    ui.text()
    for name, one in zip(told.tests, told.found, strict=True):
        ui.text(f"{name}: {one.words()}")
    together = "all intervals hold together" if len(told.found) > 1 else "the interval holds"
    ui.text(f"{together} with a probability of {told.design.confidence:.4g}".rstrip("0"))
    for name, one in zip(told.tests, told.found, strict=True):
        if one.noisy:
            side, rates = max(("A", one.a), ("B", one.b), key=lambda named: wander(named[1]))
            low, high = tenths(rates)
            ui.warn(
                f"{name}: a noisy machine, {side} alone ran at {low:.3g} to {high:.3g} tok/s: a wider interval"
            )
    if told.interleaved and not all(one.settled for one in told.found):
        ui.note(_longer(told))


def _longer(told: Told) -> str:
    """What would make the widest interval as narrow as was asked for: its width falls with the root
    of the time.
    """
    widest = max(one.resolution for one in told.found)
    if math.isinf(widest):
        return "measure longer: --seconds takes more"
    seconds = told.design.seconds * (widest / told.design.precision) ** 2
    if seconds > 3600:
        return "a quieter machine would narrow the interval; more time hardly"
    return (
        f"about --seconds {math.ceil(seconds)} would narrow it to {told.design.precision * 100:g} %"
    )


def _typed(flag: str, text: str) -> dict[str, str]:
    """The settings in the text of --a or --b, by their names; raises UsageError."""
    spelled = {
        spelling: name for name, (_, *spellings) in SETTINGS.items() for spelling in spellings
    }
    try:
        words = shlex.split(text)
    except ValueError:
        raise UsageError(
            f"{flag} ends within quotes: {text!r}", hint=f"{flag} '-t 1 -ctk q8_0'"
        ) from None
    found: dict[str, str] = {}
    while words:
        spelling, equals, value = words.pop(0).partition("=")
        if spelling not in spelled:
            raise UsageError(
                f"{flag} does not know {spelling!r}",
                hint=f"{flag} takes {KNOWN}, as in '-t 1 -ctk q8_0'",
            )
        if not equals and not words:
            raise UsageError(f"{flag}: {spelling} has no value", hint=f"{flag} '-t 1 -ctk q8_0'")
        found[spelled[spelling]] = value if equals else words.pop(0)
    return found


def _value(name: str, text: str) -> int | str:
    """One setting's value; raises UserError."""
    flag = SETTINGS[name][1]
    found: Sequence[int | str]
    if name in ("type_k", "type_v", "flash"):
        found = grid.words(flag, [text], list(FLASH if name == "flash" else KV_TYPES))
    elif name == "gpu_layers" and text.strip() in ("-1", "all", "auto"):
        return -1
    else:
        most = host.MOST_THREADS if name == "threads" else 2**31 - 1
        found = grid.numbers(flag, [text], 0 if name == "gpu_layers" else 1, most)
    if len(found) > 1:
        raise UserError(
            f"{flag} has several values: {text}", hint="one for A and one for B: --a and --b"
        )
    return found[0]


def _span(one: Comparison) -> str:
    return "unknown" if math.isinf(one.resolution) else f"{one.low:.3f} to {one.high:.3f}"


def _pairs(one: Comparison, told: Told) -> int | None:
    return len(one.a) if told.interleaved else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _both(one: str, other: str) -> str:
    return one if one == other else f"{one} | {other}"
