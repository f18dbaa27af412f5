"""A conversation and its settings, without a model or a display."""

from dataclasses import dataclass, field

from llmcli.chat.conversation.turn_tree import TurnTree
from llmcli.runtime.constraint.base import Constraint
from llmcli.runtime.requests.beam_settings import NO_SEARCH, BeamSettings
from llmcli.runtime.sampling import Sampling
from llmcli.types import Finish, Message

ON_FULL_MODES = {
    "stop": "the answer ends, the next message is refused",
    "shift": "the oldest turns leave, the system text stays",
    "sinks": "the first and the last tokens stay",
}


@dataclass(slots=True)
class Conversation:
    """The turns and the settings that the next answer depends on.

    - `system`: the system text, separate because templates treat it differently.
    - `predict`: the token limit, None for no limit.
    - `search`: used if it has more than one beam; otherwise `sampling` is used.
    - `constraint`: what every answer must follow.
    - `on_full`: what happens when the context is full (context_overflow.py).
    """

    sampling: Sampling
    system: str | None = None
    predict: int | None = None
    search: BeamSettings = NO_SEARCH
    constraint: Constraint | None = None
    tree: TurnTree = field(default_factory=TurnTree)
    on_full: str = "stop"

    @property
    def messages(self) -> list[Message]:
        """A copy of the messages up to the current turn, user and assistant alternating."""
        return self._messages_of(self.tree.current_path())

    @property
    def sent_messages(self) -> list[Message]:
        """A copy of the messages of the turns that are still sent to the model."""
        return self._messages_of(self.tree.sent_turns())

    @property
    def stopped_indices(self) -> set[int]:
        """The indices in `messages` of the answers that were stopped."""
        return {
            2 * index + 1
            for index, number in enumerate(self.tree.current_path())
            if self.tree[number].is_stopped
        }

    def add_turn(self, text: str, answer: str, finish: Finish, tokens: int = 0) -> None:
        """Add a turn; `tokens` is the answer's token count."""
        self.tree.add_turn(text, answer, is_stopped=finish == "cancelled", n_tokens=tokens)

    def undo_turn(self) -> str | None:
        """Go back to the turn before the last one, which stays in the tree.

        Returns the question of the last turn, or None if there is no turn.
        """
        if not self.tree.current_turn:
            return None
        last = self.tree[self.tree.current_turn]
        self.tree.move_to(last.parent)
        return last.question

    def clear(self) -> None:
        """Remove all turns; system text and settings stay."""
        self.tree = TurnTree()

    def _messages_of(self, numbers: list[int]) -> list[Message]:
        turns = [self.tree[number] for number in numbers]
        return [
            message
            for turn in turns
            for message in (Message("user", turn.question), Message("assistant", turn.answer))
        ]
