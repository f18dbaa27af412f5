#!/usr/bin/env python3
"""Run random batches and sequence operations, most of them invalid, on a real context.

usage: .venv/bin/python scripts/fuzz/context.py MODEL.gguf [--operations 10000] [--seed 0]
       [--streams]

Half of the operations go to the context and half through the ledger, alternating every 100. A slow
reference keeps every cell with its position, token and owners, and says in advance which operations
are legal. Illegal ones must be refused and change nothing. After legal ones, the positions of every
sequence, the tokens and the number of cells must equal the reference's. Tokens are compared through
the logits of some rows against a fresh pass over the reference's tokens. The number of cells is
right if the pool takes exactly as many rows as the reference has free. An abort of llama.cpp ends
this process. The script prints one JSON line of figures. With --streams each sequence has its own
cells, and the ledger, which supports only one pool, is left out.
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

from llmcli.runtime.binding.batch import BatchRows
from llmcli.runtime.binding.context import Aborted, Context, NoSlot
from llmcli.runtime.binding.context_options import ContextOptions
from llmcli.runtime.binding.model import open_model
from llmcli.runtime.binding.open_context import open_context
from llmcli.runtime.kv_cache.ledger import Ledger
from scripts.fuzz import states
from scripts.fuzz.cache_reference import Reference

SEQUENCES, BATCH, UBATCH, CELLS = 4, 32, 8, 256
TURN = 100  # operations before the other half has its turn
CLOSE = 1e-3  # logits of one row in batches of different shapes, all in float32


class Watched:
    """The context as the ledger's memory; its operations are repeated on the reference."""

    def __init__(self, context: Context, reference: Reference) -> None:
        self.context, self.reference = context, reference
        self.n_ctx, self.n_seq_max = context.n_ctx, context.n_seq_max
        self.n_swa, self.is_recurrent, self.has_complete_states = (
            context.n_swa,
            context.is_recurrent,
            context.has_complete_states,
        )
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


