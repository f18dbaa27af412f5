"""The work of `bench compare`: build the tests, run the comparisons and print the results. The
command-line options are defined in llmcli/commands/bench/compare.py.
"""

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from llmcli.bench.compare import interleaved, saved_runs
from llmcli.bench.compare.interleaved import ModelTest
from llmcli.bench.compare.saved_runs import SavedRuns
from llmcli.bench.history.history import History, history_path
from llmcli.bench.speed import parameter_grid
from llmcli.bench.speed.parameter_grid import SpeedTest
from llmcli.bench.statistics.paired_test import Comparison, Design, decile_rates, decile_ratio
from llmcli.config import Config
from llmcli.errors import UsageError, UserError
from llmcli.hardware import host
from llmcli.model_loader.prepare import prepare_model
from llmcli.model_loader.rehearsal.rehearse import rehearse_file
from llmcli.runtime.binding.contexts.cache_types import FLASH_MODES, KV_TYPES, check_cache_types
from llmcli.runtime.requests.placement_options import NO_PLACEMENT, PlacementOptions
from llmcli.ui import UI

# for each setting: the field of a test that it sets, and the names that users may type
SETTING_FLAGS = {
    "threads": ("n_threads", "-t", "--threads"),
    "batch": ("n_batch", "-b", "--batch-size"),
    "ubatch": ("n_ubatch", "-ub", "--ubatch-size"),
    "type_k": ("type_k", "-ctk", "--cache-type-k"),
    "type_v": ("type_v", "-ctv", "--cache-type-v"),
    "gpu_layers": ("n_gpu_layers", "-ngl", "--n-gpu-layers", "--gpu-layers"),
    "flash": ("flash_attn", "-fa", "--flash-attn"),
}
SETTING_SPELLINGS = "-t -b -ub -ctk -ctv -ngl -fa"


@dataclass(frozen=True, slots=True)
class ComparedSide:
    """Side A or side B of a comparison: a model file with settings, or a saved run.

    `path`: the model file; None for a saved run. `settings`: for a model, the text of --a or --b;
    for a saved run, its origin. `tests`: the tests to run on the model; empty for a saved run.
    """

    name: str
    path: str | None
    settings: str
    tests: tuple[ModelTest, ...] = ()

    @property
    def label(self) -> str:
        """The name of the model or saved run, followed by its settings."""
        return f"{self.name} {self.settings}".strip()


@dataclass(frozen=True, slots=True)
class ComparisonResult:
    """All comparisons of one call of `bench compare`: `comparisons[i]` belongs to the test named
    `tests[i]`.

    `is_interleaved`: A and B were measured in alternation; False for saved runs. `differences`: for
    each test, the fields that differ between two saved runs, as (field, value of A, value of B).
    """

    a: ComparedSide
    b: ComparedSide
    tests: tuple[str, ...]
    comparisons: tuple[Comparison, ...]
    design: Design
    is_interleaved: bool
    differences: tuple[tuple[tuple[str, Any, Any], ...], ...] = ()


def load_saved_runs(
    a: str, b: str | None, config: Config, ui: UI
) -> tuple[SavedRuns, SavedRuns] | None:
    """Return the two saved runs that the arguments name. Each is the number of a run in the
    history, or a JSON file. Returns None if the arguments name models instead.

    Raises UsageError if only one of the arguments names a saved run.
    """

    def named(text: str | None) -> SavedRuns | None:
        return (
            saved_runs.read_saved_runs(
                text, lambda number: History(history_path(config), ui).find_run(number).document
            )
            if text
            else None
        )

    first_run, second_run = named(a), named(b)
    if first_run and second_run:
        return first_run, second_run
    if first_run or second_run:
        run, model = (a, b or "nothing") if first_run else (b, a)
        raise UsageError(
            f"{run} is a saved run, but {model} is not", hint="llmcli bench compare 12 15"
        )
    return None


def refuse_measuring_options(options: Sequence[object]) -> None:
    """Raise UsageError if one of `options` is set. They choose what to measure, which has no
    meaning for saved runs.
    """
    if any(options):
        raise UsageError(
            "saved runs cannot be measured again",
            hint="leave out the flags that choose a test or a setting",
        )


def compare_saved_runs(
    a: SavedRuns, b: SavedRuns, confidence: float, anyway: bool, ui: UI
) -> ComparisonResult:
    """Compare two saved runs test by test. `anyway`: also compare runs from different machines."""
    pairs = saved_runs.match_tests(a, b, anyway)
    test_confidence = 1 - (1 - confidence) / len(pairs)
    comparisons = tuple(
        saved_runs.compare_rates(pair.a["samples_ts"], pair.b["samples_ts"], test_confidence)
        for pair in pairs
    )
    ui.note("saved runs were not interleaved: changes of the machine widen the interval")
    names = tuple(
        _join_names(saved_runs.format_test_name(pair.a), saved_runs.format_test_name(pair.b))
        for pair in pairs
    )
    side_a, side_b = (ComparedSide(side.name, None, side.origin) for side in (a, b))
    differing = tuple(tuple(pair.differences()) for pair in pairs)
    return ComparisonResult(
        side_a, side_b, names, comparisons, Design(confidence=confidence), False, differing
    )


