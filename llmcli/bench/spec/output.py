"""The output of `bench spec`: the JSON document, the table, and where drafts pay in sentences."""

import math
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from llmcli.bench.spec.measure import MethodResult, TaskResult
from llmcli.bench.spec.run import SpecResult
from llmcli.bench.spec.speed_bound import SHORTEST_DRAFT, guess_seconds
from llmcli.bench.statistics.paired_test import Comparison
from llmcli.ui import UI
from llmcli.units import format_count

SHOWN_DEPTHS = (1, 2, 3, 4, 8)
COLUMNS = (
    "method, task",
    f"right at {', '.join(map(str, SHOWN_DEPTHS))} (%)",
    "tokens/pass",
    "plain tok/s",
    "drafts tok/s",
    "speed",
    "95 % interval",
    "bound",
    "with",
)


def build_document(result: SpecResult) -> dict[str, Any]:
    """Return the result as a JSON document. A field is null where there is nothing to measure."""
    options = result.options
    return {
        "model": {"name": result.name, "path": str(result.path)},
        "draft_model": str(result.draft_path) if result.draft_path else None,
        "threads": options.threads,
        "ctx_size": options.ctx_size,
        "cache_type_k": options.cache_type_k,
        "cache_type_v": options.cache_type_v,
        "n_gen": result.n_tokens,
        "methods": [_method_document(method) for method in result.methods],
        "not_measured": dict(result.obstacles),
    }


def _method_document(method: MethodResult) -> dict[str, Any]:
    cost = method.cost
    return {
        "method": method.method,
        "pass_ms": {str(rows): cost(rows) * 1e3 for rows in sorted(cost.ratios)},
        "pass_ratios": {str(rows): cost.ratio(rows) for rows in sorted(cost.ratios)},
        "tasks": [_task_document(method, task) for task in method.tasks],
    }


def _task_document(method: MethodResult, task: TaskResult) -> dict[str, Any]:
    bound, speed, longest = method.bound(task), task.comparison, task.longest
    return {
        "task": task.task,
        "acceptance": longest.acceptance,
        "guesses": longest.guesses,
        "checked": longest.checked,
        "right": longest.right,
        "guess_ms": guess_seconds(longest) * 1e3,
        "longest_tokens_per_pass": task.longest_tokens_per_pass,
        "drafts": task.used.n_drafts,
        "drafted_tokens": task.used.n_guesses,
        "accepted_tokens": task.used.n_right,
        "tokens_per_pass": task.tokens_per_pass,
        "plain_ts": speed.a if speed else (),
        "drafted_ts": speed.b if speed else (),
        "plain_median_ts": median(speed.a) if speed else None,
        "drafted_median_ts": median(speed.b) if speed else None,
        "ratio": speed.ratio if speed else None,
        "low": (speed.low or None) if speed else None,
        "high": speed.high if speed and math.isfinite(speed.high) else None,
        "confidence": speed.confidence if speed else None,
        "pairs": task.n_pairs,
        "same_texts": task.n_same,
        "bound": bound.speed,
        "bound_guesses": bound.n_guesses,
        "bound_tokens_per_pass": bound.tokens_per_pass,
        "break_even": bound.break_even,
    }


def table_rows(result: SpecResult) -> list[tuple[str, ...]]:
    """Return a row of texts for each method and task, with the columns COLUMNS."""
    return [_table_row(method, task) for method in result.methods for task in method.tasks]


def _table_row(method: MethodResult, task: TaskResult) -> tuple[str, ...]:
    speed, bound = task.comparison, method.bound(task)
    return (
        f"{method.method}, {task.task}",
        format_acceptance(task),
        f"{task.tokens_per_pass:.2f}",
        *(
            (
                f"{median(speed.a):.1f}",
                f"{median(speed.b):.1f}",
                f"{speed.ratio:.3f}",
                _format_interval(speed),
            )
            if speed
            else ("", "", "", "answers too short")
        ),
        f"{bound.speed:.2f}",
        f"{bound.n_guesses} guesses" if bound.n_guesses else "no drafts",
    )


def format_acceptance(task: TaskResult) -> str:
    """Return the percentages of right guesses at SHOWN_DEPTHS, such as `91 84 80 – –`."""
    shares = dict(enumerate(task.longest.acceptance, 1))
    return " ".join(
        "–" if (share := shares.get(depth)) is None else f"{share * 100:.0f}"
        for depth in SHOWN_DEPTHS
    )


def _format_interval(speed: Comparison) -> str:
    if not speed.low or math.isinf(speed.high):
        return "too few pairs"
    return f"{speed.low:.3f} to {speed.high:.3f}"


def verdicts(result: SpecResult) -> list[str]:
    """Return a sentence for each method about where it is faster, and sentences that say which cost
    of passes would be needed where drafts cannot save time.
    """
    lines = []
    for method in result.methods:
        faster = [task for task in method.tasks if _compares(task, lambda s: s.low > 1)]
        slower = [task for task in method.tasks if _compares(task, lambda s: s.high < 1)]
        parts = [
            f"{word} with {_join_tasks(tasks)}"
            for word, tasks in (("faster", faster), ("slower", slower))
            if tasks
        ]
        lines.append(f"{method.method}: {', '.join(parts) or 'no difference that is certain'}")
        lines += [
            _describe_break_even(method, task)
            for task in method.tasks
            if not method.bound(task).n_guesses and task.longest.n_drafts
        ]
    lines += [f"{name} was not measured: {reason}" for name, reason in result.obstacles]
    return lines


def _compares(task: TaskResult, holds: Callable[[Comparison], bool]) -> bool:
    return task.comparison is not None and holds(task.comparison)


def _join_tasks(tasks: Sequence[TaskResult]) -> str:
    return ", ".join(
        f"{task.task} ({task.comparison.ratio:.2f})" for task in tasks if task.comparison
    )


def _describe_break_even(method: MethodResult, task: TaskResult) -> str:
    rows = SHORTEST_DRAFT + 1
    have, need = method.cost.ratio(rows), method.bound(task).break_even
    if need <= 1:
        share = guess_seconds(task.longest) / method.cost.single_seconds
        right = task.longest.n_right / task.longest.n_guesses
        return (
            f"{method.method}, {task.task}: drafts would save time on no machine: {right:.0%} of "
            f"the guesses are right, and one takes {share:.2f} passes of one row"
        )
    return (
        f"{method.method}, {task.task}: drafts save time where a pass of {rows} rows takes less "
        f"than {need:.2f} passes of one row; here it takes {have:.2f}"
    )


def describe_costs(method: MethodResult) -> str:
    """Return a sentence about the cost of passes."""
    cost = method.cost
    several = ", ".join(
        f"{rows}: {cost.ratio(rows):.2f}" for rows in sorted(cost.ratios) if rows > 1
    )
    return (
        f"{method.method}: a pass of one row takes {cost.single_seconds * 1e3:.1f} ms; passes of "
        f"several rows relative to it: {several}"
    )


def print_benchmark(result: SpecResult, ui: UI) -> None:
    """Print the table, the cost of passes, and the verdicts."""
    options = result.options
    draft = f" · drafts of {result.draft_path.name}" if result.draft_path else ""
    ui.text(
        f"{result.name} · {format_count(options.threads or 1, 'thread')} · "
        f"KV {options.cache_type_k}, {options.cache_type_v} · "
        f"answers of up to {result.n_tokens} tokens{draft}"
    )
    ui.table(COLUMNS, table_rows(result), right=COLUMNS[2:6] + COLUMNS[7:8])
    ui.text()
    for line in (*map(describe_costs, result.methods), *verdicts(result)):
        ui.text(line)
