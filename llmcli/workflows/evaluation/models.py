"""The models of an evaluation. The model and its base are open at the same time, or in turn if they
do not fit into memory together.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from llmcli.errors import UserError
from llmcli.hardware import host
from llmcli.runtime.binding.contexts.context_options import ContextOptions
from llmcli.runtime.binding.contexts.open_context import open_context
from llmcli.runtime.binding.kernels import products
from llmcli.runtime.binding.model import Model, open_model
from llmcli.runtime.binding.placement import devices
from llmcli.runtime.binding.placement.model_placement import ModelPlacement
from llmcli.runtime.drafting.draft_files import vocabulary_match
from llmcli.runtime.requests.request import RunOptions
from llmcli.runtime.scoring import chunk_scorer
from llmcli.runtime.scoring.chunk_scorer import ChunkScorer
from quant.evaluation.evaluate import I32, TextChunks
from quant.gguf.header import GgufArray
from quant.model_file.model_header import ModelHeader

# maximum bytes of base logits that are buffered while the model is open instead of the base
MAX_BUFFERED_BYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class EvaluationSide:
    """A model file with its run options: the evaluated model, or the base. `options` are resolved;
    their `ctx_size` is the length of a chunk.
    """

    header: ModelHeader
    options: RunOptions
    placement: ModelPlacement

    @property
    def n_vocab(self) -> int:
        """The size of the vocabulary; 0 if the file has no vocabulary."""
        token_array = self.header.metadata.get("tokenizer.ggml.tokens")
        return token_array.count if isinstance(token_array, GgufArray) else 0

    def context_options(self, chunks: int, n_vocab: int) -> ContextOptions:
        """Return the options of a llama.cpp context that processes `chunks` chunks in one pass."""
        options = self.options
        assert options.ctx_size and options.threads, options
        single_chunk = ContextOptions(
            options.ctx_size,
            options.batch_size,
            options.max_rows,
            1,
            options.threads,
            options.threads_batch or options.threads,
            options.cache_type_k,
            options.cache_type_v,
            options.flash_attn,
            offload_kqv=options.kv_offload,
        )
        return chunk_scorer.chunk_context_options(single_chunk, n_vocab, chunks)


def both_fit(model: EvaluationSide, base: EvaluationSide) -> bool:
    """Return whether the weights of both models fit into the free memory together.

    On a CPU, the weights of each model count twice, because llama.cpp may store a repacked copy of
    them.
    """
    if model.header.path == base.header.path:
        return True
    weights = model.header.tensor_bytes + base.header.tensor_bytes
    if (
        model.placement.uses_gpu
        and base.placement.uses_gpu
        and (free_bytes := devices.free_gpu_bytes()) is not None
    ):
        return weights * 1.1 < free_bytes
    free_bytes = host.available_memory()
    return free_bytes is None or 2 * weights < free_bytes


@contextmanager
def open_scorers(
    model: EvaluationSide, base: EvaluationSide | None, chunks: int
) -> Iterator[tuple[ChunkScorer, ChunkScorer | None]]:
    """Open the models for the block, and yield a scorer of the model and a scorer of the base.
    Without a base, the second scorer is None. If both are the same file, it is loaded only once.
    """
    with ExitStack() as stack:
        model_weights = stack.enter_context(_open_side(model))
        model_context = stack.enter_context(
            open_context(model_weights, model.context_options(chunks, model_weights.n_vocab))
        )
        if base is None:
            yield ChunkScorer(model_weights, model_context), None
            return
        base_weights = (
            model_weights
            if base.header.path == model.header.path
            else stack.enter_context(_open_side(base))
        )
        base_context = stack.enter_context(
            open_context(base_weights, base.context_options(chunks, base_weights.n_vocab))
        )
        yield ChunkScorer(model_weights, model_context), ChunkScorer(base_weights, base_context)


def open_one_by_one(
    model: EvaluationSide, base: EvaluationSide, text: TextChunks, groups: list[list[int]]
) -> Iterator[tuple[list[int], ChunkScorer, "BufferedLogits"]]:
    """Yield each group of chunks with a scorer of the model and the buffered logits of the base.
    The two models are opened in turn.

    First, the base computes the logits of as many groups as fit into `MAX_BUFFERED_BYTES` and half
    of the free memory. Then the model is opened for these groups. This repeats for all groups.
    """
    group_size = max(map(len, groups))
    remaining = list(groups)
    while remaining:
        with open_scorers(base, None, group_size) as (scorer, _):
            free_bytes = host.available_memory()
            buffer_bytes = (
                MAX_BUFFERED_BYTES
                if free_bytes is None
                else min(MAX_BUFFERED_BYTES, free_bytes // 2)
            )
            n_groups = max(1, buffer_bytes // (4 * scorer.n_vocab * text.scored_count * group_size))
            buffered = [
                BufferedLogits([block.copy() for block in scorer.blocks(text.ids[group])])
                for group in remaining[:n_groups]
            ]
        with open_scorers(model, None, group_size) as (scorer, _):
            for group, logits in zip(remaining[:n_groups], buffered, strict=True):
                yield group, scorer, logits
        remaining = remaining[n_groups:]


class BufferedLogits:
    """The base logits of one group of chunks in memory, as blocks of shape `[rows, vocabulary]`."""

    def __init__(self, blocks: list[NDArray[np.float32]]) -> None:
        self._blocks = blocks

    def blocks(self, ids: I32) -> Iterator[NDArray[np.float32]]:
        """Yield the blocks. `ids` is not used; it is part of the interface of a scorer."""
        yield from self._blocks


def tokenize_text(side: EvaluationSide, text: str) -> list[int]:
    """Return the tokens of a text as llama-perplexity does: the names of control tokens are plain
    text, and BOS is added if the model file requests it.
    """
    with open_model(side.header.path, vocab_only=True) as model:
        token_ids = model.tokenize(text, special=False, add_special=True)
        if (
            side.header.metadata.get("tokenizer.ggml.add_eos_token")
            and token_ids
            and token_ids[-1] == model.eos
        ):
            token_ids.pop()
        return token_ids


def require_same_vocabulary(
    model: EvaluationSide, base: EvaluationSide, token_ids: list[int], text: str
) -> None:
    """Raise UserError if the base has another vocabulary than the model, or splits `text` into
    other tokens. `token_ids`: the tokens of `text` by the model's tokenizer.
    """
    model_header, base_header = model.header, base.header
    difference = vocabulary_match.describe_difference(model_header, base_header)
    if (
        not difference
        and _tokenizer_metadata(model_header) != _tokenizer_metadata(base_header)
        and tokenize_text(base, text) != token_ids
    ):
        difference = (
            "it splits the text differently (another pre-tokenizer, or another rule for BOS)"
        )
    if difference:
        raise UserError(
            f"{base_header.path.name} cannot be the base of {model_header.path.name}: "
            f"their vocabularies differ: {difference}",
            hint="--base takes a file of the same model in higher precision",
        )


@contextmanager
def _open_side(side: EvaluationSide) -> Iterator[Model]:
    # with ggml's products and attention, so that results compare with llama-perplexity's and earlier ones
    placement = replace(side.placement.for_header(side.header), ggml_products=True)
    with products.attention_of_ggml(), open_model(side.header.path, placement) as model:
        yield model


def _tokenizer_metadata(header: ModelHeader) -> dict[str, object]:
    """Return all metadata of the file that affects tokenization, such as merges, scores and the
    pre-tokenizer.
    """
    return {
        key: value.read_bytes() if isinstance(value, GgufArray) else value
        for key, value in header.metadata.items()
        if key.startswith("tokenizer.ggml.")
    }