def build_tests(
    prompts: Sequence[str] | None,
    gens: Sequence[str] | None,
    depths: Sequence[str] | None,
    placement_options: PlacementOptions = NO_PLACEMENT,
) -> list[SpeedTest]:
    """Return every combination of a depth with a prompt length or a number of generated tokens. All
    other settings are llama-bench's defaults. Raises UserError if there is
    no test.
    """
    base = SpeedTest(
        0,
        0,
        0,
        2048,
        512,
        "f16",
        "f16",
        host.core_count(),
        -1,
        "auto",
        placement_options=placement_options,
    )
    lengths = [
        (count, 0) for count in parameter_grid.parse_numbers("-p", prompts or ["512"]) if count
    ]
    lengths += [
        (0, count) for count in parameter_grid.parse_numbers("-n", gens or ["128"]) if count
    ]
    built = [
        replace(base, n_prompt=prompt, n_gen=gen, n_depth=depth)
        for depth in parameter_grid.parse_numbers("-d", depths or ["0"])
        for prompt, gen in lengths
    ]
    if not built:
        raise UserError(
            "there is no test to run",
            hint="give -p or -n a number above 0, for example -p 512 -n 128",
        )
    return built


def with_side_settings(
    requested_tests: Sequence[SpeedTest],
    shared_settings: Mapping[str, str | None],
    flag: str,
    side_settings: str,
) -> list[SpeedTest]:
    """Return the tests with the settings of side A or side B. `shared_settings` apply to both
    sides. `side_settings` is the text after `flag`, which is --a or --b; it has priority.

    Raises UserError or UsageError for an invalid setting.
    """
    chosen = {
        **{name: text for name, text in shared_settings.items() if text is not None},
        **_parse_settings(flag, side_settings),
    }
    fields: dict[str, Any] = {
        SETTING_FLAGS[name][0]: _parse_value(name, text) for name, text in chosen.items()
    }
    side_tests = [replace(test, **fields) for test in requested_tests]
    check_cache_types(side_tests[0].type_k, side_tests[0].type_v, side_tests[0].flash_attn)
    return side_tests


def build_side(
    ref: str, side_settings: str, tests: Sequence[SpeedTest], config: Config, ui: UI
) -> ComparedSide:
    """Find the model file of side A or side B, and combine it with all tests. Raises UserError."""
    model = prepare_model(ref, None, config, ui)
    rehearse_file(model.path, config, ui)
    return ComparedSide(
        model.name,
        str(model.path),
        side_settings.strip(),
        tuple(ModelTest(model.path, test) for test in tests),
    )


def build_design(seconds: float | None, precision: float | None, confidence: float) -> Design:
    """Return the statistical design of a comparison from the command-line options. `precision` and
    `confidence` are in percent; None: the default.
    """
    defaults = Design()
    precision_fraction = defaults.precision if precision is None else precision / 100
    return Design(
        defaults.seconds if seconds is None else seconds, precision_fraction, confidence / 100
    )


def measure(
    a: ComparedSide, b: ComparedSide, design: Design, in_turn: bool, ui: UI
) -> ComparisonResult:
    """Measure A and B in alternation, and compare them."""
    pairs = list(zip(a.tests, b.tests, strict=True))
    comparisons = tuple(interleaved.compare_tests(pairs, design, ui, in_turn or None))
    return ComparisonResult(
        a, b, tuple(side.test.name for side in a.tests), comparisons, design, True
    )


def build_document(result: ComparisonResult) -> dict[str, Any]:
    """Return the result as a JSON document. A field is null if there are too few measurements to
    determine its value.
    """
    rows = [
        {
            "test": name,
            "ratio": comparison.ratio,
            "low": comparison.low or None,
            "high": _finite(comparison.high),
            "confidence": comparison.confidence,
            "differs": comparison.differs,
            "resolution": _finite(comparison.resolution),
            "settled": comparison.settled,
            "noisy": comparison.is_noisy,
            "verdict": comparison.describe(),
            "pairs": _n_pairs(comparison, result),
            "a_median_ts": median(comparison.a),
            "b_median_ts": median(comparison.b),
            "a_samples_ts": comparison.a,
            "b_samples_ts": comparison.b,
            "differing": [list(field) for field in result.differences[index]]
            if result.differences
            else [],
        }
        for index, (name, comparison) in enumerate(
            zip(result.tests, result.comparisons, strict=True)
        )
    ]
    sides_json = {
        side: {
            "name": comparison.name,
            "path": comparison.path,
            "settings": comparison.settings if comparison.path else None,
        }
        for side, comparison in (("a", result.a), ("b", result.b))
    }
    return {
        **sides_json,
        "interleaved": result.is_interleaved,
        "confidence": result.design.confidence,
        "tests": rows,
    }


