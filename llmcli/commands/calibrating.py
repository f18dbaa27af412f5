"""What `llmcli calibrate` does: a text through a model, group of layers by group of layers where
second moments are wanted, and what is gathered saved now and then.

It joins quant's sums with the runtime's forward passes.
"""

import hashlib
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmcli.catalog import store
from llmcli.catalog.partial import cannot_write, check_place, write_whole
from llmcli.commands.scorers import Side
from llmcli.hardware import host
from llmcli.runtime import identity
from llmcli.runtime.activations import Activations, open_activations
from llmcli.runtime.binding.library import version
from llmcli.runtime.binding.model import open_model
from llmcli.runtime.binding.watch import Mixed, Seen
from llmcli.units import size
from quant import blas, gather, interim
from quant.calibrate import Mixture, Product, Sums
from quant.evaluate import Chunks
from quant.gather import Seconds, Survey
from quant.interim import Interim, Progress
from quant.momentfile import MomentFile
from quant.moments import About
from quant.pending import mixture
from quant.planning import SETTINGS_KEY, transform_of

if TYPE_CHECKING:
    from llmcli.config import Config
    from llmcli.types import Bar
    from llmcli.ui import UI

USABLE = 0.8  # of the memory that is free once the model is open
UNKNOWN = 4 << 30  # bytes taken where a system does not tell what is free


