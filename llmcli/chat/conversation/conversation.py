"""A conversation and its settings, and nothing about models, screens or disks."""

from dataclasses import dataclass, field

from llmcli.chat.conversation.turn_tree import Tree
from llmcli.runtime.constraint.base import Constraint
from llmcli.runtime.requests.beam_settings import NO_SEARCH, Search
from llmcli.runtime.sampling import Sampling
from llmcli.types import Finish, Message

MODES = {
    "stop": "the answer ends, the next message is refused",
    "shift": "the oldest turns leave, the system text stays",
    "sinks": "the first tokens and the last ones stay",
}


@dataclass(slots=True)
class Session:
    """What the next answer depends on. The system text stands apart from the turns because
    templates differ in how they take it. `predict` None: no limit. `search` holds where it has more
    than one beam, `sampling` otherwise. `constraint`: what every answer must be. `on_full`: what
    happens when the context is full (overflow.py).
    """

    sampling: Sampling
    system: str | None = None
    predict: int | None = None
    search: Search = NO_SEARCH
    constraint: Constraint | None = None
    tree: Tree = field(default_factory=Tree)
    on_full: str = "stop"

    @property
    def messages(self) -> list[Message]:
        """The conversation from its beginning to where it is, user and assistant in turn; a copy."""
        return self._said(self.tree.path())

    @property
    def kept(self) -> list[Message]:
        """Those of the turns that have not left the context: what the model is shown of them; a
        copy.
        """
        return self._said(self.tree.kept())

    @property
    def cut(self) -> set[int]:
        """Indices of those messages that are answers stopped half way."""
        return {
            2 * index + 1 for index, number in enumerate(self.tree.path()) if self.tree[number].cut
        }

    def add(self, text: str, answer: str, finish: Finish, tokens: int = 0) -> None:
        """Keep one turn; its answer has that many tokens."""
        self.tree.add(text, answer, cut=finish == "cancelled", tokens=tokens)

    def undo(self) -> str | None:
        """Go back before the last turn, which stays in the tree; its question, None where there is
        none.
        """
        if not self.tree.at:
            return None
        last = self.tree[self.tree.at]
        self.tree.move(last.parent)
        return last.question

    def clear(self) -> None:
        """Forget all turns; system text and settings stay."""
        self.tree = Tree()

    def _said(self, numbers: list[int]) -> list[Message]:
        turns = [self.tree[number] for number in numbers]
        return [
            m
            for turn in turns
            for m in (Message("user", turn.question), Message("assistant", turn.answer))
        ]
