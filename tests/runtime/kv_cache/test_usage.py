"""Who holds what in the cache, counted from the ledger's books."""

from llmcli.runtime.kv_cache.ledger import Ledger
from llmcli.runtime.kv_cache.usage import Held, Node, census
from tests.fixtures.fakes import FakeContext


def ledger(*texts: tuple[list[int], int | None]) -> Ledger:
    """Slots that hold texts; a number is the slot whose cells are shared as far as the texts are
    alike.
    """
    memory = FakeContext(n_ctx=256, n_seq_max=8)
    made = Ledger(memory)
    for text, source in texts:
        slot = made.claim()
        if source is not None:
            made.fork(source, slot)
            made.trim(
                slot,
                next(
                    (
                        i
                        for i, (a, b) in enumerate(zip(text, made.tokens[slot], strict=False))
                        if a != b
                    ),
                    min(len(text), len(made.tokens[slot])),
                ),
            )
        for token in text[len(made.tokens[slot]) :]:
            memory.put(slot, token)
            made.append(slot, [token])
        made.release(slot)
    made.check()
    return made


def test_cells_are_counted_once_and_texts_that_begin_alike_make_a_tree():
    books = ledger(([1, 2, 3, 4], None), ([1, 2, 9], 0), ([7, 7], None), ([1, 2, 3, 4, 5], 0))
    books._busy[1] = True
    found = census(books)
    assert found.held == (
        Held(0, False, 4, 4, 4), Held(3, False, 5, 4, 1), Held(1, True, 3, 2, 1), Held(2, False, 2, 0, 2),
    )  # fmt: skip
    assert sum(one.own for one in found.held) == books.used
    below = Node(2, [0, 3], [Node(1, [3])])
    assert found.prefixes == (Node(2, [0, 3, 1], [below, Node(1, [1])]), Node(2, [2]))


def test_equal_texts_in_cells_of_their_own_share_a_node_and_no_cell():
    found = census(ledger(([5, 6], None), ([5, 6], None)))
    assert [one.shared for one in found.held] == [0, 0]
    assert found.prefixes == (Node(2, [0, 1]),)


def test_an_empty_cache_holds_nothing():
    found = census(ledger())
    assert found.held == () and found.prefixes == ()


def test_the_tree_is_as_deep_as_texts_part():
    found = census(
        ledger(([1, 2, 3, 4, 5, 6], None), ([1, 2, 3, 4, 8], 0), ([1, 2, 9], 0), ([3], None))
    )
    lower = Node(2, [0, 1], [Node(2, [0]), Node(1, [1])])
    assert found.prefixes == (Node(2, [0, 1, 2], [lower, Node(1, [2])]), Node(1, [3]))
