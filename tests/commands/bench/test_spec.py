"""`llmcli bench spec` on tiny real models: what it measures, its page, and wrong arguments."""

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from llmcli.bench.plots import drafts
from llmcli.bench.spec import output, run
from llmcli.bench.spec.measure import MethodResult, MethodTrial, TaskResult, measure_method
from llmcli.bench.spec.run import SpecResult
from llmcli.bench.spec.task_kinds import TASK_NAMES
from llmcli.bench.statistics.paired_test import Comparison
from llmcli.charts.chart import Plot, RowChart
from llmcli.commands.bench.reports.spec import build_page
from llmcli.errors import UserError
from llmcli.runtime.binding.model import AllocationError
from llmcli.runtime.drafting.draft_files.eagle3_match import EAGLE3
from llmcli.runtime.drafting.draft_files.heads_file import BLOCKWISE, MEDUSA, HeadShapes
from llmcli.runtime.drafting.gain.pass_cost import PassCost
from llmcli.runtime.requests.draft_counts import DraftCounts
from llmcli.runtime.requests.request import RunOptions
from tests.fixtures.cli import Done
from tests.fixtures.draft_heads import write_heads
from tests.quant import predicting_checkpoint, tiny_gguf

Llmcli = Callable[..., Done]
SHORT = ("-n", "12", "--pairs", "2", "-t", "1", "--json")


def test_every_offered_method_is_measured(llmcli: Llmcli, stories_gguf: Path) -> None:
    done = llmcli("bench", "spec", str(stories_gguf), "--tasks", "free,edit", *SHORT)
    assert done.code == 0, done.err
    document = json.loads(done.out)
    methods = {method["method"]: method for method in document["methods"]}
    assert "ngram" in methods
    assert {"model", "mtp"} <= document["not_measured"].keys()
    assert "no layers that predict" in document["not_measured"]["mtp"]
    assert list(methods["ngram"]["pass_ms"])[:2] == ["1", "4"]
    tasks = methods["ngram"]["tasks"]
    assert [task["task"] for task in tasks] == ["free", "edit"]
    for task in tasks:
        assert len(task["plain_ts"]) == len(task["drafted_ts"]) == task["pairs"] == 2
        assert task["bound"] >= 1
        assert task["low"] is None  # two pairs are too few for an interval


def test_a_model_that_drafts_for_itself_is_right(llmcli: Llmcli, stories_gguf: Path) -> None:
    model = str(stories_gguf)
    words = ("bench", "spec", model, "-md", model, "--methods", "model", "--tasks", "free", *SHORT)
    document = json.loads(llmcli(*words).out)
    (method,) = document["methods"]
    (task,) = method["tasks"]
    assert document["draft_model"] == model
    # near ties depend on the processor, so a guess may be wrong
    assert task["acceptance"][0] > 0.8
    assert task["guess_ms"] > 0
    assert task["longest_tokens_per_pass"] > 3


def test_prediction_layers_are_measured(llmcli: Llmcli, tmp_path: Path) -> None:
    file = predicting_checkpoint.write_gguf(tmp_path / "m.gguf")
    words = ("bench", "spec", str(file), "--methods", "mtp", "--tasks", "free", "-c", "512", *SHORT)
    done = llmcli(*words)
    assert done.code == 0, done.err
    (task,) = json.loads(done.out)["methods"][0]["tasks"]
    # its state goes back by three guesses only
    assert 1 <= len(task["guesses"]) <= 3
    assert task["guesses"][0] > 0


def write_target(path: Path) -> Path:
    """Write a tiny random model for the draft files of `write_draft`."""
    return tiny_gguf.llama(path, hidden=64, ff=64, layers=6, tied=True)


def write_draft(path: Path, method: str, target: Path) -> Path:
    """Write a random EAGLE-3 draft or draft heads, and return `path`."""
    if method == EAGLE3:
        return tiny_gguf.eagle3(path)
    n_layers, n_hidden = (1, 0) if method == MEDUSA else (1, 32)
    write_heads(path, HeadShapes(method, 64, 300, 4, n_layers, n_hidden, False), target)
    return path


