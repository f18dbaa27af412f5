"""The measured use of the cache: cells of each slot, and the tree of common prefixes."""

from llmcli.runtime.kv_cache.ledger import Ledger
from llmcli.runtime.kv_cache.usage import PrefixNode, SequenceUsage, measure_cache_usage
from tests.fixtures.fakes import FakeContext


def make_ledger(*texts: tuple[list[int], int | None]) -> Ledger:
    """Return a ledger whose idle slots hold these texts. A number next to a text is a slot with
    which it shares the cells of the common prefix.
    """
    memory = FakeContext(n_ctx=256, n_seq_max=8)
    ledger = Ledger(memory)
    for text, source in texts:
        slot = ledger.claim_slot()
        if source is not None:
            ledger.fork(source, slot)
            ledger.trim(
                slot,
                next(
                    (
                        i
                        for i, (a, b) in enumerate(zip(text, ledger.tokens[slot], strict=False))
                        if a != b
                    ),
                    min(len(text), len(ledger.tokens[slot])),
                ),
            )
        for token in text[len(ledger.tokens[slot]) :]:
            memory.set_token(slot, token)
            ledger.append(slot, [token])
        ledger.release(slot)
    ledger.check()
    return ledger


def test_shared_cells_are_counted_once_and_common_prefixes_form_a_tree():
    ledger = make_ledger(([1, 2, 3, 4], None), ([1, 2, 9], 0), ([7, 7], None), ([1, 2, 3, 4, 5], 0))
    ledger._slots.claim(1, "")
    found = measure_cache_usage(ledger)
    assert found.sequences == (
        SequenceUsage(0, False, 4, 4, 4), SequenceUsage(3, False, 5, 4, 1), SequenceUsage(1, True, 3, 2, 1), SequenceUsage(2, False, 2, 0, 2),
    )  # fmt: skip
    assert sum(sequence.exclusive_cells for sequence in found.sequences) == ledger.used_cells
    child = PrefixNode(2, [0, 3], [PrefixNode(1, [3])])
    assert found.prefixes == (
        PrefixNode(2, [0, 3, 1], [child, PrefixNode(1, [1])]),
        PrefixNode(2, [2]),
    )


def test_equal_texts_in_separate_cells_share_a_node_but_no_cell():
    found = measure_cache_usage(make_ledger(([5, 6], None), ([5, 6], None)))
    assert [sequence.shared_cells for sequence in found.sequences] == [0, 0]
    assert found.prefixes == (PrefixNode(2, [0, 1]),)


def test_an_empty_cache_has_no_sequences_and_no_prefixes():
    found = measure_cache_usage(make_ledger())
    assert found.sequences == () and found.prefixes == ()


def test_nested_common_prefixes_are_nested_nodes():
    found = measure_cache_usage(
        make_ledger(([1, 2, 3, 4, 5, 6], None), ([1, 2, 3, 4, 8], 0), ([1, 2, 9], 0), ([3], None))
    )
    child = PrefixNode(2, [0, 1], [PrefixNode(2, [0]), PrefixNode(1, [1])])
    assert found.prefixes == (
        PrefixNode(2, [0, 1, 2], [child, PrefixNode(1, [2])]),
        PrefixNode(1, [3]),
    )
