"""What a file tells of a conversation that was held: the same of a saved chat and of a sitting's
log.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llmcli.chat.conversation import turn_records
from llmcli.chat.conversation.conversation import MODES, Session
from llmcli.chat.conversation.turn_tree import Tree
from llmcli.runtime.constraint.base import Constraint


@dataclass(slots=True)
class Held:
    """A conversation, the model it was last held with and the settings of then. `unanswered` is a
    question that was kept from its answer; `damaged` counts lines that could not be read.
    `constraint` is what answers must be, where the file tells of it (`formed`).
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
        """Read the form of answers off a record that tells of it. Raises records.Damaged."""
        if "format" in record:
            self.constraint, self.formed = turn_records.form(record["format"]), True

    def put(self, session: Session) -> None:
        """Let `session` go on with it. Raises UserError for settings out of range; then nothing has
        changed.
        """
        session.sampling = session.sampling.with_values(self.settings)
        session.system, session.predict, session.tree = self.system, self.predict, self.tree
        session.on_full = self.on_full if self.on_full in MODES else session.on_full
        if self.formed:
            session.constraint = self.constraint

    @property
    def first(self) -> str:
        """The first question of the conversation as it stands, or of any; empty where there is
        none.
        """
        path = self.tree.path() or [1] * bool(self.tree.turns)
        return self.tree[path[0]].question if path else self.unanswered or ""
