"""A scratch copy of a model that llama.cpp reads by while its weights are changed, for quant's
measurements.

The copy is F16 and mapped by llama.cpp as any file is; changing its bytes changes the open model,
so that nothing is loaded again between two measurements. The weights stay in the machine's own
memory for that, whatever GPU there is, and are not laid out anew. It fits quant's Stage without
importing it. On SmolLM2 (F16, 135M) a patched tensor moved the logits by 0.28, and putting it back
gave the same logits to the last bit (2026-11).
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from llmcli.catalog.partial import make_folder
from llmcli.commands import bases
from llmcli.commands.scorers import Side
from llmcli.errors import UserError
from llmcli.hardware import fit
from llmcli.runtime.binding.context import open_context
from llmcli.runtime.binding.model import open_model
from llmcli.runtime.request import RunOptions
from llmcli.runtime.scoring import ChunkScorer
from llmcli.units import several
from quant import container, native
from quant import quantize as road
from quant.divergence import F32, F64, Lanes, Scores, Top
from quant.evaluate import Chunks, Evaluation

if TYPE_CHECKING:
    from llmcli.ui import UI
    from quant.source import Source

N_CTX = 512
AT_ONCE = 4  # chunks in a pass


@dataclass(frozen=True, slots=True)
class Reading:
    """What is read at every measurement: the first `measured` chunks of `text`, which the rest is
    held out from.
    """

    text: Callable[[Side], Chunks]
    measured: int
    held_out: int
    threads: int


class Kept:
    """What the unchanged model expects, as evaluate.Kept has it."""

    def __init__(self) -> None:
        self.tops: dict[int, list[Top]] = {}

    def rows(self, chunk: int) -> list[Top]:
        return self.tops[chunk]


class Stage:
    """An open scratch copy. `text` is what is read; its first `measured` chunks are read at every
    measurement.
    """

    def __init__(
        self, path: Path, text: Chunks, measured: int, scorer: ChunkScorer, lanes: Lanes
    ) -> None:
        header = container.read(path)
        self._slots = {tensor.name: tensor for tensor in header.tensors}
        self._bytes: NDArray[np.uint8] = np.memmap(path, np.uint8, "r+")
        self._text, self._measured, self._kept = text, measured, Kept()
        self._evaluation = Evaluation(scorer, None, self._kept, text, lanes)
        self._plain = Evaluation(scorer, None, None, text, lanes, keep=True)

    def learn(self) -> None:
        """Read everything with the unchanged model."""
        for group in self._groups(0, self._text.count):
            _, tops = self._plain.score(group)
            self._kept.tops |= dict(zip(group, tops, strict=True))

    def put(self, name: str, first: int, rows: F32) -> None:
        """Other values for the rows of a tensor from `first` on."""
        slot = self._slots[name]
        made = native.encode(rows, slot.type, label=name)
        at = slot.offset + first * made.shape[1]
        self._bytes[at : at + made.nbytes] = made.ravel()

    def apart(self, held_out: bool = False) -> F64:
        """The divergence at every scored position."""
        begin, end = (self._measured, self._text.count) if held_out else (0, self._measured)
        found = [self._evaluation.score(group)[0] for group in self._groups(begin, end)]
        return Scores.join([one for group in found for one in group]).kld

    def _groups(self, begin: int, end: int) -> list[list[int]]:
        return [list(range(at, min(at + AT_ONCE, end))) for at in range(begin, end, AT_ONCE)]


@contextmanager
def staged(source: "Source", path: Path, reading: Reading, ui: "UI") -> Iterator[Stage]:
    """Write the copy, open it, and let it learn what is read; the copy is removed at the end."""
    text = _text(source, reading)
    make_folder(path.parent)
    plan = road.plan(source, "F16")
    with ExitStack() as stack:
        stack.callback(path.unlink, missing_ok=True)
        with ui.bar("a copy to measure with", len(plan.steps), unit="tensors") as bar:
            road.run(
                plan,
                path,
                threads=reading.threads,
                force=True,
                watch=lambda progress: bar.advance(1),
            )
        header = container.read(path)
        container.check(header)
        side = _side(header, reading)
        at_once = min(AT_ONCE, text.count)
        model = stack.enter_context(
            open_model(path, gpu_layers=0, latent=header.latent, repack=False)
        )
        context = stack.enter_context(open_context(model, side.context(at_once, model.n_vocab)))
        lanes = Lanes(model.n_vocab, side.options.threads or 1)
        stack.callback(lanes.close)
        stage = Stage(path, text, reading.measured, ChunkScorer(model, context), lanes)
        stage.learn()
        yield stage


def _text(source: "Source", reading: Reading) -> Chunks:
    """What will be read; raises UserError where it is too short, before anything is copied."""
    with bases.wordlist(source) as path:
        side = _side(container.read(path), reading)
        text = reading.text(side)
    if text.count < reading.measured + reading.held_out:
        raise UserError(
            f"the text has {several(text.count, 'chunk')} of {side.options.ctx_size} tokens, measuring takes "
            f"{reading.measured} and {reading.held_out} more that are held out",
            hint="a longer --text, or fewer --probe-chunks",
        )
    return text


def _side(header: container.Header, reading: Reading) -> Side:
    n_ctx = min(N_CTX, header.context_length or N_CTX)
    wish = RunOptions(n_ctx, reading.threads or None, None, 2048, 512, "0", "auto")
    return Side(header, *fit.decide(header, wish, lambda text: None))