@pytest.mark.parametrize("method", [EAGLE3, MEDUSA, BLOCKWISE])
def test_the_drafts_of_a_file_are_measured_beside_those_without_one(
    method: str, llmcli: Llmcli, tmp_path: Path
) -> None:
    target = write_target(tmp_path / "m.gguf")
    draft = write_draft(tmp_path / "d.gguf", method, target)
    words = ("bench", "spec", str(target), "-md", str(draft), "--tasks", "free", "-c", "512")
    done = llmcli(*words, *SHORT, "--methods", f"pool,{method}")
    assert done.code == 0, done.err
    document = json.loads(done.out)
    assert document["draft_model"] == str(draft)
    pool, measured = document["methods"]
    assert (pool["method"], measured["method"]) == ("pool", method)
    (task,) = measured["tasks"]
    assert task["guesses"][0] > 0
    assert task["guess_ms"] > 0


@pytest.mark.parametrize(
    ("methods", "code", "message"),
    [
        ("ngram", 1, "-md DRAFT is for the method medusa, which --methods does not name"),
        ("medusa,model", 1, "--methods model needs a draft model"),
        ("medusa,eagle3", 1, "--methods eagle3 needs an EAGLE-3 draft of the model"),
    ],
)
def test_a_draft_file_without_use_is_refused(
    methods: str, code: int, message: str, llmcli: Llmcli, tmp_path: Path
) -> None:
    target = write_target(tmp_path / "m.gguf")
    draft = str(write_draft(tmp_path / "d.gguf", MEDUSA, target))
    done = llmcli("bench", "spec", str(target), "-md", draft, "--methods", methods, *SHORT)
    assert (done.code, done.out) == (code, "")
    assert message.replace("DRAFT", draft) in done.err


def test_a_draft_file_of_another_method_and_another_model_is_refused_for_its_method(
    llmcli: Llmcli, tmp_path: Path
) -> None:
    small = tiny_gguf.llama(tmp_path / "m.gguf", hidden=64, layers=1, tied=True)
    draft = str(tiny_gguf.eagle3(tmp_path / "d.gguf"))
    words = ("bench", "spec", str(small), "-md", draft, *SHORT, "--methods")
    done = llmcli(*words, "model")
    assert (done.code, done.out) == (1, "")
    assert f"-md {draft} is for the method eagle3, which --methods does not name" in done.err
    done = llmcli(*words, "eagle3")
    assert (done.code, done.out) == (1, "")
    assert "it reads layer 5, but the model has 1 layers" in done.err


