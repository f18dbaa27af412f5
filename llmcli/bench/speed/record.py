"""Saving of speed results to the benchmark history."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from llmcli.bench.history.history import BenchRun, History
from llmcli.bench.speed.llama_bench_output import build_row
from llmcli.bench.speed.measure import SpeedResult
from llmcli.errors import UserError
from llmcli.hardware import rpc_workers


@dataclass(frozen=True, slots=True)
class ModelName:
    """How the history identifies a model: the name that the user typed, the sha256 of the file
    (None: unknown), and the file's content fingerprint.
    """

    model: str
    sha256: str | None
    content: str


class HistoryRecorder:
    """Saves results to the history one by one. If saving fails, it prints one warning and saves no
    further results.
    """

    def __init__(self, history: History, name: ModelName, warn: Callable[[str], None]) -> None:
        self.history, self.model_name, self.warn = history, name, warn
        self.machine = rpc_workers.machine_and_workers()
        self.run_numbers: list[int] = []
        self._failed = False

    def save(self, result: SpeedResult) -> SpeedResult:
        """Save the result. Returns the result with its number in the history; if saving failed,
        returns it unchanged.
        """
        if self._failed:
            return result
        try:
            (number,) = self.history.append([self.build_run(result)])
        except UserError as error:
            self._failed = True
            self.warn(f"results are not saved: {error} ({error.hint})")
            return result
        self.run_numbers.append(number)
        return replace(result, id=number)

    def build_run(self, result: SpeedResult) -> BenchRun:
        """Convert the result to a row of the history."""
        row: dict[str, Any] = build_row(result)
        del row["id"]
        name = self.model_name
        return BenchRun(
            result.start_time,
            self.machine,
            row["build_commit"],
            name.model,
            name.sha256,
            name.content,
            result.title,
            row,
        )
