"""From a size to a mix: options weighed, tensors measured one at a time, bytes given where they
lower divergence most.

It joins quant's sensitivity, allocation and trades with a scratch copy that llama.cpp reads by.
What was measured lies in the cache: another size of the same model, method and text costs nothing,
and a killed run goes on.
"""

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from llmcli.catalog import store
from llmcli.catalog.partial import make_folder
from llmcli.commands import fitting
from llmcli.commands.stage import N_CTX, Reading, Stage, staged
from llmcli.runtime.binding.library import version
from quant import probes, sensitivity
from quant.allocate import Allocation, Budget, Menu, Option, few, in_reach, reach, refusal
from quant.probes import Probe
from quant.records import Records
from quant.sensitivity import F64, Planned, Sensed, Sensing
from quant.trading import Trades, Trial

if TYPE_CHECKING:
    from llmcli.commands.sizing import Sizing
    from llmcli.config import Config
    from llmcli.ui import UI
    from quant.source import Source

READ = 1 << 30  # records of mixes that were read by stand behind all others


@dataclass(frozen=True, slots=True)
class Wish:
    """What is to be allocated: `planned` gives the plan of a mix, `plain` without method and
    importance; `steered` is what decides its bytes beside the types, `reading` what the model is
    measured on, `text` the digest of that. `spare` are bytes of the file that no plan has: what
    folds and a certificate write into it.
    """

    source: "Source"
    planned: Planned
    plain: Planned
    sizing: "Sizing"
    steered: Mapping[str, str]
    reading: Reading
    text: str
    spare: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """The mix of all tensors that may be quantized, what each is known to cost, and the mixes that
    were read by.

    `expected` is the divergence that the measurements add up to; None where none was made.
    """

    mix: Mapping[str, str]
    sensed: Mapping[str, Sensed]
    budget: Budget
    expected: float | None
    trials: tuple[Trial, ...]
    positions: int
    seconds: float


def run(wish: Wish, config: "Config", ui: "UI") -> Outcome:
    """Allocate. Raises Refusal for a size that no mix has, before anything is measured."""
    begun, sizing = time.perf_counter(), wish.sizing
    types = sensitivity.options(wish.source, sizing.kinds)
    folder, shown, own = config.cache / "sensitivity", _shown(wish), _own(wish, types)
    make_folder(folder)
    with ExitStack() as stack:
        path = folder / f"{_digest(shown)}.records"
        stack.enter_context(store.locked(path.with_suffix(".lock"), ui, "this measurement"))
        both = [_records(path, shown), _records(folder / f"{_digest(own)}.records", own)]
        for one in both:
            stack.callback(one.close)
        sensing = Sensing(wish.planned, wish.plain, types, both[0], both[1], wish.reading.threads)
        work = _Work(wish, sensing, path.with_suffix(".gguf"), stack, ui)
        budget = reachable(wish.source, wish.planned, sizing, wish.spare)
        work.weigh()
        parts = [] if sizing.quick else probes.probes(types, sizing.unit == "group")
        work.measure(parts)
        sensed = sensing.sensed(parts)
        menu = sensitivity.menu(sensing, sensed, wish.source.alignment)
        budget = budget or work.fitting(menu)
        found, trades = few(menu, budget), None
        if sizing.tries:
            judge = partial(work.judge, sensed)
            trades = Trades(menu, budget, judge, sizing.tries)
            found = work.trade(trades, found)
        return Outcome(
            work.whole(found.mix),
            sensed,
            budget,
            None if sizing.quick else found.loss,
            tuple(trades.trials) if trades else (),
            work.positions,
            time.perf_counter() - begun,
        )