def test_a_method_that_fails_leaves_the_results_of_the_others(
    llmcli: Llmcli, stories_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first error of a method that was not named; then of one that was, after results."""
    failing = {"pool"}

    def measure_or_fail(trial: MethodTrial, *arguments: object) -> MethodResult:
        if trial.method in failing:
            raise UserError(f"{trial.method} broke")
        return measure_method(trial, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr("llmcli.bench.spec.run.measure_method", measure_or_fail)
    words = ("bench", "spec", str(stories_gguf), "--tasks", "free", *SHORT)
    for methods in ((), ("--methods", "ngram,pool")):
        done = llmcli(*words, *methods)
        assert done.code == 0, done.err
        document = json.loads(done.out)
        names = {method["method"] for method in document["methods"]}
        assert "ngram" in names
        assert "pool" not in names
        assert document["not_measured"]["pool"] == "pool broke"
    failing |= set(run.method_names())
    done = llmcli(*words)
    assert (done.code, done.out) == (1, "")
    assert "broke" in done.err


def test_memory_that_the_model_does_not_get_ends_the_benchmark(
    llmcli: Llmcli, stories_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []

    def open_runner(*arguments: object, **options: object) -> None:
        opened.append(arguments)
        raise AllocationError("no memory", hint="-c 512")

    monkeypatch.setattr("llmcli.bench.spec.run.open_runner", open_runner)
    done = llmcli("bench", "spec", str(stories_gguf), "--tasks", "free", *SHORT)
    assert (done.code, done.out, len(opened)) == (1, "", 1)
    assert "no memory" in done.err
    assert "-c 512" in done.err


@pytest.mark.parametrize(
    ("words", "ctx_size"),
    [((), 2048), (("-n", "1500"), 2524), (("-n", "4000"), 3000), (("-c", "700"), 700)],
)
def test_the_default_context_has_room_for_the_answers(
    words: tuple[str, ...],
    ctx_size: int,
    llmcli: Llmcli,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The model was trained with 3000 tokens."""
    target = tiny_gguf.llama(tmp_path / "m.gguf", hidden=64, layers=1, context=3000)

    def measure(trial: MethodTrial, *arguments: object) -> MethodResult:
        return MethodResult(trial.method, trial.used.pass_cost, ())

    monkeypatch.setattr("llmcli.bench.spec.run.measure_method", measure)
    done = llmcli("bench", "spec", str(target), "--methods", "ngram", *words, "-t", "1", "--json")
    assert json.loads(done.out)["ctx_size"] == ctx_size, done.err


@pytest.mark.parametrize(
    ("words", "code", "message", "hint"),
    [
        (("--methods", "magic"), 1, "--methods: unknown value 'magic'", "ngram"),
        (("--methods", "model"), 2, "--methods model needs a draft model", "-md REF"),
        (("--methods", "mtp"), 1, "no layers that predict", "leave mtp out of --methods"),
        (("--tasks", "poem"), 1, "--tasks: unknown value 'poem'", "summary"),
        (("-ctk", "q9"), 1, "cache type", ""),
        (("-c", "64"), 1, "the context holds 256 tokens", "--ctx-size"),
    ],
)
def test_wrong_arguments_are_one_error(
    llmcli: Llmcli,
    stories_gguf: Path,
    words: tuple[str, ...],
    code: int,
    message: str,
    hint: str,
) -> None:
    done = llmcli("bench", "spec", str(stories_gguf), *words, *SHORT)
    assert (done.code, done.out) == (code, "")
    assert message in done.err
    assert hint in done.err
    assert "Traceback" not in done.err


def test_a_draft_model_of_another_vocabulary_is_refused(
    llmcli: Llmcli, stories_gguf: Path, tmp_path: Path
) -> None:
    other = tiny_gguf.llama(tmp_path / "other.gguf", layers=1)
    done = llmcli("bench", "spec", str(stories_gguf), "-md", str(other), "--tasks", "free", *SHORT)
    assert (done.code, done.out) == (1, "")
    assert "its vocabulary is different" in done.err


def test_the_page_is_tried_before_the_model(llmcli: Llmcli, tmp_path: Path) -> None:
    done = llmcli("bench", "spec", "no-such-model", "-o", str(tmp_path))
    assert (done.code, "it is a folder" in done.err) == (1, True)


def result() -> SpecResult:
    """Return a result of two methods: `fast` saves time with edits, and `slow` nowhere."""
    cheap, costly = (
        PassCost({1: 0.01, 4: 0.01 * four, 8: 0.02 * four, 16: 0.04 * four}) for four in (1.2, 3.0)
    )
    edit = TaskResult(
        "edit",
        DraftCounts("fast", (10, 10, 10), (10, 9, 8), (9, 8, 6), 0.01),
        12,
        DraftCounts("fast", (8, 8, 8), (8, 7, 6), (7, 6, 5), 0.01),
        30,
        14,
        Comparison(1.7, 1.5, 1.9, 0.95, (90.0, 100.0, 110.0), (160.0, 170.0, 180.0)),
        6,
        6,
    )
    free = TaskResult(
        "free",
        DraftCounts("slow", (10, 10, 10), (10, 4, 1), (4, 1, 0), 0.02),
        20,
        DraftCounts("slow"),
        20,
        20,
        Comparison(0.9, 0.85, 0.95, 0.95, (100.0,), (90.0,)),
        6,
        5,
    )
    methods = (MethodResult("fast", cheap, (edit,)), MethodResult("slow", costly, (free,)))
    options = RunOptions(ctx_size=512, threads=2)
    obstacles = (("mtp", "no such layers"),)
    return SpecResult("tiny", Path("t.gguf"), None, options, 32, methods, obstacles)


def test_the_verdicts_say_where_drafts_pay_and_what_they_would_need() -> None:
    assert output.verdicts(result()) == [
        "fast: faster with edit (1.70)",
        "slow: slower with free (0.90)",
        "slow, free: drafts save time where a pass of 4 rows takes less than "
        "1.30 passes of one row; here it takes 3.00",
        "mtp was not measured: no such layers",
    ]


@pytest.mark.parametrize(
    ("n_right", "seconds", "reason"),
    [
        (10, 0.6, "100% of the guesses are right, and one takes 2.00 passes of one row"),
        (0, 0.0, "0% of the guesses are right, and one takes 0.00 passes of one row"),
    ],
)
def test_the_verdict_says_why_no_machine_would_do(
    n_right: int, seconds: float, reason: str
) -> None:
    counts = DraftCounts("x", (10, 10, 10), (10, n_right, n_right), (n_right,) * 3, seconds)
    task = TaskResult("free", counts, 10, DraftCounts("x"), 9, 9, None, 1, 1)
    method = MethodResult("x", PassCost({1: 0.01, 4: 0.02}), (task,))
    no_machine = "drafts would save time on no machine: "
    lines = output.verdicts(replace(result(), methods=(method,), obstacles=()))
    assert lines == ["x: no difference that is certain", f"x, free: {no_machine}{reason}"]


def test_the_table_has_a_row_for_each_method_and_task() -> None:
    fast, slow = output.table_rows(result())
    assert fast[:7] == (
        "fast, edit",
        "90 89 75 – –",
        "2.14",
        "100.0",
        "170.0",
        "1.700",
        "1.500 to 1.900",
    )
    assert slow[0::7] == ("slow, free", "1.00")
    assert slow[-1] == "no drafts"


def test_the_charts_have_the_acceptance_and_the_speed_beside_its_bound() -> None:
    charts = {chart.title: chart for chart in drafts.build_charts(result().methods)}
    speed = charts["Speed relative to plain decoding"]
    assert isinstance(speed, RowChart)
    method = result().methods[0]
    assert [(value.name, value.value) for value in speed.rows[0].values] == [
        ("measured", 1.7),
        ("bound", method.bound(method.tasks[0]).speed),
    ]
    assert speed.rows[0].value_range == (1.5, 1.9)
    acceptance = charts["Acceptance of fast"]
    assert isinstance(acceptance, Plot)
    assert [(point.x, point.y) for point in acceptance.series[0].points] == [
        (1, pytest.approx(90)),
        (2, pytest.approx(100 * 8 / 9)),
        (3, pytest.approx(75)),
    ]
    assert {"Acceptance of slow", "Cost of a pass"} <= charts.keys()


def test_a_method_without_any_draft_has_no_acceptance_chart() -> None:
    task = TaskResult("free", DraftCounts("x"), 9, DraftCounts("x"), 9, 9, None, 1, 1)
    charts = drafts.build_charts([MethodResult("x", PassCost({1: 1.0, 4: 2.0}), (task,))])
    assert [chart.title for chart in charts] == ["Cost of a pass"]


def test_the_page_has_all_charts_and_loads_nothing(
    llmcli: Llmcli, stories_gguf: Path, tmp_path: Path
) -> None:
    assert [chart.title for chart in build_page(result()).charts] == [
        "Speed relative to plain decoding",
        "Acceptance of fast",
        "Acceptance of slow",
        "Cost of a pass",
    ]
    with_file = build_page(replace(result(), draft_path=Path("heads.gguf")))
    assert "in interleaved pairs, with the drafts of heads.gguf." in with_file.subtitle
    out = tmp_path / "spec.html"
    words = ("bench", "spec", str(stories_gguf), "--methods", "ngram", "--tasks", "edit")
    done = llmcli(*words, "-n", "12", "--pairs", "1", "-t", "1", "-o", str(out), "--chart")
    assert done.code == 0, done.err
    page = ElementTree.fromstring(out.read_text())
    titles = [heading.text for heading in page.iter("h2")]
    assert titles[0] == "Speed relative to plain decoding"
    assert {"Cost of a pass", "All results"} <= set(titles)
    assert "ngram, edit" in done.out
    assert "Cost of a pass" in done.out
    assert not list(page.iter("script"))


def test_the_help_lists_the_kinds_of_tasks(llmcli: Llmcli) -> None:
    page = llmcli("bench", "spec", "--help").out
    assert all(name in page for name in TASK_NAMES)
