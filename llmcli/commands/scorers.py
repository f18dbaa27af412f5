"""Models as an evaluation needs them: open side by side, or one after the other where both do not
fit into memory.

It knows contexts and chunks, and nothing of what the logits are good for.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmcli.errors import UserError
from llmcli.hardware import host
from llmcli.runtime import scoring
from llmcli.runtime.binding import devices
from llmcli.runtime.binding.context import ContextOptions, open_context
from llmcli.runtime.binding.model import Model, open_model
from llmcli.runtime.drafting import vocabulary
from llmcli.runtime.request import RunOptions
from llmcli.runtime.scoring import ChunkScorer
from quant.container import Array, Header
from quant.evaluate import I32, Chunks

HELD = 4 << 30  # bytes of a base's logits that are held at most while the model takes its turn


@dataclass(frozen=True, slots=True)
class Side:
    """A file to be read by, and how: `options` are decided (hardware/fit.py), their ctx_size is a
    chunk's.
    """

    header: Header
    options: RunOptions
    gpu_layers: int

    @property
    def n_vocab(self) -> int:
        """Words of the vocabulary, as the file says."""
        found = self.header.metadata.get("tokenizer.ggml.tokens")
        return found.count if isinstance(found, Array) else 0

    def context(self, chunks: int, n_vocab: int) -> ContextOptions:
        """A context for so many chunks at once."""
        options = self.options
        assert options.ctx_size and options.threads, options
        one = ContextOptions(
            options.ctx_size,
            options.batch_size,
            options.rows,
            1,
            options.threads,
            options.threads_batch or options.threads,
            options.cache_type_k,
            options.cache_type_v,
            options.flash_attn,
        )
        return scoring.context_options(one, n_vocab, chunks)


def both_fit(model: Side, base: Side) -> bool:
    """Whether both models' weights fit into the free memory; on a CPU they may be there twice, laid
    out anew.
    """
    if model.header.path == base.header.path:
        return True
    weights = model.header.tensor_bytes + base.header.tensor_bytes
    if model.gpu_layers and base.gpu_layers and (free := devices.gpu_free()) is not None:
        return weights * 1.1 < free
    free = host.available_memory()
    return free is None or 2 * weights < free


@contextmanager
def opened(
    model: Side, base: Side | None, chunks: int
) -> Iterator[tuple[ChunkScorer, ChunkScorer | None]]:
    """Both sides open; a file that is both is loaded once."""
    with ExitStack() as stack:
        mine = stack.enter_context(_model(model))
        first = stack.enter_context(open_context(mine, model.context(chunks, mine.n_vocab)))
        if base is None:
            yield ChunkScorer(mine, first), None
            return
        yours = mine if base.header.path == model.header.path else stack.enter_context(_model(base))
        second = stack.enter_context(open_context(yours, base.context(chunks, yours.n_vocab)))
        yield ChunkScorer(mine, first), ChunkScorer(yours, second)


def in_turn(
    model: Side, base: Side, text: Chunks, groups: list[list[int]]
) -> Iterator[tuple[list[int], ChunkScorer, "Held"]]:
    """Groups of chunks with the model open, and the base's logits of them, which were computed when
    it was.

    As many groups as `HELD` bytes of logits hold, or half of the memory that is free, are taken at
    each turn.
    """
    at_once = max(map(len, groups))
    left = list(groups)
    while left:
        with opened(base, None, at_once) as (scorer, _):
            free = host.available_memory()
            room = HELD if free is None else min(HELD, free // 2)
            most = max(1, room // (4 * scorer.n_vocab * text.scored * at_once))
            held = [
                Held([block.copy() for block in scorer.blocks(text.ids[group])])
                for group in left[:most]
            ]
        with opened(model, None, at_once) as (scorer, _):
            for group, logits in zip(left[:most], held, strict=True):
                yield group, scorer, logits
        left = left[most:]


class Held:
    """The logits of one group of chunks, as they came."""

    def __init__(self, blocks: list[NDArray[np.float32]]) -> None:
        self._blocks = blocks

    def blocks(self, ids: I32) -> Iterator[NDArray[np.float32]]:
        """The same again."""
        yield from self._blocks


def tokens(side: Side, words: str) -> list[int]:
    """As llama-perplexity: control tokens are text, BOS as the file says."""
    with open_model(side.header.path, gpu_layers=0, vocab_only=True) as model:
        found = model.tokenize(words, special=False, add_special=True)
        if (
            side.header.metadata.get("tokenizer.ggml.add_eos_token")
            and found
            and found[-1] == model.eos
        ):
            found.pop()
        return found


def refuse_other(model: Side, base: Side, found: list[int], words: str) -> None:
    """Raise UserError where the base's vocabulary is another, or splits the text otherwise."""
    mine, yours = model.header, base.header
    what = vocabulary.difference(mine, yours)
    if not what and _rules(mine) != _rules(yours) and tokens(base, words) != found:
        what = "it splits the text otherwise (another pre-tokenizer, or another rule for BOS)"
    if what:
        raise UserError(
            f"{yours.path.name} cannot be the base of {mine.path.name}, its vocabulary is another: {what}",
            hint="--base takes a file of the same model in higher precision",
        )


@contextmanager
def _model(side: Side) -> Iterator[Model]:
    with open_model(
        side.header.path, gpu_layers=side.gpu_layers, latent=side.header.latent
    ) as model:
        yield model


def _rules(header: Header) -> dict[str, object]:
    """All that a file says of its tokenizer: merges, scores, pre-tokenizer, flags."""
    return {
        key: value.raw() if isinstance(value, Array) else value
        for key, value in header.metadata.items()
        if key.startswith("tokenizer.ggml.")
    }
