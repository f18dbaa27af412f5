"""Saving of bench results to the history, with the machine, the build and the model."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from llmcli.bench.history.history import History, Run
from llmcli.bench.speed.llama_bench_output import document
from llmcli.bench.speed.measure import Result
from llmcli.errors import UserError
from llmcli.hardware import rpc_workers


@dataclass(frozen=True, slots=True)
class Name:
    """A model in the history: its name as typed, the sha256 of its file if known, and its content
    fingerprint.
    """

    model: str
    sha256: str | None
    content: str


class Keeper:
    """Saves results to the history one by one. The first failure is reported, and later results are
    not saved.
    """

    def __init__(self, history: History, name: Name, warn: Callable[[str], None]) -> None:
        self.history, self.name, self.warn = history, name, warn
        self.machine = rpc_workers.identity()
        self.numbers: list[int] = []
        self._failed = False

    def keep(self, result: Result) -> Result:
        """Save the result, and return it with its number in the history if it was saved."""
        if self._failed:
            return result
        try:
            (number,) = self.history.append([self.run(result)])
        except UserError as error:
            self._failed = True
            self.warn(f"results are not saved: {error} ({error.hint})")
            return result
        self.numbers.append(number)
        return replace(result, id=number)

    def run(self, result: Result) -> Run:
        """Return the result as a run of the history."""
        row: dict[str, Any] = document(result)
        del row["id"]
        name = self.name
        return Run(
            result.began,
            self.machine,
            row["build_commit"],
            name.model,
            name.sha256,
            name.content,
            result.title,
            row,
        )
