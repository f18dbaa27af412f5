"""A conversation: its turns, and the settings with which the next answer is generated. Contains no
model and prints nothing.
"""

import itertools
from dataclasses import dataclass, field

from llmcli.chat.conversation.tool_steps import ToolStep, step_messages
from llmcli.chat.conversation.turn_tree import STOPPED, TurnTree
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
    """The turns of a conversation, and the settings for the next answer.

    - `sampling`: settings of the sampler, used if `search` has only one beam.
    - `typed_settings`: the names of sampling settings that the user has set, also to their
      defaults.
    - `system`: the system text, or None.
    - `predict`: maximum number of tokens in an answer; None for no limit.
    - `search`: settings of beam search.
    - `constraint`: the grammar or JSON schema that every answer must follow, or None.
    - `on_full`: a key of ON_FULL_MODES: what happens when the context is full
      (context_overflow.py).
    """

    sampling: Sampling
    system: str | None = None
    predict: int | None = None
    search: BeamSettings = NO_SEARCH
    constraint: Constraint | None = None
    tree: TurnTree = field(default_factory=TurnTree)
    on_full: str = "stop"
    typed_settings: set[str] = field(default_factory=set)

    @property
    def messages(self) -> list[Message]:
        """A new list of the messages up to the current turn. Each turn begins with one of the
        user and ends with one of the assistant; between them are calls of tools and their results.
        """
        return [
            message
            for number in self.tree.current_path()
            for message in self._turn_messages(number)
        ]

    @property
    def sent_messages(self) -> list[Message]:
        """A new list of the messages of the turns that are still sent to the model."""
        return [message for messages in self.sent_turn_messages for message in messages]

    @property
    def sent_turn_messages(self) -> list[list[Message]]:
        """For each turn that is still sent to the model, its messages."""
        return [self._turn_messages(number) for number in self.tree.sent_turns()]

    @property
    def stopped_indices(self) -> set[int]:
        """The indices in `messages` of the answers that were stopped."""
        path = self.tree.current_path()
        ends = itertools.accumulate(len(self._turn_messages(number)) for number in path)
        return {
            end - 1 for number, end in zip(path, ends, strict=True) if self.tree[number].is_stopped
        }

    def add_turn(
        self,
        text: str,
        answer: str,
        finish: Finish,
        tokens: int = 0,
        steps: tuple[ToolStep, ...] = (),
    ) -> None:
        """Add the question `text` and its answer as a new turn after the current one. `finish`: why
        the answer ended. `tokens`: number of tokens of the answer. `steps`: the calls of tools
        before it.
        """
        self.tree.add_turn(text, answer, is_stopped=finish in STOPPED, n_tokens=tokens, steps=steps)

    def undo_turn(self) -> str | None:
        """Go back to the turn before the current one, which stays in the tree. Return the question
        of the turn that was left, or None if there is no turn.
        """
        if not self.tree.current_turn:
            return None
        last = self.tree[self.tree.current_turn]
        self.tree.move_to(last.parent)
        return last.question

    def clear(self) -> None:
        """Remove all turns and branches. The system text and the settings stay."""
        self.tree = TurnTree()

    def _turn_messages(self, number: int) -> list[Message]:
        """Return the messages of the turn with this number."""
        turn = self.tree[number]
        return [
            Message("user", turn.question),
            *(message for step in turn.steps for message in step_messages(step)),
            Message("assistant", turn.answer),
        ]
