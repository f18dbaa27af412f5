"""A conversation as a tree: whatever was asked at a place is a turn of its own, and none is thrown
away.

It knows nothing of models, screens and disks. Turns are numbered from 1 in the order in which they
were held; 0 is the beginning, before all of them.
"""

import re
from dataclasses import dataclass, field

from llmcli.errors import UserError

MAIN = "main"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}")


@dataclass(frozen=True, slots=True)
class Turn:
    """A question and its answer, after the turn `parent`. `cut`: it was stopped half way; `tokens`:
    how many the answer has, 0 where nobody counted.
    """

    parent: int
    question: str
    answer: str
    cut: bool = False
    tokens: int = 0


@dataclass(slots=True)
class Tree:
    """All turns, and where the conversation is.

    `at` is the turn it ends with. `names` are the branches and the turns they end with; `branch` is
    the one that grows with the conversation and ends where it does, "" where none does. `left` are
    turns that the model is not shown any more.
    """

    turns: list[Turn] = field(default_factory=list)
    at: int = 0
    names: dict[str, int] = field(default_factory=lambda: {MAIN: 0})
    branch: str = MAIN
    left: set[int] = field(default_factory=set)

    def __getitem__(self, number: int) -> Turn:
        """The turn of that number."""
        assert 0 < number <= len(self.turns), number
        return self.turns[number - 1]

    def path(self) -> list[int]:
        """The numbers of the conversation's turns, the first one first."""
        found, number = [], self.at
        while number:
            found.append(number)
            number = self[number].parent
        return found[::-1]

    def kept(self) -> list[int]:
        """Those of the path that have not left the context."""
        return [number for number in self.path() if number not in self.left]

    def children(self) -> list[list[int]]:
        """For every number the turns that follow it at once; those of 0 are first questions."""
        found: list[list[int]] = [[] for _ in range(len(self.turns) + 1)]
        for number, turn in enumerate(self.turns, 1):
            found[turn.parent].append(number)
        return found

    def tips(self) -> list[int]:
        """The turns that nothing follows."""
        return [number for number, after in enumerate(self.children()) if number and not after]

    def add(self, question: str, answer: str, *, cut: bool = False, tokens: int = 0) -> int:
        """Put a turn behind the last one and go there; its number."""
        self.turns.append(Turn(self.at, question, answer, cut, tokens))
        self.move(len(self.turns))
        return self.at

    def move(self, number: int) -> None:
        """Let the conversation end with turn `number`, and the branch that grows with it."""
        assert 0 <= number <= len(self.turns), number
        self.at = number
        if self.branch:
            self.names[self.branch] = number

    def fork(self, name: str) -> None:
        """Begin a branch here; the one before ends here. Raises UserError for a name that is taken
        or is none.
        """
        if name in self.names:
            raise UserError(
                f"there is a branch called {name}",
                hint=f"/switch {name} goes there; or take another name",
            )
        if not NAME.fullmatch(name) or name.isdigit():
            raise UserError(
                f"{name!r} cannot name a branch",
                hint="use letters, digits and . _ - (at most 40, not only digits)",
            )
        self.names[name] = self.at
        self.branch = name

    def switch(self, place: str) -> None:
        """Go to the end of a branch, or to a turn by its number. Raises UserError where there is no
        such place.
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
            known = ", ".join(self.names)
            last = f", and turns from 0 to {len(self.turns)}" if self.turns else ""
            raise UserError(
                f"there is no branch or turn {place!r}",
                hint=f"there are: {known}{last}; /tree shows them",
            )
        self.at = int(place)
        if not self.branch or self.names[self.branch] != self.at:
            self.branch = next((name for name, end in self.names.items() if end == self.at), "")
