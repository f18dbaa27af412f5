#!/usr/bin/env python3
"""Run random batches and sequence operations, many of them invalid, on a real llama.cpp context.

usage: .venv/bin/python scripts/fuzz/context.py MODEL.gguf [--operations 10000] [--seed 0]
       [--streams]

Groups of 100 operations go to the context directly and through the ledger in turn. A slow reference
implementation (cache_reference.py) predicts which operations are legal. Illegal ones must be
refused and change nothing. After legal ones, the positions of every sequence, the tokens and the
number of cells must equal the reference's. Tokens are checked by logits: those of some rows must
equal the logits of a fresh pass over the reference's tokens. The number of cells is checked by
filling the pool: it must take exactly as many rows as the reference has free cells. An abort of
llama.cpp ends this process. The script prints one JSON line of figures. With --streams each
sequence has its own cells, and the ledger, which supports only one pool, is left out.
"""

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

from llmcli.runtime.binding.contexts.context import Aborted, Context, NoSlot
from llmcli.runtime.binding.contexts.context_options import ContextOptions
from llmcli.runtime.binding.contexts.open_context import open_context
from llmcli.runtime.binding.model import open_model
from llmcli.runtime.binding.rows.batch import BatchRows
from llmcli.runtime.kv_cache.common_prefix import common_prefix
from llmcli.runtime.kv_cache.ledger import Ledger
from llmcli.runtime.requests.token_tree import TokenTree
from scripts.fuzz import states
from scripts.fuzz.cache_reference import Reference

SEQUENCES, BATCH, UBATCH, CELLS = 4, 32, 8, 256
BRANCHES = 4  # additional sequences for trees of guesses
OPERATIONS_PER_TURN = 100
MAX_LOGIT_DIFFERENCE = (
    1e-3  # between logits of one token in batches of different shapes, in float32
)


class MirroredContext:
    """The context in the form that the ledger uses. It repeats every operation of the ledger on the
    reference, so that both have the same content.
    """

    def __init__(self, context: Context, reference: Reference) -> None:
        self.context, self.reference = context, reference
        self.branches: dict[int, list[int]] = {}  # tokens that a branch of a tree adds to its text
        self.n_ctx, self.n_seq_max = context.n_ctx, context.n_seq_max
        self.n_swa, self.is_recurrent, self.has_complete_states = (
            context.n_swa,
            context.is_recurrent,
            context.has_complete_states,
        )
        self.needs_checkpoints = context.needs_checkpoints
        assert not self.needs_checkpoints, "the reference cuts sequences anywhere"
        self.first_position, self.last_position, self.can_shift = (
            context.first_position,
            context.last_position,
            context.can_shift,
        )

    def trim(self, sequence: int, keep: int) -> bool:
        self.reference.trim(sequence, keep)
        return self.context.trim(sequence, keep)

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        self.reference.copy(source, target, start, end)
        self.context.copy(source, target, start, end)

    def shift(self, sequence: int, start: int, end: int, last: int) -> None:
        self.reference.shift(sequence, start, end)
        self.context.shift(sequence, start, end, last)

    def keep_branch(self, sequence: int, branch: int, start: int, end: int) -> None:
        self.reference.append_tokens(sequence, start, self.branches[branch][: end - start])
        self.context.keep_branch(sequence, branch, start, end)

    def drop_branches(self) -> None:
        self.context.drop_branches()


