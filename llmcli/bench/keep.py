"""What `bench` keeps of a measurement: the test as its JSON, with the machine, the build and the
model it holds for.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from llmcli.bench.history import History, Run
from llmcli.bench.kernel import Result
from llmcli.bench.report import document
from llmcli.errors import UserError
from llmcli.hardware import cluster


@dataclass(frozen=True, slots=True)
class Name:
    """A model as the history knows it: as it was typed, its file's sha256 where that is known, and
    its fingerprint.
    """

    model: str
    sha256: str | None
    content: str


class Keeper:
    """Puts results into the history one by one; where that fails it says so once, and measuring
    goes on.
    """

    def __init__(self, history: History, name: Name, warn: Callable[[str], None]) -> None:
        self.history, self.name, self.warn = history, name, warn
        self.machine = cluster.identity()
        self.numbers: list[int] = []
        self._failed = False

    def keep(self, result: Result) -> Result:
        """The result, with its number where it was kept."""
        if self._failed:
            return result
        try:
            (number,) = self.history.append([self.run(result)])
        except UserError as error:
            self._failed = True
            self.warn(f"these results are not kept: {error} ({error.hint})")
            return result
        self.numbers.append(number)
        return replace(result, id=number)

    def run(self, result: Result) -> Run:
        """A result as the history keeps it."""
        told: dict[str, Any] = document(result)
        del told["id"]
        name = self.name
        return Run(
            result.began,
            self.machine,
            told["build_commit"],
            name.model,
            name.sha256,
            name.content,
            result.title,
            told,
        )