class _Work:
    """A run under way. The scratch copy is made when the first thing has to be read by it."""

    def __init__(
        self, wish: Wish, sensing: Sensing, path: Path, stack: ExitStack, ui: "UI"
    ) -> None:
        self.wish, self.sensing, self.path, self.ui = wish, sensing, path, ui
        self._open = stack
        self._stage: Stage | None = None
        self._shown: dict[str, str] = {}
        self._pass = 0.0  # seconds of one measurement
        self._closed = {name: kinds[0] for name, kinds in sensing.types.items() if len(kinds) == 1}
        self.positions = 0
        self.fixed = _fixed(wish.source, wish.planned, sensing.types, wish.spare)

    def whole(self, mix: Mapping[str, str]) -> dict[str, str]:
        """A mix with the tensors that have no choice."""
        return self._closed | dict(mix)

    def fitting(self, menu: Menu) -> Budget:
        """The largest file that the free memory runs."""
        beside = self.path.with_name(
            f"fit-{self.path.name}"
        )  # not the scratch copy's place: that may be open
        most = fitting.largest(
            menu, self.fixed, lambda mix: self.wish.planned(self.whole(mix)), beside
        )
        _, all_of_it = reach(menu)
        full = " and no mix of these types is larger" if most == all_of_it + self.fixed else ""
        self.ui.note(
            f"--fit: a file of {most:,} bytes runs in the memory that is free with the default context{full}"
        )
        return Budget(most, self.fixed)

    def weigh(self) -> None:
        """The errors of all types, on rows of every tensor."""
        with self.ui.bar("errors of all types", len(self.sensing.open), unit="tensors") as bar:
            for name in self.sensing.weigh():
                bar.advance(1)
                bar.describe(f"errors of all types: {name}")

    def measure(self, parts: Sequence[Probe]) -> None:
        """Divergence with one probe at a time, those that are not known."""
        known = self.sensing.known(parts)
        if known:
            self.ui.note(f"{known} of {len(parts)} measurements were made before")
        if known == len(parts):
            return
        stage = self.stage()
        left, each = len(parts) - known, self._pass
        own = sum(part.own for part in parts)
        self.ui.note(
            f"to measure: {left} x {each:.1f} s = about {_minutes(left * each)}; {own} of {len(parts)} are of "
            "the method's own codes, which are made besides; Ctrl-C loses nothing"
        )
        with self.ui.bar("measure", len(parts), unit="tensors", done=known) as bar:
            for part in self.sensing.measure(parts, stage):
                bar.advance(1)
                bar.describe(f"measure {part.label}")

    def trade(self, trades: Trades, found: Allocation) -> Allocation:
        """Other mixes tried on held-out text."""
        with self.ui.bar("mixes on held-out text", trades.most + 1, unit="tests") as bar:
            for best in trades.run(found):
                found = best
                bar.advance(1)
                last = trades.trials[-1]
                bar.describe(f"mixes on held-out text: {last.role or 'as measured'} {last.kld:.5f}")
        return found

    def judge(self, sensed: Mapping[str, Sensed], mix: Mapping[str, str]) -> F64:
        """The divergences of a mix at the held-out positions, with what rounding its inputs is
        known to add.
        """
        return self._read(mix) + sum(sensed[name].unseen(kind) for name, kind in mix.items())

    def _read(self, mix: Mapping[str, str]) -> F64:
        """The divergences of a mix at the held-out positions, its inputs not rounded."""
        digest = hashlib.sha256(json.dumps(sorted(mix.items())).encode()).digest()
        number = READ | int.from_bytes(digest[:4]) >> 2
        if number in self.sensing.errors.numbers:
            raw = self.sensing.errors.get(number)
            if raw[:32] == digest:
                found: F64 = np.frombuffer(raw[32:], "<f8")
                self.positions = len(found)
                return found
        stage = self.stage()
        steps = [
            self.sensing.step(name, kind)
            for name, kind in mix.items()
            if self._shown.get(name) != kind
        ]
        sensitivity.show(steps, stage, self.wish.reading.threads)
        self._shown |= mix
        apart = stage.apart(held_out=True)
        self.sensing.errors.put({number: digest + apart.astype("<f8").tobytes()})
        self.positions = len(apart)
        return apart

    def stage(self) -> Stage:
        """The scratch copy, open and unchanged the first time."""
        if self._stage is None:
            size = 2 * sum(weight.elements for weight in self.wish.source.weights)
            self.ui.note(f"measuring takes a scratch copy of {size:,} bytes in {self.path.parent}")
            self._stage = self._open.enter_context(
                staged(self.wish.source, self.path, self.wish.reading, self.ui)
            )
            begun = time.perf_counter()
            self._stage.apart()
            self._pass = time.perf_counter() - begun
        return self._stage


def reachable(
    source: "Source", planned: Planned, sizing: "Sizing", spare: int = 0
) -> Budget | None:
    """The target as bytes; None where memory decides. Refuses a size that no mix has before
    anything is measured.
    """
    most = sizing.most(sum(weight.elements for weight in source.weights))
    if most is None:
        return None
    types = sensitivity.options(source, sizing.kinds)
    budget = Budget(most, _fixed(source, planned, types, spare))
    rooms: dict[str, list[Option]] = {}  # by size alone, the larger the better
    for (name, kind), step in sensitivity.choices(planned, types).items():
        if len(types.get(name, ())) > 1:
            room = sensitivity.room(step, source.alignment)
            rooms.setdefault(name, []).append(Option(kind, room, -room))
    if not in_reach(rooms, budget):
        raise refusal(rooms, budget)
    return budget


def _fixed(
    source: "Source", planned: Planned, types: Mapping[str, Sequence[str]], spare: int
) -> int:
    """Bytes of the file that are the same whatever the types of the tensors that have a choice."""
    some = planned({name: kinds[0] for name, kinds in types.items()})
    chosen = (step for step in some.steps if len(types.get(step.weight.name, ())) > 1)
    held = sum(sensitivity.room(step, source.alignment) for step in chosen)
    return some.nbytes - held + spare


def _shown(wish: Wish) -> dict[str, Any]:
    """All that the divergence of a probe depends on. The fingerprint's samples miss a small edit,
    the time does not.
    """
    return {
        "kind": "sensitivity",
        "source": wish.source.fingerprint,
        "changed": str(wish.source.changed),
        # tensors, with a choice or without: files that do not say so meant others by a number
        "numbered": "all",
        "text": wish.text,
        "probe": wish.sizing.unit,
        "n_ctx": N_CTX,
        "chunks": wish.reading.measured,
        "build": version(),
    }


def _own(wish: Wish, types: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """All that the errors of codes depend on, and the divergence of a mix."""
    kinds = _digest({name: list(kinds) for name, kinds in types.items()})
    return _shown(wish) | {
        "kind": "errors",
        "steered": dict(wish.steered),
        "types": kinds,
        "held_out": wish.reading.held_out,
        # sides of an embedding that is the head: files that do not say so have the head's alone
        "tied": "both",
        # as llama.cpp does: files that do not say so have the weights' errors alone
        "inputs": "rounded",
    }


def _records(path: Path, head: dict[str, Any]) -> Records:
    """The file as far as an earlier run came, or a new one."""
    found = Records.resume(path)
    if found is not None and found.head == head:
        return found
    if found is not None:
        found.close()
    return Records.begin(path, head)


def _digest(told: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:40]


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
