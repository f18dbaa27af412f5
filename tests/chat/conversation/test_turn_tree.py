"""The tree of turns behaves like a dictionary of whole conversations."""

import random

import pytest

from llmcli.chat.conversation.conversation import Conversation
from llmcli.chat.conversation.turn_tree import MAIN_BRANCH, TurnTree
from llmcli.chat.display import tree_drawing
from llmcli.errors import UserError
from llmcli.runtime.sampling import default_sampling
from llmcli.types import Message


class Reference:
    """Every turn as the whole conversation up to it; branches by name."""

    def __init__(self) -> None:
        self.said: list[tuple[str, ...]] = [()]
        self.names, self.branch, self.now = {MAIN_BRANCH: 0}, MAIN_BRANCH, 0

    def go(self, number: int) -> None:
        self.now = number
        if self.branch:
            self.names[self.branch] = number

    def add(self, text: str) -> None:
        self.said.append((*self.said[self.now], text))
        self.go(len(self.said) - 1)

    def undo(self) -> str | None:
        if not self.now:
            return None
        *before, last = self.said[self.now]
        # The turn before the last: the newest of those conversations from which this one was made.
        self.go(next(n for n in range(self.now - 1, -1, -1) if self.said[n] == tuple(before)))
        return last

    def switch(self, place: str) -> None:
        if place in self.names:
            self.branch, self.now = place, self.names[place]
            return
        self.now = int(place)
        if self.names.get(self.branch) != self.now:
            self.branch = next((name for name, end in self.names.items() if end == self.now), "")


@pytest.mark.parametrize("seed", range(40))
def test_any_mix_of_moves_is_as_on_whole_conversations(seed: int) -> None:
    rng = random.Random(seed)
    session, reference = Conversation(default_sampling()), Reference()
    for step in range(60):
        tree = session.tree
        match rng.choice(("add", "add", "add", "undo", "fork", "switch", "number", "wrong")):
            case "add":
                session.add_turn(f"q{step}", f"a{step}", rng.choice(("stop", "cancelled")))
                reference.add(f"q{step}")
            case "undo":
                assert session.undo_turn() == reference.undo()
            case "fork":
                tree.create_branch(f"b{step}")
                reference.names[f"b{step}"] = reference.now
                reference.branch = f"b{step}"
            case "switch":
                name = rng.choice(sorted(reference.names))
                tree.switch_to(name)
                reference.switch(name)
            case "number":
                number = str(rng.randrange(len(reference.said)))
                tree.switch_to(number)
                reference.switch(number)
            case "wrong":
                before = repr(tree)
                for word in (str(len(reference.said)), "-1", "b", "", "1 ", "٣"):
                    with pytest.raises(UserError):
                        tree.switch_to(word)
                for word in (MAIN_BRANCH, "7", "", "a b", ".x", "x" * 41, "\x1b"):
                    with pytest.raises(UserError):
                        tree.create_branch(word)
                assert repr(tree) == before
        said = reference.said[reference.now]
        assert [m.content for m in session.messages[::2]] == list(said)
        assert [m.content for m in session.messages[1::2]] == [f"a{text[1:]}" for text in said]
        assert (tree.current_turn, tree.current_branch, tree.branch_ends) == (
            reference.now,
            reference.branch,
            reference.names,
        )
        assert not tree.current_branch or tree.branch_ends[tree.current_branch] == tree.current_turn
        drawn = tree_drawing.tree_rows(tree)
        assert sorted(int(row[0].split()[-1]) for row in drawn) == list(
            range(1, len(reference.said))
        )
        assert sum("●" in row[0] for row in drawn) == len(said)


def test_undo_gives_back_the_question_and_keeps_the_turn() -> None:
    session = Conversation(default_sampling())
    session.add_turn("one", "1", "stop")
    session.add_turn("two", "2", "cancelled")
    assert session.stopped_indices == {3}
    assert session.undo_turn() == "two"
    assert session.messages == [Message("user", "one"), Message("assistant", "1")]
    assert session.stopped_indices == set()
    session.tree.switch_to("2")
    assert session.stopped_indices == {3}


def test_messages_are_a_copy() -> None:
    session = Conversation(default_sampling())
    session.add_turn("one", "1", "stop")
    session.messages.clear()
    assert len(session.messages) == 2


def test_the_picture_parts_where_the_conversation_did_and_goes_on_straight_elsewhere() -> None:
    tree = TurnTree()
    tree.add_turn("first", "one")
    tree.add_turn("second", "two\x1b[2J", is_stopped=True, n_tokens=5)
    tree.add_turn("third", "three")
    tree.move_to(1)
    tree.create_branch("other")
    tree.add_turn("x" * 30, "y", n_tokens=7)
    tree.add_turn("last", "z\nz")
    tree.move_to(0)
    tree.add_turn("anew", "n")
    tree.switch_to("3")
    assert tree_drawing.tree_rows(tree) == [
        ("├─● 1", "first", "one", "-", "main"),
        ("│ ├─● 2", "second", "two␛[2J", "5", "cut"),
        ("│ │ ● 3", "third", "three", "-", "<- here"),
        ("│ └─○ 4", "x" * 23 + "…", "y", "7", ""),
        ("│   ○ 5", "last", "z␊z", "-", ""),
        ("└─○ 6", "anew", "n", "-", "other"),
    ]


def test_a_long_conversation_is_drawn_without_a_step_to_the_right() -> None:
    tree = TurnTree()
    for number in range(3000):
        tree.add_turn(f"{number}", "a")
    assert {row[0].split()[0] for row in tree_drawing.tree_rows(tree)} == {"●"}