def print_comparison(result: ComparisonResult, ui: UI) -> None:
    """Print the table, one verdict per test, and the notes."""
    ui.text(f"A  {result.a.label}")
    ui.text(f"B  {result.b.label}")
    ui.text()
    for field, value_a, value_b in dict.fromkeys(
        field for fields in result.differences for field in fields
    ):
        ui.text(f"{field}: {value_a} in A, {value_b} in B")
    columns = ("test", "A tok/s", "B tok/s", "B / A", "interval", "pairs")
    rows = [
        (
            name,
            f"{median(one.a):.1f}",
            f"{median(one.b):.1f}",
            f"{one.ratio:.3f}",
            _format_interval(one),
            str(_n_pairs(one, result) or f"{len(one.a)} and {len(one.b)}, unpaired"),
        )
        for name, one in zip(result.tests, result.comparisons, strict=True)
    ]
    ui.table(columns, rows, right=columns[1:])
    ui.text()
    for name, one in zip(result.tests, result.comparisons, strict=True):
        ui.text(f"{name}: {one.describe()}")
    certain = (
        "all intervals are correct" if len(result.comparisons) > 1 else "the interval is correct"
    )
    ui.text(f"{certain} with a probability of {result.design.confidence:.4g}".rstrip("0"))
    for name, one in zip(result.tests, result.comparisons, strict=True):
        if one.is_noisy:
            side, rates = max(("A", one.a), ("B", one.b), key=lambda named: decile_ratio(named[1]))
            low, high = decile_rates(rates)
            ui.warn(
                f"{name}: noisy machine: {side} alone ran at {low:.3g} to {high:.3g} tok/s, "
                "which widens the interval"
            )
    if result.is_interleaved and not all(one.settled for one in result.comparisons):
        ui.note(_advice(result))


def _advice(result: ComparisonResult) -> str:
    """Return advice on how to narrow the widest interval. The time to suggest follows from the rule
    that an interval's width falls with the square root of the measured time.
    """
    widest = max(comparison.resolution for comparison in result.comparisons)
    if math.isinf(widest):
        return "increase --seconds to measure longer"
    seconds = result.design.seconds * (widest / result.design.precision) ** 2
    if seconds > 3600:
        return "a quieter machine would narrow the interval; more time would hardly help"
    return f"about --seconds {math.ceil(seconds)} would narrow it to {result.design.precision * 100:g} %"


def _parse_settings(flag: str, text: str) -> dict[str, str]:
    """Parse the text of --a or --b, such as "-t 1 -ctk q8_0", into the text of each value by the
    name of its setting. Raises UsageError.
    """
    names_by_spelling = {
        spelling: name for name, (_, *spellings) in SETTING_FLAGS.items() for spelling in spellings
    }
    try:
        words = shlex.split(text)
    except ValueError:
        raise UsageError(
            f"{flag} has an unclosed quote: {text!r}", hint=f"{flag} '-t 1 -ctk q8_0'"
        ) from None
    settings: dict[str, str] = {}
    while words:
        spelling, equals, value = words.pop(0).partition("=")
        if spelling not in names_by_spelling:
            raise UsageError(
                f"{flag} has an unknown option {spelling!r}",
                hint=f"{flag} takes {SETTING_SPELLINGS}, as in '-t 1 -ctk q8_0'",
            )
        if not equals and not words:
            raise UsageError(f"{flag}: {spelling} has no value", hint=f"{flag} '-t 1 -ctk q8_0'")
        settings[names_by_spelling[spelling]] = value if equals else words.pop(0)
    return settings


def _parse_value(name: str, text: str) -> int | str:
    """Parse the value of one setting; raises UserError."""
    flag = SETTING_FLAGS[name][1]
    values: Sequence[int | str]
    if name in ("type_k", "type_v", "flash"):
        values = parameter_grid.parse_words(
            flag, [text], list(FLASH_MODES if name == "flash" else KV_TYPES)
        )
    elif name == "gpu_layers" and text.strip() in ("-1", "all", "auto"):
        return -1
    else:
        max_value = host.MAX_THREADS if name == "threads" else 2**31 - 1
        values = parameter_grid.parse_numbers(
            flag, [text], 0 if name == "gpu_layers" else 1, max_value
        )
    if len(values) > 1:
        raise UserError(
            f"{flag} has several values: {text}", hint="set one for A and one for B: --a and --b"
        )
    return values[0]


def _format_interval(comparison: Comparison) -> str:
    return (
        "unknown"
        if math.isinf(comparison.resolution)
        else f"{comparison.low:.3f} to {comparison.high:.3f}"
    )


def _n_pairs(comparison: Comparison, result: ComparisonResult) -> int | None:
    return len(comparison.a) if result.is_interleaved else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _join_names(first: str, second: str) -> str:
    return first if first == second else f"{first} | {second}"
