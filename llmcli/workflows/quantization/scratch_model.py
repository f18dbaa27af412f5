"""A memory-mapped F16 copy of a model whose weights can be replaced while llama.cpp has it open.

Changing bytes of the file changes the open model, so that nothing is reloaded between two
measurements. For this the weights stay in main memory, even with a GPU, and are not repacked.
`ScratchModel` implements quant's protocol for such a copy.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from llmcli.atomic_files import make_folder
from llmcli.errors import UserError
from llmcli.model_loader import float_copy
from llmcli.planning import resolve_options
from llmcli.runtime.binding.model import open_model
from llmcli.runtime.binding.open_context import open_context
from llmcli.runtime.requests.request import RunOptions
from llmcli.runtime.scoring.chunk_scorer import ChunkScorer
from llmcli.units import several
from llmcli.workflows.evaluation.models import Side
from quant.evaluation.divergence import F32, F64, Lanes, Scores, Top
from quant.evaluation.evaluate import Chunks, Evaluation
from quant.model_file import load_checks, model_header, read_header
from quant.native import ggml
from quant.quantize import plan as plan_module
from quant.quantize import write as road

if TYPE_CHECKING:
    from llmcli.ui import UI
    from quant.source.source import Source

N_CTX = 512
AT_ONCE = 4  # chunks per forward pass


@dataclass(frozen=True, slots=True)
class Reading:
    """The text of the measurements: its first `probe_chunks` chunks are read every time, the next
    `held_out_chunks` only for validation.
    """

    text: Callable[[Side], Chunks]
    measured: int
    held_out: int
    threads: int


class Kept:
    """The logits of the unchanged model, by chunk: an in-memory form of saved base logits."""

    def __init__(self) -> None:
        self.tops: dict[int, list[Top]] = {}

    def rows(self, chunk: int) -> list[Top]:
        """Return the logits of one chunk's scored positions."""
        return self.tops[chunk]


class Stage:
    """An open scratch copy of a model. Every measurement reads the first `probe_chunks` chunks of
    `text`.
    """

    def __init__(
        self, path: Path, text: Chunks, measured: int, scorer: ChunkScorer, lanes: Lanes
    ) -> None:
        header = read_header.read(path)
        self._slots = {tensor.name: tensor for tensor in header.tensors}
        self._bytes: NDArray[np.uint8] = np.memmap(path, np.uint8, "r+")
        self._read_text, self._measured, self._kept = text, measured, Kept()
        self._evaluation = Evaluation(scorer, None, self._kept, text, lanes)
        self._plain = Evaluation(scorer, None, None, text, lanes, keep=True)

    def learn(self) -> None:
        """Read all chunks with the unchanged model and keep its logits as the reference."""
        for group in self._groups(0, self._read_text.count):
            _, tops = self._plain.score(group)
            self._kept.tops |= dict(zip(group, tops, strict=True))

    def put(self, name: str, first: int, rows: F32) -> None:
        """Replace rows of a tensor, beginning at row `first_row`; `rows` are floats `[rows,
        columns]`.
        """
        tensor = self._slots[name]
        packed = ggml.encode(rows, tensor.type, label=name)
        offset = tensor.offset + first * packed.shape[1]
        self._bytes[offset : offset + packed.nbytes] = packed.ravel()

    def apart(self, held_out: bool = False) -> F64:
        """Return the KL divergence from the unchanged model at every scored position,
        `[positions]`.
        """
        first_chunk, last_chunk = (
            (self._measured, self._read_text.count) if held_out else (0, self._measured)
        )
        group_scores = [
            self._evaluation.score(group)[0] for group in self._groups(first_chunk, last_chunk)
        ]
        return Scores.join([scores for group in group_scores for scores in group]).kld

    def _groups(self, begin: int, end: int) -> list[list[int]]:
        return [list(range(at, min(at + AT_ONCE, end))) for at in range(begin, end, AT_ONCE)]


@contextmanager
def staged(source: "Source", path: Path, reading: Reading, ui: "UI") -> Iterator[Stage]:
    """Write the copy, open it and record the reference logits; the copy is removed at the end.

    Raises UserError if the text is too short.
    """
    text = _read_text(source, reading)
    make_folder(path.parent)
    plan = plan_module.plan(source, "F16")
    with ExitStack() as stack:
        stack.callback(path.unlink, missing_ok=True)
        with ui.bar("write a scratch copy", len(plan.steps), unit="tensors") as bar:
            road.run(
                plan,
                path,
                threads=reading.threads,
                force=True,
                watch=lambda progress: bar.advance(1),
            )
        header = read_header.read(path)
        load_checks.check(header)
        side = _resolve_side(header, reading)
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


def _read_text(source: "Source", reading: Reading) -> Chunks:
    """Return the chunks to read; raises UserError, before anything is copied, if there are too
    few.
    """
    with float_copy.wordlist(source) as path:
        side = _resolve_side(read_header.read(path), reading)
        text = reading.text(side)
    if text.count < reading.measured + reading.held_out:
        raise UserError(
            f"the text has {several(text.count, 'chunk')} of {side.options.ctx_size} tokens, but "
            f"{reading.measured} are measured and {reading.held_out} more held out",
            hint="use a longer --text, or fewer --probe-chunks",
        )
    return text


def _resolve_side(header: model_header.Header, reading: Reading) -> Side:
    n_ctx = min(N_CTX, header.context_length or N_CTX)
    requested = RunOptions(n_ctx, reading.threads or None, None, 2048, 512, "0", "auto")
    return Side(header, *resolve_options.decide(header, requested, lambda text: None))
