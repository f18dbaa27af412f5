"""The turns of a conversation as a tree. A question that is asked again or in other words becomes
another child of the same turn, so that no turn is ever deleted.

Turns are numbered from 1 in the order of their creation. 0 is the root, which is not a turn.
"""

import itertools
import re
from dataclasses import dataclass, field

from llmcli.chat.conversation.tool_steps import ToolStep
from llmcli.errors import UserError
from llmcli.types import Finish

MAIN_BRANCH = "main"
STOPPED: tuple[Finish, ...] = ("cancelled", "failed")  # ends of answers that were stopped
BRANCH_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}")


@dataclass(frozen=True, slots=True)
class Turn:
    """A question and its answer. `parent`: number of the turn before it, 0 for none. `is_stopped`:
    the user or an error ended the answer. `n_tokens`: number of tokens of the answer, 0 if unknown.
    `steps`: the calls of tools before the answer.
    """

    parent: int
    question: str
    answer: str
    is_stopped: bool = False
    n_tokens: int = 0
    steps: tuple[ToolStep, ...] = ()


@dataclass(slots=True)
class TurnTree:
    """All turns, and the current turn, after which the next question is asked. The turns from the
    root to the current turn are the conversation.

    - `turns`: turn number n is `turns[n - 1]`.
    - `current_turn`: its number; 0 if the conversation is empty.
    - `branch_ends`: the number of the last turn of each branch, by name.
    - `current_branch`: the branch to which new turns are added; "" for none.
    - `dropped`: numbers of turns that are not sent to the model any more.
    """

    turns: list[Turn] = field(default_factory=list)
    current_turn: int = 0
    branch_ends: dict[str, int] = field(default_factory=lambda: {MAIN_BRANCH: 0})
    current_branch: str = MAIN_BRANCH
    dropped: set[int] = field(default_factory=set)

    def __getitem__(self, number: int) -> Turn:
        """Return turn `number`, from 1."""
        assert 0 < number <= len(self.turns), number
        return self.turns[number - 1]

    def current_path(self) -> list[int]:
        """Return the numbers of the turns from the root to the current turn."""
        numbers, number = [], self.current_turn
        while number:
            numbers.append(number)
            number = self[number].parent
        return numbers[::-1]

    def sent_turns(self) -> list[int]:
        """Return the numbers of the turns of the conversation that are sent to the model: the
        current path without dropped turns.
        """
        return [number for number in self.current_path() if number not in self.dropped]

    def follower_lists(self) -> list[list[int]]:
        """Return a list whose entry n contains the numbers of the children of turn n. Entry 0
        contains the turns without a parent.
        """
        followers: list[list[int]] = [[] for _ in range(len(self.turns) + 1)]
        for number, turn in enumerate(self.turns, 1):
            followers[turn.parent].append(number)
        return followers

    def leaf_turns(self) -> list[int]:
        """Return the numbers of the turns without children."""
        return [
            number
            for number, followers in enumerate(self.follower_lists())
            if number and not followers
        ]

    def add_turn(
        self,
        question: str,
        answer: str,
        *,
        is_stopped: bool = False,
        n_tokens: int = 0,
        steps: tuple[ToolStep, ...] = (),
    ) -> int:
        """Add a turn after the current one and make it the current turn. Return its number."""
        self.turns.append(Turn(self.current_turn, question, answer, is_stopped, n_tokens, steps))
        self.move_to(len(self.turns))
        return self.current_turn

    def move_to(self, number: int) -> None:
        """Make turn `number` the current turn and the last turn of the current branch."""
        assert 0 <= number <= len(self.turns), number
        self.current_turn = number
        if self.current_branch:
            self.branch_ends[self.current_branch] = number

    def start_branch(self, number: int, stem: str) -> str:
        """Make turn `number` the current turn, on a new branch, so that the current branch keeps
        its turns. Return the name of the new branch: `stem` and the first free number.
        """
        name = next(
            name for n in itertools.count(1) if (name := f"{stem}-{n}") not in self.branch_ends
        )
        self.current_turn = number
        self.create_branch(name)
        return name

    def create_branch(self, name: str) -> None:
        """Start a branch at the current turn and make it the current branch. Raises UserError if
        the name is already used or is invalid.
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
        """Make the last turn of the branch `target`, or the turn with the number `target`, the
        current turn. After a number, the current branch is a branch that ends at this turn, or
        none. Raises UserError if there is no such branch or turn.
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
