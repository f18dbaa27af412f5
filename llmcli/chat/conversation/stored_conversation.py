"""A conversation as it was read from a saved chat or a session log, before it becomes the
conversation of a chat session.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llmcli.chat.conversation import turn_records
from llmcli.chat.conversation.conversation import ON_FULL_MODES, Conversation
from llmcli.chat.conversation.turn_tree import TurnTree
from llmcli.runtime.constraint.base import Constraint


@dataclass(slots=True)
class StoredConversation:
    """The turns of a stored conversation, and the model and settings that were last used.

    - `server`: the address of the server that had the model; "" for a model of this machine.
    - `settings`: sampling settings by name.
    - `system`, `predict`, `on_full`: see Conversation.
    - `pending_message`: the last question, if it has no answer.
    - `n_damaged`: number of lines that could not be read.
    - `constraint`: the grammar or schema for answers, or None.
    - `has_constraint`: whether the file says which constraint was used. (Older files do not. The
      constraint of the session then stays.)
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
    server: str = ""

    def read_constraint(self, record: Mapping[str, Any]) -> None:
        """Set `constraint` if the record contains it. Raises DamagedRecord if it is invalid."""
        if "format" in record:
            self.constraint, self.has_constraint = (
                turn_records.parse_constraint(record["format"]),
                True,
            )

    def restore_into(self, conversation: Conversation) -> None:
        """Replace the turns and settings of `conversation` by the stored ones. Raises UserError if
        a setting is out of range. The conversation is then unchanged.
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
        """The first question on the path to the current turn. If all turns were undone, the first
        question in the tree; without turns, the unanswered question or "".
        """
        path = self.tree.current_path() or [1] * bool(self.tree.turns)
        return self.tree[path[0]].question if path else self.pending_message or ""
