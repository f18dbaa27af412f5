"""A memory-mapped F16 copy of a model, whose weights can be replaced while llama.cpp has it open.

A change of bytes in the file changes the open model, so that nothing is loaded again between two
measurements. Therefore the weights stay in main memory even if there is a GPU, and llama.cpp must
not repack them. `ScratchModel` implements a protocol that `quant` defines.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from llmcli.atomic_files import make_folder
from llmcli.errors import UserError
from llmcli.model_loader import float_copy
from llmcli.planning import resolve_options
from llmcli.runtime.binding.contexts.open_context import open_context
from llmcli.runtime.binding.model import open_model
from llmcli.runtime.binding.placement.model_placement import ON_HOST
from llmcli.runtime.requests.request import RunOptions
from llmcli.runtime.scoring.chunk_scorer import ChunkScorer
from llmcli.units import format_count
from llmcli.workflows.evaluation.models import EvaluationSide
from llmcli.workflows.evaluation.text import PROBE_CHUNK_TOKENS
from quant.evaluation.divergence import F32, F64, PositionScores, ThreadedScorer, TopLogits
from quant.evaluation.evaluate import Evaluation, TextChunks
from quant.model_file import load_checks, model_header, read_header
from quant.native import ggml
from quant.quantize import write
from quant.quantize.plan import plan_quantization

if TYPE_CHECKING:
    from llmcli.ui import UI
    from quant.source.source import Source

CHUNKS_PER_PASS = 4  # chunks per forward pass


@dataclass(frozen=True, slots=True)
class ProbeText:
    """The text on which divergence is measured. Its first `probe_chunks` chunks are read in every
    measurement. The next `held_out_chunks` chunks are read only to compare complete mixes of types.
    """

    read_chunks: Callable[[EvaluationSide], TextChunks]
    probe_chunks: int
    held_out_chunks: int
    threads: int


class ReferenceLogits:
    """The logits of the unchanged model in memory, by chunk. The interface is that of a file of
    saved base logits.
    """

    def __init__(self) -> None:
        self.tops: dict[int, list[TopLogits]] = {}

    def rows(self, chunk: int) -> list[TopLogits]:
        """Return the logits at each scored position of one chunk."""
        return self.tops[chunk]


class ScratchModel:
    """An open scratch copy of a model. A measurement reads the first `probe_chunks` chunks of
    `text`, or all later chunks, which are held out.
    """

    def __init__(
        self,
        path: Path,
        text: TextChunks,
        probe_chunks: int,
        scorer: ChunkScorer,
        row_scorers: ThreadedScorer,
    ) -> None:
        header = read_header.read_header(path)
        self._tensors = {tensor.name: tensor for tensor in header.tensors}
        self._bytes: NDArray[np.uint8] = np.memmap(path, np.uint8, "r+")
        self._text, self._probe_chunks, self._reference = text, probe_chunks, ReferenceLogits()
        self._evaluation = Evaluation(scorer, None, self._reference, text, row_scorers)
        self._plain_evaluation = Evaluation(scorer, None, None, text, row_scorers, collect_top=True)

    def record_reference(self) -> None:
        """Compute the logits of all chunks with the unchanged model, and store them as the
        reference.
        """
        for group in self._groups(0, self._text.count):
            _, tops = self._plain_evaluation.score(group)
            self._reference.tops |= dict(zip(group, tops, strict=True))

    def set_rows(self, name: str, first_row: int, rows: F32) -> None:
        """Replace rows of a tensor from row `first_row` on. `rows`: the new values as floats, of
        shape `[rows, columns]`.
        """
        tensor = self._tensors[name]
        packed = ggml.encode(rows, tensor.type, label=name)
        offset = tensor.offset + first_row * packed.shape[1]
        self._bytes[offset : offset + packed.nbytes] = packed.ravel()

    def divergence(self, held_out: bool = False) -> F64:
        """Return the KL divergence from the unchanged model at each scored position of the probe
        chunks, or of the held-out chunks. Shape: `[positions]`.
        """
        first_chunk, last_chunk = (
            (self._probe_chunks, self._text.count) if held_out else (0, self._probe_chunks)
        )
        group_scores = [
            self._evaluation.score(group)[0] for group in self._groups(first_chunk, last_chunk)
        ]
        return PositionScores.join([scores for group in group_scores for scores in group]).kld

    def _groups(self, begin: int, end: int) -> list[list[int]]:
        return [
            list(range(first, min(first + CHUNKS_PER_PASS, end)))
            for first in range(begin, end, CHUNKS_PER_PASS)
        ]


@contextmanager
def open_scratch_model(
    source: "Source", path: Path, probe_text: ProbeText, ui: "UI"
) -> Iterator[ScratchModel]:
    """Write the scratch copy to `path`, open it and record the reference logits. The copy is
    deleted at the end of the block. Raises UserError if the text is too short.
    """
    text = _read_text(source, probe_text)
    make_folder(path.parent)
    plan = plan_quantization(source, "F16")
    with ExitStack() as stack:
        stack.callback(path.unlink, missing_ok=True)
        with ui.bar("write a scratch copy", len(plan.steps), unit="tensors") as bar:
            write.write_model(
                plan,
                path,
                threads=probe_text.threads,
                force=True,
                on_tensor=lambda progress: bar.advance(1),
            )
        header = read_header.read_header(path)
        load_checks.check_loadable(header)
        side = _resolve_side(header, probe_text)
        chunks_per_pass = min(CHUNKS_PER_PASS, text.count)
        model = stack.enter_context(
            open_model(path, replace(ON_HOST, repack=False).for_header(header))
        )
        context = stack.enter_context(
            open_context(model, side.context_options(chunks_per_pass, model.n_vocab))
        )
        row_scorers = ThreadedScorer(model.n_vocab, side.options.threads or 1)
        stack.callback(row_scorers.close)
        scratch_model = ScratchModel(
            path, text, probe_text.probe_chunks, ChunkScorer(model, context), row_scorers
        )
        scratch_model.record_reference()
        yield scratch_model


def _read_text(source: "Source", probe_text: ProbeText) -> TextChunks:
    """Return the chunks of the text. Raises UserError if there are too few. This needs only the
    vocabulary, so the error is reported before the model is copied.
    """
    with float_copy.vocabulary_only_gguf(source) as path:
        side = _resolve_side(read_header.read_header(path), probe_text)
        text = probe_text.read_chunks(side)
    if text.count < probe_text.probe_chunks + probe_text.held_out_chunks:
        raise UserError(
            f"the text has {format_count(text.count, 'chunk')} of {side.options.ctx_size} tokens, but "
            f"{probe_text.probe_chunks} are measured and {probe_text.held_out_chunks} more held out",
            hint="use a longer --text, or fewer --probe-chunks",
        )
    return text


def _resolve_side(header: model_header.ModelHeader, probe_text: ProbeText) -> EvaluationSide:
    n_ctx = min(PROBE_CHUNK_TOKENS, header.context_length or PROBE_CHUNK_TOKENS)
    requested = RunOptions(n_ctx, probe_text.threads or None, None, 2048, 512, "0", "auto")
    return EvaluationSide(
        header, *resolve_options.resolve_options(header, requested, lambda text: None)
    )