class Fuzz:
    """The state of one run, and its operations.

    `context` is tested, and `fresh` computes the expected logits. `counts`: operations by outcome.
    `compared`: number of rows whose logits were compared. `widest`: largest difference of a logit.
    `active_slots`: slots of the ledger with an unfinished answer.
    """

    def __init__(self, context: Context, fresh: Context, seed: int) -> None:
        self.context, self.fresh, self.rng = context, fresh, random.Random(seed)
        self.reference = Reference(context.n_ctx if context.unified else CELLS, not context.unified)
        self.counts: Counter[str] = Counter()
        self.compared, self.widest = 0, 0.0
        self.memory = MirroredContext(context, self.reference)
        self.ledger = Ledger(self.memory)
        self.active_slots: list[int] = []

    # Operations on the context itself.

    def decode(self) -> None:
        """Decode rows that continue their sequences. Sometimes the batch has an error and must be
        refused.
        """
        rows = self._random_rows()
        if self.rng.random() < 0.45:
            self._expect_refusal(lambda: self.context.decode(self._with_error(rows)))
        else:
            self._decode_rows(rows)

    def interrupt(self) -> None:
        """Interrupt a pass before it begins. Rows that it nevertheless left in the cache must be
        removable by `trim`.
        """
        rows = self._random_rows()
        if not self.reference.fits(rows):
            return
        self.context.interrupt()
        try:
            self.context.decode(rows)
            raise SystemExit("an interrupted pass was computed")
        except Aborted:
            for sequence in set(rows.sequences):
                assert self.context.trim(sequence, len(self.reference.tokens_of(sequence)))
        self._count_legal()

    def fill_pool(self) -> None:
        """Decode as many rows as the reference has free cells; then one more must not fit."""
        sequence = self._sequence()
        before = len(self.reference.tokens_of(sequence))
        used = before if self.reference.streams else len(self.reference.cells)
        for count in (*self._batch_sizes(self.reference.size - used), 1):
            self._decode_rows(self._consecutive_rows(sequence, count))
        self.context.trim(sequence, before)
        self.reference.trim(sequence, before)

    def trim(self) -> None:
        """Trim a sequence at a random position, or call `trim` with invalid arguments."""
        sequence, keep = self._sequence(), self.rng.randrange(40)
        if self.rng.random() < 0.3:
            self._expect_refusal(
                lambda: self.context.trim(
                    *self.rng.choice(((-1, 0), (SEQUENCES, 0), (300, 1), (0, -1)))
                )
            )
            return
        assert self.context.trim(sequence, keep)
        self.reference.trim(sequence, keep)
        self._count_legal()

    def copy(self) -> None:
        """Copy the beginning of a sequence to an empty one, or its continuation to a sequence with
        the same beginning. Sometimes the arguments are invalid.
        """
        source, target = self.rng.sample(range(SEQUENCES), 2)
        source_length, start = (
            len(self.reference.tokens_of(source)),
            len(self.reference.tokens_of(target)),
        )
        if self.rng.random() < 0.3 or start >= source_length or (start and self.reference.streams):
            invalid = (
                (source, source, 0, 1),
                (-1, 0, 0, 1),
                (0, SEQUENCES, 0, 1),
                (source, target, 0, 0),
            )
            misplaced = (
                (source, target, start + delta, source_length + extra)
                for delta, extra in ((1, 0), (-1, 0), (0, 1))
            )
            self._expect_refusal(
                lambda: self.context.copy(*self.rng.choice((*invalid, *misplaced)))
            )
            return
        # A cell depends on all tokens before it, so a continuation fits only after the same tokens.
        pairs = zip(
            self.reference.tokens_of(source), self.reference.tokens_of(target), strict=False
        )
        start = next((index for index, (a, b) in enumerate(pairs) if a != b), start)
        assert self.context.trim(target, start)
        self.reference.trim(target, start)
        end = (
            source_length if self.reference.streams else self.rng.randint(start + 1, source_length)
        )
        self.context.copy(source, target, start, end)
        self.reference.copy(source, target, start, end)
        self._count_legal()

    def shift(self) -> None:
        """Remove a range of positions and move the following cells down, or try that where it is
        illegal, such as for shared cells.
        """
        sequence = self._sequence()
        tokens = self.reference.tokens_of(sequence)
        start, end = sorted(self.rng.sample(range(max(4, len(tokens) + 2)), 2))
        last = tokens[-1] if tokens else 5
        if (
            self.rng.random() < 0.3
            or end >= len(tokens)
            or not self.reference.can_shift(sequence, end)
        ):
            invalid = [
                (-1, 0, 1, last),
                (SEQUENCES, 0, 1, last),
                (sequence, 3, 3, last),
                (sequence, -1, 2, last),
            ]
            invalid += [
                (sequence, 0, len(tokens), last),
                (sequence, 0, max(1, len(tokens) - 1), -1),
            ]
            if end >= len(tokens) or not self.reference.can_shift(sequence, end):
                invalid = [(sequence, start, end, last)]
            self._expect_refusal(lambda: self.context.shift(*self.rng.choice(invalid)))
            return
        self.context.shift(sequence, start, end, last)
        self.reference.shift(sequence, start, end)
        self._count_legal()

    def read_positions(self) -> None:
        """Read the first or the last position of a valid or an invalid sequence."""
        read = self.rng.choice((self.context.first_position, self.context.last_position))
        if self.rng.random() < 0.5:
            self._expect_refusal(lambda: read(self.rng.choice((-1, SEQUENCES, 255, 256, 1 << 20))))
        else:
            read(self._sequence())
            self._count_legal()

    def clear(self) -> None:
        """Clear the cache of the context and of the reference."""
        self.context.clear()
        self.reference.cells.clear()
        self._count_legal()

    # Operations of the ledger in the ways in which the engine uses it.

    def start_prompt(self) -> None:
        """Claim a slot for a prompt that shares a prefix with others, and compute the tokens that
        are not in the cache. If there is no room, release a slot instead.
        """
        start = self.rng.choice(([5, 6, 7, 8, 9, 10], [5, 6, 40], [70]))
        prompt = (*start, *(self.rng.randrange(3, 6) for _ in range(self.rng.randint(1, 30))))
        claim = self.ledger.claim_slot_for(prompt) if self.ledger.make_room(len(prompt)) else None
        if claim is None:
            self.release()
            return
        slot, reused = claim
        self.active_slots.append(slot)
        missing = list(prompt[reused:])
        for start_of_piece in range(0, len(missing), BATCH):
            piece = missing[start_of_piece : start_of_piece + BATCH]
            self._decode_rows(self._consecutive_rows(slot, len(piece), piece))
            self.ledger.append(slot, piece)

    def trim_slot(self) -> None:
        """Trim an active slot at a random position, as for a regenerated answer."""
        if self.active_slots:
            slot = self.rng.choice(self.active_slots)
            self.ledger.trim(slot, self.rng.randint(0, len(self.ledger.tokens[slot])))
            self._count_legal()

    def fork(self) -> None:
        """Fork the sequence of an active slot into another active slot or into an idle one, as beam
        search does.
        """
        if not self.active_slots:
            return
        source = self.rng.choice(self.active_slots)
        others = [slot for slot in self.active_slots if slot != source]
        if self.ledger.n_idle and (not others or self.rng.random() < 0.5):
            target = self.ledger.claim_slot()
            self.active_slots.append(target)
        elif others:
            target = self.rng.choice(others)
        else:
            return
        self.ledger.fork(source, target)
        self._count_legal()

    def keep_best_branch(self) -> None:
        """End a beam search over some active slots. One slot remains, trimmed to the prefix that it
        shares with the answer.
        """
        if len(self.active_slots) < 2:
            return
        slots = self.rng.sample(self.active_slots, self.rng.randint(2, len(self.active_slots)))
        tokens = [*self.ledger.tokens[self.rng.choice(slots)], 7]
        remaining_slot = self.ledger.keep_best_branch(
            slots, tokens[self.rng.randint(0, 3) :] if self.rng.random() < 0.2 else tokens
        )
        self.active_slots = [
            slot for slot in self.active_slots if slot == remaining_slot or slot not in slots
        ]
        self._count_legal()

    def apply_overflow(self) -> None:
        """Remove a random range of a slot's tokens, as the overflow policy does with the oldest
        turn of a chat. The following cells move down where they are not shared.
        """
        if not self.active_slots:
            return
        slot = self.rng.choice(self.active_slots)
        tokens = self.ledger.tokens[slot]
        start, end = sorted(self.rng.choices(range(len(tokens) + 1), k=2))
        new_tokens = [*tokens[:start], *tokens[end:]]
        n_kept = self.ledger.apply_overflow(slot, new_tokens, can_move=self.rng.random() < 0.8)
        assert new_tokens[:n_kept] == self.ledger.tokens[slot], (
            "the slot holds no prefix of the prompt"
        )
        self._count_legal()

    def release(self) -> None:
        """Release a random active slot, as for a finished answer."""
        if self.active_slots:
            self.ledger.release(self.active_slots.pop(self.rng.randrange(len(self.active_slots))))
            self._count_legal()

    def evict(self) -> None:
        """Evict idle cells to make room for a random number of tokens."""
        self.ledger.make_room(self.rng.randint(0, CELLS))
        self._count_legal()

    def interrupt_slot(self) -> None:
        """Interrupt a pass of one slot, as Ctrl-C does, and let the ledger restore the slot."""
        if self.active_slots and len(self.reference.cells) + 5 <= CELLS:
            slot = self.rng.choice(self.active_slots)
            self.context.interrupt()
            try:
                self.context.decode(self._consecutive_rows(slot, 5))
                raise SystemExit("an interrupted pass was computed")
            except Aborted:
                self.ledger.restore(slot)
            self._count_legal()

    def draft_tree(self) -> None:
        """Compute a token of an active slot with a tree of guesses after it, and keep the beginning
        of a random path, or interrupt the pass, as speculative decoding does.
        """
        if not self.active_slots:
            return
        slot, rng = self.rng.choice(self.active_slots), self.rng
        paths = [
            [rng.randrange(3, 6) for _ in range(rng.randint(1, 4))]
            for _ in range(rng.randint(2, BRANCHES + 1))
        ]
        tree = TokenTree.merge(paths)
        start = len(self.ledger.tokens[slot])
        everywhere, count = tuple(range(len(tree.leaves()))), 1 + len(tree)
        wanted = rng.randrange(count)
        rows = BatchRows(
            [7, *tree.tokens],
            [start, *(start + 1 + depth for depth in tree.depths())],
            [slot] * count,
            [row == wanted for row in range(count)],
            () if tree.is_chain else [everywhere, *tree.branches()],
        )
        fits = self.reference.fits(rows)
        is_interrupted = rng.random() < 0.1 and fits
        if is_interrupted:
            self.context.interrupt()
        try:
            logits = self.context.decode(rows)[0].logits.copy()
        except NoSlot:
            assert not fits, "llama.cpp found no cells where the reference has some"
            self.counts["no room"] += 1
            return
        except Aborted:
            assert is_interrupted
            self.ledger.restore(slot)
            self._count_legal()
            return
        assert fits and not is_interrupted
        main = [tree.tokens[node] for node in tree.main_path()]
        self.reference.append_tokens(slot, start, [7, *main])
        self.ledger.append(slot, [7, *main])
        self._keep_random_path(slot, tree, start + 1)
        self.ledger.drop_branches()
        self.counts["trees"] += not tree.is_chain
        self._count_legal()
        kept = [7, *(tree.tokens[node] for node in tree.path(wanted - 1))] if wanted else [7]
        if self.ledger.tokens[slot][start:][: len(kept)] == kept:
            self._compare(logits, slot, start + len(kept) - 1)

    def _keep_random_path(self, slot: int, tree: TokenTree, start: int) -> None:
        """Keep the beginning of a random path of a tree whose guesses begin at `start`."""
        node = self.rng.randrange(-1, len(tree))
        path, main = tree.path(node), tree.main_path()
        n_main = common_prefix(path, main)
        if n_main == len(path):
            self.ledger.trim(slot, start + n_main)
            return
        branch = tree.branches()[node][0]
        tokens = [tree.tokens[number] for number in path[n_main:]]
        self.memory.branches = {branch: tokens}
        self.ledger.keep_branch(slot, start + n_main, branch, tokens)

    # Helpers.

    def run_operations(
        self, operations: list[Callable[[], None]], weights: list[int], count: int
    ) -> None:
        """Run `count` random operations from an empty cache, and compare the context with the
        reference after each. `operations` are either those of the context or those of the ledger.
        """
        self.context.clear()
        self.reference.cells.clear()
        self.ledger, self.active_slots = Ledger(self.memory), []
        through_ledger = self.start_prompt in operations
        goal = self.counts.total() + count
        while self.counts.total() < goal:
            self.rng.choices(operations, weights)[0]()
            for sequence in range(SEQUENCES):
                tokens = self.reference.tokens_of(sequence)
                assert self.context.last_position(sequence) == len(tokens) - 1, (
                    sequence,
                    len(tokens),
                )
                assert self.context.first_position(sequence) == (0 if tokens else -1), sequence
                assert not through_ledger or self.ledger.tokens[sequence] == tokens, sequence
            if through_ledger:
                self.ledger.check()
                assert self.ledger.used_cells == len(self.reference.cells)

    def _decode_rows(self, rows: BatchRows) -> None:
        fits = self.reference.fits(rows)
        try:
            outputs = self.context.decode(rows)
        except NoSlot:
            assert not fits, "llama.cpp found no cells where the reference has some"
            self.counts["no room"] += 1
            return
        assert fits, "llama.cpp found cells where the reference has none"
        self.reference.append_rows(rows)
        self._count_legal()
        rows_with_logits = [index for index, wants in enumerate(rows.wants_logits) if wants]
        if rows_with_logits and self.rng.random() < 0.15:
            chosen = self.rng.randrange(len(rows_with_logits))
            self._compare(
                outputs[chosen].logits,
                rows.sequences[rows_with_logits[chosen]],
                rows.positions[rows_with_logits[chosen]],
            )

    def _compare(self, logits: np.ndarray, sequence: int, position: int) -> None:
        tokens = self.reference.tokens_of(sequence)[: position + 1]
        if not self.reference.pure(sequence, position + 1):
            return
        self.fresh.clear()
        for at in range(0, len(tokens), BATCH):
            piece = tokens[at : at + BATCH]
            positions = range(at, at + len(piece))
            last = self.fresh.decode(
                BatchRows(
                    piece,
                    positions,
                    [0] * len(piece),
                    [index == positions[-1] for index in positions],
                )
            )
        self.widest = max(self.widest, float(np.abs(last[0].logits - logits).max()))
        assert self.widest < MAX_LOGIT_DIFFERENCE, (sequence, position, self.widest)
        self.compared += 1

    def _expect_refusal(self, operation: Callable[[], object]) -> None:
        try:
            operation()
        except AssertionError:
            self.counts["refused"] += 1
            return
        raise SystemExit("an illegal operation was accepted")

    def _count_legal(self) -> None:
        self.counts["legal"] += 1

    def _sequence(self) -> int:
        return self.rng.randrange(SEQUENCES)

    def _batch_sizes(self, count: int) -> list[int]:
        return [min(BATCH, count - at) for at in range(0, count, BATCH)]

    def _consecutive_rows(
        self, sequence: int, count: int, tokens: list[int] | None = None
    ) -> BatchRows:
        start = len(self.reference.tokens_of(sequence))
        tokens = tokens or [self.rng.randrange(self.context.n_vocab) for _ in range(count)]
        return BatchRows(
            tokens,
            list(range(start, start + count)),
            [sequence] * count,
            [False] * (count - 1) + [True],
        )

    def _random_rows(self) -> BatchRows:
        count = self.rng.choice((1, 1, 2, 3, 5, 8, 9, 17, BATCH))
        used_sequences = self.rng.sample(range(SEQUENCES), self.rng.randint(1, SEQUENCES))
        lengths = {sequence: len(self.reference.tokens_of(sequence)) for sequence in used_sequences}
        sequences, positions = [self.rng.choice(used_sequences) for _ in range(count)], []
        for sequence in sequences:
            positions.append(lengths[sequence])
            lengths[sequence] += 1
        with_logits = set(self.rng.sample(range(count), min(count, self.rng.randint(0, SEQUENCES))))
        tokens = [self.rng.randrange(self.context.n_vocab) for _ in range(count)]
        return BatchRows(
            tokens, positions, sequences, [index in with_logits for index in range(count)]
        )

    def _with_error(self, rows: BatchRows) -> BatchRows:
        """Return a copy of a valid batch with one error, for which the context must refuse it."""
        at, n_vocab = self.rng.randrange(len(rows)), self.context.n_vocab
        tokens, positions = list(rows.tokens), list(rows.positions)
        sequences, wants = list(rows.sequences), list(rows.wants_logits)
        match self.rng.randrange(9):
            case 0:
                tokens[at] = self.rng.choice((-1, n_vocab, 1 << 30))
            case 1:
                sequences[at] = self.rng.choice((-1, SEQUENCES, 255, 256))
            case 2:
                positions[at] += self.rng.choice((-1, 1, 1000, -1000))
            case 3:  # two rows of a sequence in the wrong order, or a position that is too high
                rows_of_sequence = [
                    index
                    for index, row_sequence in enumerate(sequences)
                    if row_sequence == sequences[at]
                ]
                first, last = rows_of_sequence[0], rows_of_sequence[-1]
                if first == last:
                    positions[first] += 1
                else:
                    positions[first], positions[last] = positions[last], positions[first]
            case 4:  # a duplicate position
                for column in (tokens, positions, sequences, wants):
                    column.append(column[at])
            case 5:
                tokens, positions, sequences, wants = [], [], [], []
            case 6:
                return self._consecutive_rows(sequences[0], self.rng.choice((BATCH + 1, 4 * BATCH)))
            case 7:
                too_many = self._consecutive_rows(sequences[0], SEQUENCES + BRANCHES + 1)
                return BatchRows(
                    too_many.tokens, too_many.positions, too_many.sequences, [True] * len(too_many)
                )
            case _:
                positions.pop()
        return BatchRows(tokens, positions, sequences, wants)


