"""A conversation read from a file: a saved chat or a session log."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llmcli.chat.conversation import turn_records
from llmcli.chat.conversation.conversation import MODES, Session
from llmcli.chat.conversation.turn_tree import Tree
from llmcli.runtime.constraint.base import Constraint


@dataclass(slots=True)
class Held:
    """A stored conversation, its last model and its last settings.

    - `unanswered`: a question that has no answer.
    - `damaged`: the number of unreadable lines.
    - `constraint`: the constraint on answers; `formed` is set if the file contains it.
    """

    tree: Tree
    model: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    system: str | None = None
    predict: int | None = None
    on_full: str = ""
    unanswered: str | None = None
    damaged: int = 0
    constraint: Constraint | None = None
    formed: bool = False

    def take_form(self, record: Mapping[str, Any]) -> None:
        """Read the constraint from a record that contains it. Raises records.Damaged."""
        if "format" in record:
            self.constraint, self.formed = turn_records.form(record["format"]), True

    def put(self, session: Session) -> None:
        """Replace the conversation and settings of `session`.

        Raises UserError for settings out of range; then nothing has changed.
        """
        session.sampling = session.sampling.with_values(self.settings)
        session.system, session.predict, session.tree = self.system, self.predict, self.tree
        session.on_full = self.on_full if self.on_full in MODES else session.on_full
        if self.formed:
            session.constraint = self.constraint

    @property
    def first(self) -> str:
        """The first question of the conversation, or of any turn; "" without one."""
        path = self.tree.path() or [1] * bool(self.tree.turns)
        return self.tree[path[0]].question if path else self.unanswered or ""