class Fuzz:
    """One run: the tested context, a second one for fresh passes, the reference, and the counts."""

    def __init__(self, context: Context, fresh: Context, seed: int) -> None:
        self.context, self.fresh, self.rng = context, fresh, random.Random(seed)
        self.reference = Reference(context.n_ctx if context.unified else CELLS, not context.unified)
        self.counts: Counter[str] = Counter()
        self.compared, self.widest = 0, 0.0
        self.ledger = Ledger(Watched(context, self.reference))
        self.busy: list[int] = []

    # Operations on the context itself.

    def decode(self) -> None:
        """Decode rows that continue their sequences, sometimes with one error."""
        rows = self._legal_rows()
        if self.rng.random() < 0.45:
            self._refused(lambda: self.context.decode(self._spoiled(rows)))
        else:
            self._pass(rows)

    def interrupt(self) -> None:
        """Interrupt a pass before it begins; nothing remains, or only rows that can be trimmed."""
        rows = self._legal_rows()
        if not self.reference.fits(rows):
            return
        self.context.interrupt()
        try:
            self.context.decode(rows)
            raise SystemExit("an interrupted pass was computed")
        except Aborted:
            for sequence in set(rows.sequences):
                assert self.context.trim(sequence, len(self.reference.held(sequence)))
        self._legal()

    def brim(self) -> None:
        """Decode as many rows as there are free cells; one more must not fit."""
        sequence = self._sequence()
        before = len(self.reference.held(sequence))
        used = before if self.reference.streams else len(self.reference.cells)
        for count in (*self._pieces(self.reference.size - used), 1):
            self._pass(self._run(sequence, count))
        self.context.trim(sequence, before)
        self.reference.trim(sequence, before)

    def trim(self) -> None:
        """Trim at a random or an invalid position."""
        sequence, keep = self._sequence(), self.rng.randrange(40)
        if self.rng.random() < 0.3:
            self._refused(
                lambda: self.context.trim(
                    *self.rng.choice(((-1, 0), (SEQUENCES, 0), (300, 1), (0, -1)))
                )
            )
            return
        assert self.context.trim(sequence, keep)
        self.reference.trim(sequence, keep)
        self._legal()

    def copy(self) -> None:
        """Copy a prefix to an empty sequence, or the continuation to a sequence with the same
        beginning.
        """
        source, target = self.rng.sample(range(SEQUENCES), 2)
        have, start = len(self.reference.held(source)), len(self.reference.held(target))
        if self.rng.random() < 0.3 or start >= have or (start and self.reference.streams):
            wrong = (
                (source, source, 0, 1),
                (-1, 0, 0, 1),
                (0, SEQUENCES, 0, 1),
                (source, target, 0, 0),
            )
            shifted = (
                (source, target, start + delta, have + beyond)
                for delta, beyond in ((1, 0), (-1, 0), (0, 1))
            )
            self._refused(lambda: self.context.copy(*self.rng.choice((*wrong, *shifted))))
            return
        # A cell depends on all tokens before it: a continuation fits only after the same beginning.
        pairs = zip(self.reference.held(source), self.reference.held(target), strict=False)
        start = next((at for at, (one, other) in enumerate(pairs) if one != other), start)
        assert self.context.trim(target, start)
        self.reference.trim(target, start)
        end = have if self.reference.streams else self.rng.randint(start + 1, have)
        self.context.copy(source, target, start, end)
        self.reference.copy(source, target, start, end)
        self._legal()

    def shift(self) -> None:
        """Remove a range and move the rest down, which is legal only for cells that are not shared."""
        sequence = self._sequence()
        held = self.reference.held(sequence)
        start, end = sorted(self.rng.sample(range(max(4, len(held) + 2)), 2))
        last = held[-1] if held else 5
        if self.rng.random() < 0.3 or end >= len(held) or not self.reference.movable(sequence, end):
            wrong = [
                (-1, 0, 1, last),
                (SEQUENCES, 0, 1, last),
                (sequence, 3, 3, last),
                (sequence, -1, 2, last),
            ]
            wrong += [(sequence, 0, len(held), last), (sequence, 0, max(1, len(held) - 1), -1)]
            if end >= len(held) or not self.reference.movable(sequence, end):
                wrong = [(sequence, start, end, last)]
            self._refused(lambda: self.context.shift(*self.rng.choice(wrong)))
            return
        self.context.shift(sequence, start, end, last)
        self.reference.shift(sequence, start, end)
        self._legal()

    def ask(self) -> None:
        """Read first and last positions of valid and invalid sequences."""
        ask = self.rng.choice((self.context.first_position, self.context.last_position))
        if self.rng.random() < 0.5:
            self._refused(lambda: ask(self.rng.choice((-1, SEQUENCES, 255, 256, 1 << 20))))
        else:
            ask(self._sequence())
            self._legal()

    def clear(self) -> None:
        """Clear the cache."""
        self.context.clear()
        self.reference.cells.clear()
        self._legal()

    # Operations through the ledger, as the engine uses it.

    def place(self) -> None:
        """Start a prompt that shares a prefix with others, and compute the missing part."""
        start = self.rng.choice(([5, 6, 7, 8, 9, 10], [5, 6, 40], [70]))
        prompt = (*start, *(self.rng.randrange(3, 6) for _ in range(self.rng.randint(1, 30))))
        placed = self.ledger.claim_slot_for(prompt) if self.ledger.make_room(len(prompt)) else None
        if placed is None:
            self.release()
            return
        slot, reused = placed
        self.busy.append(slot)
        rest = list(prompt[reused:])
        for at in range(0, len(rest), BATCH):
            piece = rest[at : at + BATCH]
            self._pass(self._run(slot, len(piece), piece))
            self.ledger.append(slot, piece)

    def shorten(self) -> None:
        """Trim a slot, as for a regenerated answer."""
        if self.busy:
            slot = self.rng.choice(self.busy)
            self.ledger.trim(slot, self.rng.randint(0, len(self.ledger.tokens[slot])))
            self._legal()

    def fork(self) -> None:
        """Fork a beam into another beam's slot or an idle slot."""
        if not self.busy:
            return
        source = self.rng.choice(self.busy)
        others = [slot for slot in self.busy if slot != source]
        if self.ledger.n_idle and (not others or self.rng.random() < 0.5):
            target = self.ledger.claim_slot()
            self.busy.append(target)
        elif others:
            target = self.rng.choice(others)
        else:
            return
        self.ledger.fork(source, target)
        self._legal()

    def settle(self) -> None:
        """End a search: one slot stays, trimmed to the prefix that it shares with the answer."""
        if len(self.busy) < 2:
            return
        some = self.rng.sample(self.busy, self.rng.randint(2, len(self.busy)))
        tokens = [*self.ledger.tokens[self.rng.choice(some)], 7]
        kept = self.ledger.keep_best_branch(
            some, tokens[self.rng.randint(0, 3) :] if self.rng.random() < 0.2 else tokens
        )
        self.busy = [slot for slot in self.busy if slot == kept or slot not in some]
        self._legal()

    def adapt(self) -> None:
        """Drop the oldest turn and move the rest up where its cells are not shared."""
        if not self.busy:
            return
        slot = self.rng.choice(self.busy)
        held = self.ledger.tokens[slot]
        start, end = sorted(self.rng.choices(range(len(held) + 1), k=2))
        wanted = [*held[:start], *held[end:]]
        kept = self.ledger.apply_overflow(slot, wanted, can_move=self.rng.random() < 0.8)
        assert wanted[:kept] == self.ledger.tokens[slot], "the slot holds no prefix of the prompt"
        self._legal()

    def release(self) -> None:
        """Finish an answer."""
        if self.busy:
            self.ledger.release(self.busy.pop(self.rng.randrange(len(self.busy))))
            self._legal()

    def forget(self) -> None:
        """Evict idle cells."""
        self.ledger.make_room(self.rng.randint(0, CELLS))
        self._legal()

    def stop(self) -> None:
        """Interrupt a pass of one slot, as Ctrl-C does."""
        if self.busy and len(self.reference.cells) + 5 <= CELLS:
            slot = self.rng.choice(self.busy)
            self.context.interrupt()
            try:
                self.context.decode(self._run(slot, 5))
                raise SystemExit("an interrupted pass was computed")
            except Aborted:
                self.ledger.restore(slot)
            self._legal()

    # Helpers.

    def turn(self, work: list[Callable[[], None]], weights: list[int], count: int) -> None:
        """Run `count` operations of one half, from an empty cache."""
        self.context.clear()
        self.reference.cells.clear()
        self.ledger, self.busy = Ledger(Watched(self.context, self.reference)), []
        through_ledger = self.place in work
        goal = self.counts.total() + count
        while self.counts.total() < goal:
            self.rng.choices(work, weights)[0]()
            for sequence in range(SEQUENCES):
                held = self.reference.held(sequence)
                assert self.context.last_position(sequence) == len(held) - 1, (sequence, len(held))
                assert self.context.first_position(sequence) == (0 if held else -1), sequence
                assert not through_ledger or self.ledger.tokens[sequence] == held, sequence
            if through_ledger:
                self.ledger.check()
                assert self.ledger.used_cells == len(self.reference.cells)

    def _pass(self, rows: BatchRows) -> None:
        fits = self.reference.fits(rows)
        try:
            found = self.context.decode(rows)
        except NoSlot:
            assert not fits, "llama.cpp found no cells where the reference has some"
            self.counts["no room"] += 1
            return
        assert fits, "llama.cpp found cells where the reference has none"
        self.reference.put(rows)
        self._legal()
        wanted = [index for index, want in enumerate(rows.wants_logits) if want]
        if wanted and self.rng.random() < 0.15:
            at = self.rng.randrange(len(wanted))
            self._compare(found[at].logits, rows.sequences[wanted[at]], rows.positions[wanted[at]])

    def _compare(self, logits: np.ndarray, sequence: int, position: int) -> None:
        tokens = self.reference.held(sequence)[: position + 1]
        if not self.reference.pure(sequence, position + 1):
            return
        self.fresh.clear()
        for at in range(0, len(tokens), BATCH):
            piece = tokens[at : at + BATCH]
            places = range(at, at + len(piece))
            last = self.fresh.decode(
                BatchRows(
                    piece, places, [0] * len(piece), [place == places[-1] for place in places]
                )
            )
        self.widest = max(self.widest, float(np.abs(last[0].logits - logits).max()))
        assert self.widest < CLOSE, (sequence, position, self.widest)
        self.compared += 1

    def _refused(self, work: Callable[[], object]) -> None:
        try:
            work()
        except AssertionError:
            self.counts["refused"] += 1
            return
        raise SystemExit("an illegal operation was accepted")

    def _legal(self) -> None:
        self.counts["legal"] += 1

    def _sequence(self) -> int:
        return self.rng.randrange(SEQUENCES)

    def _pieces(self, count: int) -> list[int]:
        return [min(BATCH, count - at) for at in range(0, count, BATCH)]

    def _run(self, sequence: int, count: int, tokens: list[int] | None = None) -> BatchRows:
        start = len(self.reference.held(sequence))
        tokens = tokens or [self.rng.randrange(self.context.n_vocab) for _ in range(count)]
        return BatchRows(
            tokens,
            list(range(start, start + count)),
            [sequence] * count,
            [False] * (count - 1) + [True],
        )

    def _legal_rows(self) -> BatchRows:
        count = self.rng.choice((1, 1, 2, 3, 5, 8, 9, 17, BATCH))
        some = self.rng.sample(range(SEQUENCES), self.rng.randint(1, SEQUENCES))
        lengths = {sequence: len(self.reference.held(sequence)) for sequence in some}
        sequences, positions = [self.rng.choice(some) for _ in range(count)], []
        for sequence in sequences:
            positions.append(lengths[sequence])
            lengths[sequence] += 1
        wanted = set(self.rng.sample(range(count), min(count, self.rng.randint(0, SEQUENCES))))
        tokens = [self.rng.randrange(self.context.n_vocab) for _ in range(count)]
        return BatchRows(tokens, positions, sequences, [index in wanted for index in range(count)])

    def _spoiled(self, rows: BatchRows) -> BatchRows:
        """Return the rows with one error."""
        at, many = self.rng.randrange(len(rows)), self.context.n_vocab
        tokens, positions = list(rows.tokens), list(rows.positions)
        sequences, wants = list(rows.sequences), list(rows.wants_logits)
        match self.rng.randrange(9):
            case 0:
                tokens[at] = self.rng.choice((-1, many, 1 << 30))
            case 1:
                sequences[at] = self.rng.choice((-1, SEQUENCES, 255, 256))
            case 2:
                positions[at] += self.rng.choice((-1, 1, 1000, -1000))
            case 3:  # two rows of a sequence in the wrong order, or a position that is too high
                same = [index for index, one in enumerate(sequences) if one == sequences[at]]
                one, other = same[0], same[-1]
                positions[one], positions[other] = positions[other] + (one == other), positions[one]
                if one == other:
                    positions[one] += 1
            case 4:  # a duplicate position
                for column in (tokens, positions, sequences, wants):
                    column.append(column[at])
            case 5:
                tokens, positions, sequences, wants = [], [], [], []
            case 6:
                return self._run(sequences[0], self.rng.choice((BATCH + 1, 4 * BATCH)))
            case 7:
                more = self._run(sequences[0], SEQUENCES + 1)
                return BatchRows(more.tokens, more.positions, more.sequences, [True] * len(more))
            case _:
                positions.pop()
        return BatchRows(tokens, positions, sequences, wants)


