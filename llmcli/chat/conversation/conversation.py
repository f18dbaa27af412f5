"""A conversation and its settings, without a model or a display."""

from dataclasses import dataclass, field

from llmcli.chat.conversation.turn_tree import Tree
from llmcli.runtime.constraint.base import Constraint
from llmcli.runtime.requests.beam_settings import NO_SEARCH, BeamSettings
from llmcli.runtime.sampling import Sampling
from llmcli.types import Finish, Message

MODES = {
    "stop": "the answer ends, the next message is refused",
    "shift": "the oldest turns leave, the system text stays",
    "sinks": "the first and the last tokens stay",
}


@dataclass(slots=True)
class Session:
    """What the next answer depends on.

    - `system`: the system text, separate because templates treat it differently.
    - `predict`: the token limit, None for no limit.
    - `search`: used if it has more than one beam; otherwise `sampling` is used.
    - `constraint`: what every answer must follow.
    - `on_full`: what happens when the context is full (overflow.py).
    """

    sampling: Sampling
    system: str | None = None
    predict: int | None = None
    search: BeamSettings = NO_SEARCH
    constraint: Constraint | None = None
    tree: Tree = field(default_factory=Tree)
    on_full: str = "stop"

    @property
    def messages(self) -> list[Message]:
        """A copy of the messages up to the current turn, user and assistant alternating."""
        return self._said(self.tree.path())

    @property
    def kept(self) -> list[Message]:
        """A copy of the messages of the turns that are still sent to the model."""
        return self._said(self.tree.kept())

    @property
    def cut(self) -> set[int]:
        """The indices of the messages that are stopped answers."""
        return {
            2 * index + 1 for index, number in enumerate(self.tree.path()) if self.tree[number].cut
        }

    def add(self, text: str, answer: str, finish: Finish, tokens: int = 0) -> None:
        """Add a turn; `tokens` is the answer's token count."""
        self.tree.add(text, answer, cut=finish == "cancelled", tokens=tokens)

    def undo(self) -> str | None:
        """Move before the last turn, which stays in the tree; return its question, or None."""
        if not self.tree.at:
            return None
        last = self.tree[self.tree.at]
        self.tree.move(last.parent)
        return last.question

    def clear(self) -> None:
        """Remove all turns; system text and settings stay."""
        self.tree = Tree()

    def _said(self, numbers: list[int]) -> list[Message]:
        turns = [self.tree[number] for number in numbers]
        return [
            message
            for turn in turns
            for message in (Message("user", turn.question), Message("assistant", turn.answer))
        ]
