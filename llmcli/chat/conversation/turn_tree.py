"""A conversation as a tree: every question creates a new turn, and no turn is deleted.

Turns are numbered from 1 in the order of their creation; 0 is the root, before all turns.
"""

import re
from dataclasses import dataclass, field

from llmcli.errors import UserError

MAIN = "main"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}")


@dataclass(frozen=True, slots=True)
class Turn:
    """A question and its answer, after the turn `parent`.

    `cut`: the answer was stopped. `tokens`: the answer's token count, 0 if unknown.
    """

    parent: int
    question: str
    answer: str
    cut: bool = False
    tokens: int = 0


@dataclass(slots=True)
class Tree:
    """All turns, and the position of the conversation.

    - `at`: the conversation's last turn.
    - `names`: the branches and their last turns.
    - `branch`: the branch that grows with the conversation; "" for none.
    - `left`: turns that are no longer sent to the model.
    """

    turns: list[Turn] = field(default_factory=list)
    at: int = 0
    names: dict[str, int] = field(default_factory=lambda: {MAIN: 0})
    branch: str = MAIN
    left: set[int] = field(default_factory=set)

    def __getitem__(self, number: int) -> Turn:
        """Return the turn with this number."""
        assert 0 < number <= len(self.turns), number
        return self.turns[number - 1]

    def path(self) -> list[int]:
        """Return the numbers of the conversation's turns in order."""
        numbers, number = [], self.at
        while number:
            numbers.append(number)
            number = self[number].parent
        return numbers[::-1]

    def kept(self) -> list[int]:
        """Return the turns of the path that are still sent to the model."""
        return [number for number in self.path() if number not in self.left]

    def children(self) -> list[list[int]]:
        """Return, for each turn number, the turns that follow it; entry 0 lists the first
        questions.
        """
        followers: list[list[int]] = [[] for _ in range(len(self.turns) + 1)]
        for number, turn in enumerate(self.turns, 1):
            followers[turn.parent].append(number)
        return followers

    def tips(self) -> list[int]:
        """Return the turns without followers."""
        return [
            number for number, followers in enumerate(self.children()) if number and not followers
        ]

    def add(self, question: str, answer: str, *, cut: bool = False, tokens: int = 0) -> int:
        """Append a turn at the current position and move to it; return its number."""
        self.turns.append(Turn(self.at, question, answer, cut, tokens))
        self.move(len(self.turns))
        return self.at

    def move(self, number: int) -> None:
        """Make turn `number` the last one of the conversation and of its branch."""
        assert 0 <= number <= len(self.turns), number
        self.at = number
        if self.branch:
            self.names[self.branch] = number

    def fork(self, name: str) -> None:
        """Begin a branch at the current turn; the previous branch ends here.

        Raises UserError if the name is taken or invalid.
        """
        if name in self.names:
            raise UserError(
                f"a branch called {name} already exists",
                hint=f"/switch {name} goes there; or choose another name",
            )
        if not NAME.fullmatch(name) or name.isdigit():
            raise UserError(
                f"{name!r} is not a valid branch name",
                hint="use letters, digits and . _ - (at most 40, not only digits)",
            )
        self.names[name] = self.at
        self.branch = name

    def switch(self, place: str) -> None:
        """Move to the end of a branch, or to a turn by its number.

        Raises UserError if there is no such branch or turn.
        """
        if place in self.names:
            self.branch, self.at = place, self.names[place]
            return
        if (
            not place.isascii()
            or not place.isdigit()
            or len(place) > 9
            or int(place) > len(self.turns)
        ):
            branches = ", ".join(self.names)
            turn_range = f", and turns from 0 to {len(self.turns)}" if self.turns else ""
            raise UserError(
                f"no branch or turn called {place!r}",
                hint=f"the branches are {branches}{turn_range}; /tree shows them",
            )
        self.at = int(place)
        if not self.branch or self.names[self.branch] != self.at:
            self.branch = next((name for name, end in self.names.items() if end == self.at), "")
