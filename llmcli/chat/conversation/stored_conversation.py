"""A conversation read from a file: a saved chat or a session log."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llmcli.chat.conversation import turn_records
from llmcli.chat.conversation.conversation import ON_FULL_MODES, Conversation
from llmcli.chat.conversation.turn_tree import TurnTree
from llmcli.runtime.constraint.base import Constraint


@dataclass(slots=True)
class StoredConversation:
    """A stored conversation, its last model and its last settings.

    - `pending_message`: a question that has no answer.
    - `n_damaged`: the number of unreadable lines.
    - `constraint`: the constraint on answers, None for none.
    - `has_constraint`: whether the file records `constraint`.
    """

    tree: TurnTree
    model: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    system: str | None = None
    predict: int | None = None
    on_full: str = ""
    pending_message: str | None = None
    n_damaged: int = 0
    constraint: Constraint | None = None
    has_constraint: bool = False

    def read_constraint(self, record: Mapping[str, Any]) -> None:
        """Read the constraint if `record` contains it. Raises DamagedRecord."""
        if "format" in record:
            self.constraint, self.has_constraint = (
                turn_records.parse_constraint(record["format"]),
                True,
            )

    def restore_into(self, conversation: Conversation) -> None:
        """Put the stored turns and settings into `conversation`.

        Raises UserError for settings out of range; then nothing has changed.
        """
        conversation.sampling = conversation.sampling.with_values(self.settings)
        conversation.system, conversation.predict, conversation.tree = (
            self.system,
            self.predict,
            self.tree,
        )
        conversation.on_full = (
            self.on_full if self.on_full in ON_FULL_MODES else conversation.on_full
        )
        if self.has_constraint:
            conversation.constraint = self.constraint

    @property
    def first_question(self) -> str:
        """The first question of the conversation; "" without one.

        If no turn is current, it is the first question in the tree, or the unanswered one.
        """
        path = self.tree.current_path() or [1] * bool(self.tree.turns)
        return self.tree[path[0]].question if path else self.pending_message or ""