def run(path: Path, operations: int, seed: int, streams: bool) -> dict[str, object]:
    """Run `operations` operations; return the figures of the run. Raises AssertionError or
    SystemExit if the context and the reference differ.
    """
    cells = CELLS * (SEQUENCES if streams else 1)
    tested_options = ContextOptions(
        cells,
        BATCH,
        UBATCH,
        SEQUENCES,
        1,
        1,
        "f32",
        "f32",
        "off",
        unified=not streams,
        n_branches=0 if streams else BRANCHES,
    )
    fresh_options = ContextOptions(CELLS, BATCH, UBATCH, 1, 1, 1, "f32", "f32", "off")
    with (
        open_model(path) as model,
        open_context(model, tested_options) as context,
        open_context(model, fresh_options) as fresh,
    ):
        fuzz = Fuzz(context, fresh, seed)
        swap, adopt = partial(states.swap, fuzz), partial(states.adopt, fuzz)
        context_operations = [
            fuzz.decode,
            fuzz.interrupt,
            fuzz.fill_pool,
            fuzz.trim,
            fuzz.copy,
            fuzz.shift,
            fuzz.read_positions,
            fuzz.clear,
            swap,
        ]
        ledger_operations = [
            fuzz.start_prompt,
            fuzz.trim_slot,
            fuzz.fork,
            fuzz.keep_best_branch,
            fuzz.apply_overflow,
            fuzz.release,
            fuzz.evict,
            fuzz.interrupt_slot,
            fuzz.draft_tree,
        ]
        while (left := operations - fuzz.counts.total()) > 0:
            fuzz.run_operations(
                context_operations, [60, 5, 1, 16, 16, 14, 10, 2, 6], min(OPERATIONS_PER_TURN, left)
            )
            if not streams and (left := operations - fuzz.counts.total()) > 0:
                fuzz.run_operations(
                    [*ledger_operations, adopt],
                    [30, 10, 20, 6, 12, 15, 3, 8, 20, 6],
                    min(OPERATIONS_PER_TURN, left),
                )
        total = fuzz.counts.total()
        return {
            "operations": total,
            **fuzz.counts,
            "legal share": round(fuzz.counts["legal"] / total, 4),
            "shifts": fuzz.reference.shifts,
            "rows compared": fuzz.compared,
            "largest difference": fuzz.widest,
        }


def main() -> None:
    """Parse the flags, run and print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--operations", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--streams", action="store_true")
    args = parser.parse_args()
    print(json.dumps(run(args.model, args.operations, args.seed, args.streams)))


if __name__ == "__main__":
    main()
