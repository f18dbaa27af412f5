"""TurnTree, compared with a simple reference, and its drawing."""

import random

import pytest

from llmcli.chat.conversation.conversation import Conversation
from llmcli.chat.conversation.turn_tree import MAIN_BRANCH, TurnTree
from llmcli.chat.display import tree_drawing
from llmcli.errors import UserError
from llmcli.runtime.sampling import default_sampling
from llmcli.types import Message


class Reference:
    """A simple implementation: stores for each turn the list of all questions up to it.

    `paths`: these lists by turn number. `branch_ends`, `branch`, `current`: as in TurnTree.
    """

    def __init__(self) -> None:
        self.paths: list[tuple[str, ...]] = [()]
        self.branch_ends, self.branch, self.current = {MAIN_BRANCH: 0}, MAIN_BRANCH, 0

    def move_to(self, number: int) -> None:
        self.current = number
        if self.branch:
            self.branch_ends[self.branch] = number

    def add(self, text: str) -> None:
        self.paths.append((*self.paths[self.current], text))
        self.move_to(len(self.paths) - 1)

    def undo(self) -> str | None:
        if not self.current:
            return None
        *before, last = self.paths[self.current]
        # The parent is the newest earlier turn whose path is this path without its last question.
        self.move_to(
            next(n for n in range(self.current - 1, -1, -1) if self.paths[n] == tuple(before))
        )
        return last

    def switch(self, target: str) -> None:
        if target in self.branch_ends:
            self.branch, self.current = target, self.branch_ends[target]
            return
        self.current = int(target)
        if self.branch_ends.get(self.branch) != self.current:
            self.branch = next(
                (name for name, end in self.branch_ends.items() if end == self.current), ""
            )


@pytest.mark.parametrize("seed", range(40))
def test_random_moves_have_the_same_result_as_on_the_reference(seed: int) -> None:
    rng = random.Random(seed)
    conversation, reference = Conversation(default_sampling()), Reference()
    for step in range(60):
        tree = conversation.tree
        match rng.choice(("add", "add", "add", "undo", "fork", "switch", "number", "wrong")):
            case "add":
                conversation.add_turn(f"q{step}", f"a{step}", rng.choice(("stop", "cancelled")))
                reference.add(f"q{step}")
            case "undo":
                assert conversation.undo_turn() == reference.undo()
            case "fork":
                tree.create_branch(f"b{step}")
                reference.branch_ends[f"b{step}"] = reference.current
                reference.branch = f"b{step}"
            case "switch":
                name = rng.choice(sorted(reference.branch_ends))
                tree.switch_to(name)
                reference.switch(name)
            case "number":
                number = str(rng.randrange(len(reference.paths)))
                tree.switch_to(number)
                reference.switch(number)
            case "wrong":
                before = repr(tree)
                for word in (str(len(reference.paths)), "-1", "b", "", "1 ", "٣"):
                    with pytest.raises(UserError):
                        tree.switch_to(word)
                for word in (MAIN_BRANCH, "7", "", "a b", ".x", "x" * 41, "\x1b"):
                    with pytest.raises(UserError):
                        tree.create_branch(word)
                assert repr(tree) == before
        questions = reference.paths[reference.current]
        assert [m.content for m in conversation.messages[::2]] == list(questions)
        assert [m.content for m in conversation.messages[1::2]] == [
            f"a{text[1:]}" for text in questions
        ]
        assert (tree.current_turn, tree.current_branch, tree.branch_ends) == (
            reference.current,
            reference.branch,
            reference.branch_ends,
        )
        assert not tree.current_branch or tree.branch_ends[tree.current_branch] == tree.current_turn
        rows = tree_drawing.tree_rows(tree)
        assert sorted(int(row[0].split()[-1]) for row in rows) == list(
            range(1, len(reference.paths))
        )
        assert sum("●" in row[0] for row in rows) == len(questions)


def test_undo_returns_the_question_and_keeps_the_turn() -> None:
    conversation = Conversation(default_sampling())
    conversation.add_turn("one", "1", "stop")
    conversation.add_turn("two", "2", "cancelled")
    assert conversation.stopped_indices == {3}
    assert conversation.undo_turn() == "two"
    assert conversation.messages == [Message("user", "one"), Message("assistant", "1")]
    assert conversation.stopped_indices == set()
    conversation.tree.switch_to("2")
    assert conversation.stopped_indices == {3}


def test_messages_are_a_copy() -> None:
    conversation = Conversation(default_sampling())
    conversation.add_turn("one", "1", "stop")
    conversation.messages.clear()
    assert len(conversation.messages) == 2


def test_only_turns_with_several_children_are_indented() -> None:
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


def test_a_long_conversation_without_branches_is_not_indented() -> None:
    tree = TurnTree()
    for number in range(3000):
        tree.add_turn(f"{number}", "a")
    assert {row[0].split()[0] for row in tree_drawing.tree_rows(tree)} == {"●"}
