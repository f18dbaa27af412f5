"""Cells in use by each sequence, counted from the ledger."""

from llmcli.runtime.kv_cache.ledger import Ledger
from llmcli.runtime.kv_cache.usage import PrefixNode, SequenceUsage, measure_cache_usage
from tests.fixtures.fakes import FakeContext


def ledger(*texts: tuple[list[int], int | None]) -> Ledger:
    """Slots that hold texts; a number is the slot whose cells are shared as far as the texts are
    alike.
    """
    memory = FakeContext(n_ctx=256, n_seq_max=8)
    made = Ledger(memory)
    for text, source in texts:
        slot = made.claim_slot()
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
            memory.set_token(slot, token)
            made.append(slot, [token])
        made.release(slot)
    made.check()
    return made


def test_cells_are_counted_once_and_texts_that_begin_alike_make_a_tree():
    books = ledger(([1, 2, 3, 4], None), ([1, 2, 9], 0), ([7, 7], None), ([1, 2, 3, 4, 5], 0))
    books._slots.claim(1, "")
    found = measure_cache_usage(books)
    assert found.sequences == (
        SequenceUsage(0, False, 4, 4, 4), SequenceUsage(3, False, 5, 4, 1), SequenceUsage(1, True, 3, 2, 1), SequenceUsage(2, False, 2, 0, 2),
    )  # fmt: skip
    assert sum(one.exclusive_cells for one in found.sequences) == books.used_cells
    below = PrefixNode(2, [0, 3], [PrefixNode(1, [3])])
    assert found.prefixes == (
        PrefixNode(2, [0, 3, 1], [below, PrefixNode(1, [1])]),
        PrefixNode(2, [2]),
    )


def test_equal_texts_in_cells_of_their_own_share_a_node_and_no_cell():
    found = measure_cache_usage(ledger(([5, 6], None), ([5, 6], None)))
    assert [one.shared_cells for one in found.sequences] == [0, 0]
    assert found.prefixes == (PrefixNode(2, [0, 1]),)


def test_an_empty_cache_holds_nothing():
    found = measure_cache_usage(ledger())
    assert found.sequences == () and found.prefixes == ()


def test_the_tree_is_as_deep_as_texts_part():
    found = measure_cache_usage(
        ledger(([1, 2, 3, 4, 5, 6], None), ([1, 2, 3, 4, 8], 0), ([1, 2, 9], 0), ([3], None))
    )
    lower = PrefixNode(2, [0, 1], [PrefixNode(2, [0]), PrefixNode(1, [1])])
    assert found.prefixes == (
        PrefixNode(2, [0, 1, 2], [lower, PrefixNode(1, [2])]),
        PrefixNode(1, [3]),
    )
