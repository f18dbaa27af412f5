"""A conversation as a tree: every question creates a new turn, and no turn is deleted.

Turns are numbered from 1 in the order of their creation; 0 is the root, before all turns.
"""

import re
from dataclasses import dataclass, field

from llmcli.errors import UserError

MAIN_BRANCH = "main"
BRANCH_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}")


@dataclass(frozen=True, slots=True)
class Turn:
    """A question and its answer.

    `parent` is the number of the turn before it. `is_stopped`: the answer was stopped. `n_tokens`:
    the answer's token count, 0 if unknown.
    """

    parent: int
    question: str
    answer: str
    is_stopped: bool = False
    n_tokens: int = 0


@dataclass(slots=True)
class TurnTree:
    """All turns, and the position of the conversation.

    - `current_turn`: the conversation's last turn.
    - `branch_ends`: the branches and their last turns.
    - `current_branch`: the branch that grows with the conversation; "" for none.
    - `dropped`: turns that are no longer sent to the model.
    """

    turns: list[Turn] = field(default_factory=list)
    current_turn: int = 0
    branch_ends: dict[str, int] = field(default_factory=lambda: {MAIN_BRANCH: 0})
    current_branch: str = MAIN_BRANCH
    dropped: set[int] = field(default_factory=set)

    def __getitem__(self, number: int) -> Turn:
        """Return the turn with this number."""
        assert 0 < number <= len(self.turns), number
        return self.turns[number - 1]

    def current_path(self) -> list[int]:
        """Return the numbers of the conversation's turns in order."""
        numbers, number = [], self.current_turn
        while number:
            numbers.append(number)
            number = self[number].parent
        return numbers[::-1]

    def sent_turns(self) -> list[int]:
        """Return the turns of the path that are still sent to the model."""
        return [number for number in self.current_path() if number not in self.dropped]

    def follower_lists(self) -> list[list[int]]:
        """Return, for each turn number, the turns that follow it; entry 0 lists the first
        questions.
        """
        followers: list[list[int]] = [[] for _ in range(len(self.turns) + 1)]
        for number, turn in enumerate(self.turns, 1):
            followers[turn.parent].append(number)
        return followers

    def leaf_turns(self) -> list[int]:
        """Return the turns without followers."""
        return [
            number
            for number, followers in enumerate(self.follower_lists())
            if number and not followers
        ]

    def add_turn(
        self, question: str, answer: str, *, is_stopped: bool = False, n_tokens: int = 0
    ) -> int:
        """Append a turn at the current position and move to it; return its number."""
        self.turns.append(Turn(self.current_turn, question, answer, is_stopped, n_tokens))
        self.move_to(len(self.turns))
        return self.current_turn

    def move_to(self, number: int) -> None:
        """Make turn `number` the last one of the conversation and of the current branch."""
        assert 0 <= number <= len(self.turns), number
        self.current_turn = number
        if self.current_branch:
            self.branch_ends[self.current_branch] = number

    def create_branch(self, name: str) -> None:
        """Begin a branch at the current turn; the previous branch ends here.

        Raises UserError if the name is taken or invalid.
        """
        if name in self.branch_ends:
            raise UserError(
                f"a branch called {name} already exists",
                hint=f"/switch {name} goes there; or choose another name",
            )
        if not BRANCH_PATTERN.fullmatch(name) or name.isdigit():
            raise UserError(
                f"{name!r} is not a valid branch name",
                hint="use letters, digits and . _ - (at most 40, not only digits)",
            )
        self.branch_ends[name] = self.current_turn
        self.current_branch = name

    def switch_to(self, target: str) -> None:
        """Move to the end of a branch, or to a turn by its number.

        Raises UserError if there is no such branch or turn.
        """
        if target in self.branch_ends:
            self.current_branch, self.current_turn = target, self.branch_ends[target]
            return
        if (
            not target.isascii()
            or not target.isdigit()
            or len(target) > 9
            or int(target) > len(self.turns)
        ):
            branches = ", ".join(self.branch_ends)
            turn_range = f", and turns from 0 to {len(self.turns)}" if self.turns else ""
            raise UserError(
                f"no branch or turn called {target!r}",
                hint=f"the branches are {branches}{turn_range}; /tree shows them",
            )
        self.current_turn = int(target)
        if not self.current_branch or self.branch_ends[self.current_branch] != self.current_turn:
            self.current_branch = next(
                (name for name, end in self.branch_ends.items() if end == self.current_turn), ""
            )