@dataclass(frozen=True, slots=True)
class Wish:
    """What is to be gathered: `text` is read by `model`, sums of squares go to `out`, second
    moments to `moments` where they are wanted, in `memory` bytes at most; of these `weights` alone
    where they are named.
    """

    model: Side
    fingerprint: str
    text: Chunks
    datasets: tuple[str, ...]
    out: Path
    moments: Path | None = None
    memory: int | None = None
    fresh: bool = False
    weights: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of it: `resumed` chunks (over all passes) had been read by an earlier run, `held`
    bytes at most were taken by second moments.
    """

    sums: Sums
    passes: int
    resumed: int
    held: int = 0


def run(wish: Wish, config: "Config", ui: "UI", bar: "Bar | None" = None) -> Outcome:
    """Gather and write. A killed run goes on where its last savings stand. Who has a `bar` of
    chunks is told nothing else; where the text enters none of the named `weights` nothing is
    written. Raises Refusal.
    """
    for path in (wish.out, wish.moments):
        if path:
            check_place(path)
    place = hashlib.sha256(str(wish.out.absolute()).encode("utf-8", "surrogateescape")).hexdigest()[
        :16
    ]
    with store.locked(config.cache / "calibrations" / f"{place}.lock", ui, str(wish.out)):
        with blas.bounded(1), _opened(wish) as work:  # the threads that multiply are ours
            try:
                return work.run(ui, bar)
            except OSError as error:
                raise cannot_write(wish.out, error) from None


@contextmanager
def _opened(wish: Wish) -> Iterator["_Work"]:
    """The model open, and what its passes show handed on."""
    side, header = wish.model, wish.model.header
    named = frozenset(tensor.name for tensor in header.tensors if len(tensor.shape) > 1)
    named = named if wish.weights is None else named & wish.weights
    wanted = named | {mixture(name) for name in named if wish.moments} - {""}
    with open_model(header.path, gpu_layers=side.gpu_layers, latent=header.latent) as model:
        sink = _Sink()
        # moments look at attention's keys: every layer then has all of a chunk's, in order
        options = replace(side.context(1, model.n_vocab), whole=wish.moments is not None)
        with open_activations(model, options, wanted.__contains__, sink) as activations:
            yield _Work(wish, activations, sink, named)


class _Sink:
    """Hands each product on to whoever listens now."""

    def __init__(self) -> None:
        self.listeners: list[Sums | Seconds | Survey] = []

    def __call__(self, seen: Seen | Mixed) -> None:
        if isinstance(seen, Mixed):
            for listener in self.listeners:
                if not isinstance(listener, Sums):
                    listener.mix(Mixture(seen.name, seen.shares))
            return
        product = Product(seen.name, seen.rows, seen.matrices, seen.experts, seen.key)
        for listener in self.listeners:
            listener.add(product)


class _Work:
    """One calibration under way."""

    def __init__(
        self, wish: Wish, activations: Activations, sink: _Sink, named: frozenset[str]
    ) -> None:
        self.wish, self.activations, self.sink, self.named = wish, activations, sink, named
        self.survey = Survey(wish.text.n_ctx, wish.model.options.threads or 1)
        if (
            wish.moments
        ):  # one chunk, to learn which weights share an input, and in what order they are computed
            sink.listeners = [self.survey]
            activations.read(wish.text.ids[0])
        self.inputs = self.survey.inputs
        free = host.available_memory()
        self.saves = True  # a pass under way, now and then
        self.memory = wish.memory or (UNKNOWN if free is None else int(free * USABLE))
        self.interim = Interim(
            wish.out.with_name(f".{wish.out.name}.state"), self._head(), self.inputs
        )

    def run(self, ui: "UI", own: "Bar | None") -> Outcome:
        """All passes over the text, then the files."""
        if self.wish.moments and self.wish.weights is not None and not self.inputs:
            return Outcome(Sums(), 0, 0)
        if self.wish.fresh:
            self.interim.discard()
        found = self.interim.load()
        file = self._file() if self.wish.moments else None
        with file or nullcontext():
            progress = self._standing(found, file)
            groups = self._groups(progress)
            total = self.wish.text.count
            resumed = progress.chunks + (total if progress.finished else 0)
            if resumed and own is None:
                ui.note("goes on where an earlier run was stopped (--fresh begins anew)")
            if file and own is None:
                self._forecast(groups, file, ui)
            label = f"calibrate {self.wish.model.header.path.name}"
            with nullcontext(own) if own else ui.bar(label, total * len(groups), "chunks") as bar:
                bar.advance(progress.chunks)
                for group in groups:
                    self._pass(group, progress, file, bar)
            wish = self.wish
            pieces = progress.sums.file(
                wish.datasets, total, wish.text.n_ctx, wish.fingerprint, self._transform
            )
            write_whole(self.wish.out, *pieces)
            if file:
                file.finish()
        self.interim.discard()
        return Outcome(progress.sums, len(groups), resumed, self._held(groups))

    def _head(self) -> dict[str, Any]:
        """All that the sums depend on."""
        options, text = self.wish.model.options, self.wish.text
        return {
            "kind": "calibration",
            "model": identity.content(self.wish.model.header),
            "n_ctx": text.n_ctx,
            "written": identity.written(self.wish.model.header),
            "text": _digest(text),
            "datasets": list(self.wish.datasets),
            "moments": str(self.wish.moments.absolute()) if self.wish.moments else "",
            "n_ubatch": options.ubatch_size,
            "flash_attn": options.flash_attn,
            "gpu_layers": self.wish.model.gpu_layers,
            "build": version(),
            **({"weights": _names(self.wish.weights)} if self.wish.weights is not None else {}),
        }

    def _file(self) -> MomentFile:
        text, moments = self.wish.text, self.wish.moments
        assert moments
        about = About(
            self.wish.fingerprint,
            text.n_ctx,
            text.count,
            (_digest(text),),
            self.wish.datasets,
            self._transform,
        )
        return MomentFile(moments, about, self.inputs)

    @property
    def _transform(self) -> str:
        """The folds that the model was made under."""
        return transform_of(self.wish.model.header.metadata.get(SETTINGS_KEY))

    def _standing(self, found: Progress | None, file: MomentFile | None) -> Progress:
        """What can be gone on with: inputs that are in their file, and the pass that was under way."""
        if found is None:
            return Progress(Sums(), None, set())
        if file:
            found.finished &= file.done
            if found.seconds and gather.needs(self.survey, found.seconds.numbers) > self.memory:
                found.seconds, found.chunks = None, 0
            kept = found.finished | set(found.seconds.numbers if found.seconds else ())
            found.sums.keep(name for number in kept for name in self.inputs[number].names)
        return found

    def _groups(self, progress: Progress) -> list[tuple[int, ...]]:
        """The inputs of each pass that is left; one pass without any where no second moments are
        wanted.
        """
        if not self.wish.moments:
            return [()]
        begun = progress.seconds.numbers if progress.seconds else ()
        left = [
            number
            for number in range(len(self.inputs))
            if number not in {*progress.finished, *begun}
        ]
        return [*([begun] if begun else []), *gather.groups(self.survey, left, self.memory)]

    def _pass(
        self, group: tuple[int, ...], progress: Progress, file: MomentFile | None, bar: Any
    ) -> None:
        """The text once, for one group of inputs; what was read of it before is not read again."""
        if file:
            if progress.seconds is None:
                progress.seconds = Seconds(self.inputs, group)
            shown = [name for number in group for name in gather.shown(self.inputs[number])]
            self.activations.narrow(frozenset(shown).__contains__, shown[-1])
        else:
            self.activations.narrow(self.named.__contains__, "")
        self.sink.listeners = [progress.seconds or progress.sums]  # the former hands the squares on
        with ThreadPoolExecutor(self.wish.model.options.threads) as pool:
            for ids in self.wish.text.ids[progress.chunks :]:
                self.activations.read(ids)
                progress.chunks += 1
                bar.advance(1)
                if not progress.seconds:
                    self.activations.narrow(self.named.__contains__, self.activations.latest)
                elif not self._counted(progress.seconds, progress.sums, progress.chunks, pool):
                    continue
                if self.saves and self.interim.due():
                    self.interim.save(progress)
        if file and progress.seconds:
            for number, gathered in progress.seconds.gathered.items():
                file.put(number, gathered)
            progress.finished |= set(group)
            progress.seconds, progress.chunks, self.sink.listeners = None, 0, []
            self.interim.save(progress)

    def _counted(self, seconds: Seconds, sums: Sums, chunks: int, pool: ThreadPoolExecutor) -> bool:
        """End a chunk; whether the sums have all of the chunks so far."""
        seconds.turn(pool.map)
        if seconds.waiting == self.survey.together or chunks == self.wish.text.count:
            seconds.flush(sums, pool.map)
        return not seconds.waiting

    def _held(self, groups: list[tuple[int, ...]]) -> int:
        return max((gather.needs(self.survey, group) for group in groups), default=0)

    def _forecast(self, groups: list[tuple[int, ...]], file: MomentFile, ui: "UI") -> None:
        """Say what it will take before it begins. A pass is not saved where the disk is too small
        for that.
        """
        most = self._held(groups)
        peak = most + (host.resident_memory() or 0)
        weights = sum(len(one.names) for one in self.inputs)
        passes = "one pass" if len(groups) == 1 else f"{len(groups)} passes"
        ui.note(
            f"second moments of the {len(self.inputs)} inputs of {weights} weights: {size(file.layout.nbytes)} on the "
            f"disk; {passes} over the text holding {size(most)}, {size(peak)} of memory in all"
        )
        saved = max((interim.nbytes(self.inputs, group) for group in groups), default=0)
        self.saves = shutil.disk_usage(self.wish.out.parent).free - file.layout.nbytes > saved
        if not self.saves:
            ui.note(
                f"the disk has no {size(saved)} left to save a pass under way: a killed one is read again"
            )


def _names(weights: frozenset[str]) -> str:
    return hashlib.sha256("\n".join(sorted(weights)).encode()).hexdigest()


def _digest(text: Chunks) -> str:
    return hashlib.sha256(text.ids.astype("<i4").tobytes()).hexdigest()