def run(path: Path, operations: int, seed: int, streams: bool) -> dict[str, object]:
    """Return the figures of one run. Raises if the context and the reference differ."""
    cells = CELLS * (SEQUENCES if streams else 1)
    tested = ContextOptions(
        cells, BATCH, UBATCH, SEQUENCES, 1, 1, "f32", "f32", "off", unified=not streams
    )
    alone = ContextOptions(CELLS, BATCH, UBATCH, 1, 1, 1, "f32", "f32", "off")
    with (
        open_model(path) as model,
        open_context(model, tested) as context,
        open_context(model, alone) as fresh,
    ):
        fuzz = Fuzz(context, fresh, seed)
        swap, adopt = partial(states.swap, fuzz), partial(states.adopt, fuzz)
        door = [
            fuzz.decode,
            fuzz.interrupt,
            fuzz.brim,
            fuzz.trim,
            fuzz.copy,
            fuzz.shift,
            fuzz.ask,
            fuzz.clear,
            swap,
        ]
        through = [
            fuzz.place,
            fuzz.shorten,
            fuzz.fork,
            fuzz.settle,
            fuzz.adapt,
            fuzz.release,
            fuzz.forget,
            fuzz.stop,
        ]
        while (left := operations - fuzz.counts.total()) > 0:
            fuzz.turn(door, [60, 5, 1, 16, 16, 14, 10, 2, 6], min(TURN, left))
            if not streams and (left := operations - fuzz.counts.total()) > 0:
                fuzz.turn([*through, adopt], [30, 10, 20, 6, 12, 15, 3, 8, 6], min(TURN, left))
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
    """Run and print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--operations", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--streams", action="store_true")
    asked = parser.parse_args()
    print(json.dumps(run(asked.model, asked.operations, asked.seed, asked.streams)))


if __name__ == "__main__":
    main()
