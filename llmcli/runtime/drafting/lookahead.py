"""Lookahead decoding: the model's own parallel predictions are the guesses of later passes, and a
pool remembers which tokens followed which.

A pass over guesses also predicts what follows each of them, even after a wrong one. So a window of
guesses is carried along, whose tokens the predictions of each pass replace (a Jacobi iteration). The
tokens that a pass predicts after one, two or three others go to the pool of n-grams, from which the
guesses for the text are taken.

With trees, the window has COLUMNS places in the text and LEVELS guesses for each, those of one more
pass at each level. A row at a place attends to the first guesses of the places before it and to the
guesses of lower levels at its own place, so the window is a tree of tokens: a path with the guesses
of level 0, from whose nodes one path for each place branches off. Paths from the pool begin at the
text beside it. Without trees, the draft is a single path from the pool, filled up with the
predictions of the last pass.

The method needs no second model and no repetitions in the text, but its guesses are rarely right at
first: it saves time only where many rows cost hardly more than one, as on GPUs. It is used only if
--draft names it.

Source: Fu et al. 2024, Break the Sequential Dependency of LLM Inference Using Lookahead Decoding;
llama.cpp, examples/lookahead/lookahead.cpp. Here, a right guess of the window is kept, too, and the
window moves by one place in a pass, however many guesses were right.
"""

from collections.abc import Sequence as Rows
from typing import ClassVar

from llmcli.runtime.drafting.base import Draft, DrafterResources
from llmcli.runtime.drafting.gain.acceptance import Acceptance
from llmcli.runtime.drafting.gain.tree_shape import ShapeLimits, TreeShape, chain_shape
from llmcli.runtime.requests.request import Request
from llmcli.runtime.requests.sequence import Sequence
from llmcli.runtime.requests.token_tree import TEXT, TokenTree
from llmcli.runtime.sampling.chain import RowLogits

COLUMNS, LEVELS = 4, 3  # of the window
WINDOW_NODES = COLUMNS - 1 + COLUMNS * (LEVELS - 1)
WINDOW_DEPTHS = COLUMNS - 1 + LEVELS - 1
POOL_PATHS, POOL_DEPTHS = 3, 3  # paths from the pool in a tree, and their length at most
FIRST_CHANCE = 0.5  # chance of a guess before any guess was checked
MAX_POOL_ENTRIES = 1 << 16  # the oldest are dropped
MAX_CONTINUATIONS = 3  # of an entry


class LookaheadDrafter:
    """The drafter. Its statistics are those of all answers."""

    name: ClassVar[str] = "lookahead"
    order: ClassVar[int] = 30
    draws: ClassVar[bool] = False
    failure: ClassVar[None] = None

    def __init__(self) -> None:
        self.acceptance = Acceptance(FIRST_CHANCE)

    @classmethod
    def create(cls, resources: DrafterResources) -> "LookaheadDrafter | None":
        """Create the drafter. Return None when it is not requested."""
        return cls() if resources.uses_lookahead else None

    def start(self, request: Request, seed: int) -> "LookaheadDrafts":
        """Return the state for a new answer."""
        return LookaheadDrafts(self.acceptance)


class LookaheadDrafts:
    """The guesses of one answer: the window, and the pool of n-grams.

    - `levels`: `[LEVELS][COLUMNS]` tokens. The first one of level 0 is not used: that place has the
      last token of the text.
    - `predictions`: those of the last pass after its right guesses, if the draft was a single path.
    - `pool`: for the last one or two tokens those that followed them, the newest last. The oldest
      entries come first.
    """

    def __init__(self, acceptance: Acceptance) -> None:
        self.acceptance = acceptance
        self.tokens: list[int] = []
        self.levels: list[list[int]] = []
        self.predictions: list[int] = []
        self.pool: dict[tuple[int, ...], list[int]] = {}
        self.tree = TokenTree()  # the next draft

    def follow(self, sequence: Sequence) -> None:
        self.tokens = sequence.tokens
        self.acceptance.forget()
        if not self.levels:  # the text itself is as good a start as any
            first = [self.tokens[-1 - at % len(self.tokens)] for at in range(COLUMNS + LEVELS)]
            self.levels = [first[level : level + COLUMNS] for level in range(LEVELS)]

    def on_context_shift(self) -> None:
        """Do nothing: only the last tokens matter."""

    def observe_rows(
        self, last_token: int, tree: TokenTree, rows: Rows[RowLogits], path: Rows[int]
    ) -> None:
        """Read the predictions of a pass (see RowObserver)."""
        predictions = [int(row.logits.argmax()) for row in rows]
        after = {node: predictions[node + 1] for node in range(TEXT, len(tree))}
        tokens = {TEXT: last_token, **dict(enumerate(tree.tokens))}
        for node, parent in enumerate(tree.parents):
            self._remember((tokens[parent], tokens[node]), after[node])
            self._remember((tokens[node],), after[node])
        self._remember((last_token,), after[TEXT])
        if tree.is_chain:
            self.predictions = predictions[len(path) + 1 :]
        else:
            self._advance(tree, after)

    def _advance(self, tree: TokenTree, after: dict[int, int]) -> None:
        """Replace the lowest level of the window by the predictions after the highest one. `after`:
        the predictions by node.
        """
        predicted = list(self.levels[-1])
        for column in range(COLUMNS):
            path: list[int] = []
            if tree.follow(path, self._column(column)):
                predicted[column] = after[path[-1]]
        self.levels = [*self.levels[1:], predicted]

    def _column(self, column: int) -> list[int]:
        """Return the path of the window that ends with the guesses of a column."""
        return [*self.levels[0][1 : column + 1], *(level[column] for level in self.levels[1:])]

    def _remember(self, key: tuple[int, ...], token: int) -> None:
        """Add an n-gram to the pool as its newest entry."""
        found = [other for other in self.pool.pop(key, []) if other != token]
        self.pool[key] = [*found[1 - MAX_CONTINUATIONS :], token]
        if len(self.pool) > MAX_POOL_ENTRIES:
            del self.pool[next(iter(self.pool))]

    def _continue(self, guesses: list[int], count: int) -> list[int]:
        """Return `guesses` with the newest tokens of the pool after them, `count` at most."""
        while len(guesses) < count:
            found = self._find([*self.tokens[-2:], *guesses])
            if not found:
                break
            guesses = [*guesses, found[-1]]
        return guesses[:count]

    def _find(self, text: list[int]) -> list[int]:
        """Return the tokens that followed the end of a text, the newest last."""
        return self.pool.get(tuple(text[-2:])) or self.pool.get(tuple(text[-1:])) or []

    def _guess_path(self, count: int) -> list[int]:
        """Return a single path of `count` guesses."""
        guesses = self._continue([], count)
        guesses += self.predictions[len(guesses) :]
        while len(guesses) < count:
            guesses.append(self.tokens[-1 - len(guesses) % len(self.tokens)])
        return guesses[:count]

    def _grow_tree(self, limits: ShapeLimits) -> TokenTree:
        """Return the window with as many paths from the pool before it as there is room for."""
        firsts = self._find(self.tokens[-2:])[::-1][: min(POOL_PATHS, limits.n_branches - COLUMNS)]
        n_depths, n_nodes = min(POOL_DEPTHS, limits.n_depths), limits.n_nodes - WINDOW_NODES
        paths = [self._continue([first], n_depths) for first in firsts]
        tree = TokenTree.merge(paths).shorten(n_nodes)
        for column in range(COLUMNS):
            tree = tree.add_path(self._column(column))
        return tree

    def shape(self, limits: ShapeLimits) -> TreeShape:
        if not self.tokens:
            return TreeShape()
        has_room = limits.n_nodes > WINDOW_NODES and limits.n_branches > COLUMNS
        if not has_room or limits.n_depths < WINDOW_DEPTHS:
            count = limits.chain_length
            self.tree = TokenTree.chain(self._guess_path(count))
            return chain_shape([best for (best,) in self.acceptance.chances(count)])
        self.tree = tree = self._grow_tree(limits)
        main_path = tree.main_path()
        chances, product = [0.0] * len(tree), 1.0
        for node, (chance,) in zip(main_path, self.acceptance.chances(len(main_path)), strict=True):
            product *= chance
            chances[node] = product
        return TreeShape((0,) * len(tree), tree.parents, tuple(chances), len(tree))

    def cost_seconds(self, n_depths: int) -> float:
        return 0.0

    def reading_seconds(self) -> float:
        return 0.0

    def draft(self, shape: TreeShape) -> Draft:
        """Return the guesses that `shape()` has planned."""
        tree = self.tree.shorten(len(shape))
        return Draft(tree, candidates=[(tree.tokens[node],) for node in tree.main_path()])

    def record_result(self, draft: Draft, tokens: Rows[int]) -> None:
        self.acceptance.record(draft.candidates, tokens)

    def close(self, tokens: Rows[int]) -> None:
        """Do nothing, because there are no resources to free."""


DRAFTERS = (LookaheadDrafter,)
