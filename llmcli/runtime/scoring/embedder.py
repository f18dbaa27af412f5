"""Turns texts into vectors, or pairs of texts into scores. Vectors are pooled as the model's file
says and normalized like those of llama-server.

The context is created with the first text, and replaced by a larger one for a longer text. Texts
are read pass by pass, so that answers can continue between the passes.

A file without a pooling type is usually that of a generating model. Its last token has seen the
whole text, so its vector is used, and only this token asks for output, because llama.cpp computes
logits for every row that gives a vector. llama-server refuses such a file for /v1/embeddings.

A reranking model must have the matrix `cls.output.weight`. Without it llama.cpp would read the
scores of all texts but the first from the wrong position of the head's output.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from llmcli.errors import UserError
from llmcli.runtime.binding.batch import BatchRows
from llmcli.runtime.binding.context import Context
from llmcli.runtime.binding.model import Model
from llmcli.runtime.binding.pooled_context import (
    POOLING,
    PooledContext,
    PooledOptions,
    Vector,
    is_causal,
    open_pooled_context,
)
from llmcli.runtime.requests.request import RunOptions
from llmcli.runtime.scoring.chunk_scorer import max_logit_rows
from quant.model_file.model_header import ModelHeader

PASS_TOKENS = 512  # maximum tokens of a pass
# maximum tokens of a pass while answers are generated, because their next tokens wait for the pass
SHORT_PASS_TOKENS = 64
MAX_TEXTS = 16  # texts in one group
MIN_CELLS = 512  # cells of the smallest context
RERANK_HEAD = "cls.output.weight"  # a reranking model's head
POOLING_CHOICES = "mean", "cls", "last"  # pooling types that a user may request


@dataclass(frozen=True, slots=True)
class EmbeddingPass:
    """A forward pass over pieces of texts. `pieces`: for each piece the number of the text, the
    first token and the end token. `gives_vectors`: whether the pass gives vectors.
    """

    pieces: tuple[tuple[int, int, int], ...]
    gives_vectors: bool

    def rows(self, texts: Sequence[Sequence[int]]) -> BatchRows:
        """Return the rows of the pass. `texts`: the texts of the group, which the pieces number
        from 0.
        """
        tokens = [token for text, start, end in self.pieces for token in texts[text][start:end]]
        positions = [at for _, start, end in self.pieces for at in range(start, end)]
        sequences = [text for text, start, end in self.pieces for _ in range(start, end)]
        return BatchRows(tokens, positions, sequences, [self.gives_vectors] * len(tokens))


class Embedder:
    """Owns the embedding context of one model. All calls come from the engine's thread."""

    def __init__(
        self,
        model: Model,
        context: Context,
        header: ModelHeader,
        options: RunOptions,
        wanted_pooling: str | None = None,
    ) -> None:
        """`context`: the context that generates answers. `wanted_pooling`: a pooling type that
        replaces that of the file.

        Raises UserError for a model without embeddings.
        """
        self._model, self._options = model, options
        self.vector_size, self.n_vocab = model.n_embd, model.n_vocab
        self.is_causal = is_causal(model, context)
        self.pooling = resolve_pooling(header, self.is_causal, wanted_pooling)
        template = header.metadata.get("tokenizer.chat_template.rerank")
        self._paired = template if isinstance(template, str) else ""
        self.max_tokens = context.n_ctx if self.is_causal else min(context.n_ctx, model.n_ctx_train)
        self._held = ExitStack()
        self._pooled: PooledContext | None = None
        self._room = self._rows = 0
        self.uses_short_passes = False  # True while answers are generated

    def encode(self, text: str) -> list[int]:
        """Return a text as token ids with the file's special tokens around it. Names of control
        tokens in the text become control tokens, as in llama-server.
        """
        return self._model.tokenize(text, special=True, add_special=True)

    def min_tokens(self, *texts: str) -> int:
        """Return a lower bound of the number of tokens of these texts, without tokenizing them."""
        return sum(map(self._model.min_tokens, texts))

    @property
    def is_reranker(self) -> bool:
        """Return whether the model scores pairs of texts instead of giving vectors."""
        return self.pooling == "rank"

    def encode_pair(self, query: str, text: str) -> list[int]:
        """Return a query and a text as the token ids of one pair to be scored. The file's rerank
        template is used if there is one; otherwise the pair is written as llama-server does.
        """
        if not self._paired:
            return self._model.tokenize_pair(query, text)
        # The template is filled in around "{document}", so that a placeholder inside the query is
        # not replaced.
        prefix, _, suffix = self._paired.partition("{document}")
        words = prefix.replace("{query}", query) + text + suffix.replace("{query}", query)
        return self._model.tokenize(words, special=True)

    def start_job(self, texts: Sequence[Sequence[int]]) -> "EmbeddingJob":
        """Return a job that turns these texts into vectors. Only one job may run at a time.

        Raises UserError when a text is too long.
        """
        longest = max(map(len, texts))
        if longest > self.max_tokens:
            raise UserError(
                f"a text has {longest} tokens, and this model embeds up to {self.max_tokens}",
                hint="shorten the text"
                + (f", or use --ctx-size {longest}" if self.is_causal else ""),
            )
        assert all(texts), "an empty text"
        return EmbeddingJob(self, texts)

    def ensure_context(self, tokens: int) -> PooledContext:
        """Return the context. It is created again, larger, if a text of this many tokens does not
        fit.
        """
        if self._pooled is None or tokens > self._room:
            self.close()
            cells = self.needed_cells(tokens)
            context_options = self._made_with(cells)
            self._pooled = self._held.enter_context(
                open_pooled_context(self._model, context_options)
            )
            self._room, self._rows = cells, context_options.pass_tokens
        return self._pooled

    def needed_cells(self, tokens: int) -> int:
        """Return the cells that the context needs for a text of this many tokens, which is its
        present size when that is enough.
        """
        if self._pooled is not None and tokens <= self._room:
            return self._room
        return min(self.max_tokens, max(MIN_CELLS, 1 << (tokens - 1).bit_length()))

    @property
    def n_cells(self) -> int:
        """Return the cells of the present context; 0 when there is none."""
        return self._room

    def _now(self) -> int:
        """Return the maximum tokens of the next pass."""
        return min(SHORT_PASS_TOKENS, self._rows) if self.uses_short_passes else self._rows

    @property
    def nbytes(self) -> int | None:
        """Return the bytes of the context's cache and compute buffers: 0 before the first text,
        None when this build of llama.cpp cannot be queried.
        """
        if self._pooled is None:
            return 0
        breakdown = self._pooled.memory_breakdown()
        return breakdown.context_bytes + breakdown.compute_bytes if breakdown else None

    def close(self) -> None:
        """Free the context."""
        self._held.close()
        self._pooled, self._room, self._rows = None, 0, 0

    def groups(self, texts: Sequence[Sequence[int]]) -> Iterator[list[int]]:
        """Yield lists of text numbers. Each list is a group of texts that fit into the context
        together.
        """
        group: list[int] = []
        for number, text in enumerate(texts):
            if group and (
                len(group) == MAX_TEXTS
                or sum(len(texts[member]) for member in group) + len(text) > self._room
            ):
                yield group
                group = []
            group.append(number)
        yield group

    def passes(self, texts: Sequence[Sequence[int]]) -> Iterator[EmbeddingPass]:
        """Yield the passes that read one group of texts."""
        if not self.is_causal:
            yield EmbeddingPass(
                tuple((number, 0, len(text)) for number, text in enumerate(texts)), True
            )
            return
        last = self.pooling in ("last", "rank")
        ends = [len(text) - last for text in texts]
        for pieces in split_into_passes(ends, self._now):
            yield EmbeddingPass(pieces, not last)
        if last:
            yield EmbeddingPass(
                tuple((number, end, end + 1) for number, end in enumerate(ends)), True
            )

    def _made_with(self, n_cells: int) -> PooledOptions:
        options, rows, vectors = self._options, max(n_cells, MAX_TEXTS), max(n_cells, MAX_TEXTS)
        if self.is_causal and self.pooling in ("last", "rank"):
            rows, vectors = PASS_TOKENS, MAX_TEXTS
        elif self.is_causal:
            rows = vectors = max(MAX_TEXTS, min(PASS_TOKENS, max_logit_rows(self._model.n_vocab)))
        assert options.threads
        return PooledOptions(
            n_cells,
            rows,
            MAX_TEXTS,
            vectors,
            self.pooling,
            options.threads,
            options.threads_batch or options.threads,
            options.cache_type_k,
            options.cache_type_v,
            options.flash_attn,
        )


class EmbeddingJob:
    """Texts that are turned into vectors, one forward pass per step."""

    def __init__(self, embedder: Embedder, texts: Sequence[Sequence[int]]) -> None:
        self.vectors: list[Vector] = []
        self.tokens = sum(map(len, texts))
        self._steps = self._run(embedder, texts)

    def step(self) -> bool:
        """Compute one forward pass. Return False when there was nothing left to compute."""
        return next(self._steps, False)

    def _run(self, embedder: Embedder, texts: Sequence[Sequence[int]]) -> Iterator[bool]:
        pooled = embedder.ensure_context(max(map(len, texts)))
        for group in embedder.groups(texts):
            group_texts = [texts[number] for number in group]
            sums = np.zeros((len(group_texts), pooled.vector_size), np.float64)
            pooled.clear()
            for forward_pass in embedder.passes(group_texts):
                if not forward_pass.gives_vectors:
                    pooled.read(forward_pass.rows(group_texts))
                else:
                    vectors = pooled.compute_vectors(forward_pass.rows(group_texts))
                    for number, start, end in forward_pass.pieces:
                        if embedder.pooling == "mean":
                            sums[number] += vectors[number].astype(np.float64) * (end - start)
                        elif embedder.pooling != "cls" or start == 0:
                            sums[number] = vectors[number]
                yield True
            self.vectors += [
                vector.astype(np.float32) if embedder.is_reranker else normalize(vector)
                for vector in sums
            ]


def resolve_pooling(header: ModelHeader, is_causal: bool, wanted: str | None = None) -> str:
    """Return the pooling type: "rank" for a reranking model, otherwise `wanted`, or that of the
    file. A file without one gets "last" for a causal model and "mean" for others.

    Raises UserError when llama.cpp cannot read the file's reranking head, and when `wanted` is
    given for a reranking model.
    """
    kind = header.metadata.get(f"{header.architecture}.pooling_type")
    names = {number: name for name, number in POOLING.items()}
    name = names.get(kind, "none") if isinstance(kind, int) else "none"
    if name == "rank":
        if wanted is not None:
            raise UserError(
                "this model ranks pairs of texts and has no pooling", hint="leave out --pooling"
            )
        if not any(tensor.name == RERANK_HEAD for tensor in header.tensors):
            raise UserError(
                f"this model ranks pairs of texts, and its file has no {RERANK_HEAD}",
                hint="use another model",
            )
        return name
    return wanted or (name if name != "none" else "last" if is_causal else "mean")


def normalize(vector: Vector | np.ndarray) -> Vector:
    """Return the vector scaled to length 1; zeros stay zeros (llama.cpp's common_embd_normalize
    with norm 2).
    """
    wide = np.asarray(vector, np.float64)
    length = math.sqrt(float(wide @ wide))
    return (wide / length if length > 0 else wide).astype(np.float32)


def split_into_passes(
    lengths: Sequence[int], max_tokens: Callable[[], int]
) -> Iterator[tuple[tuple[int, int, int], ...]]:
    """Split texts of these lengths into passes. `max_tokens()` returns the maximum tokens of a pass
    and is called before each pass. A piece is (text number, first token, end token).
    """
    pieces: list[tuple[int, int, int]] = []
    n_free = max_tokens()
    for number, length in enumerate(lengths):
        start = 0
        while start < length:
            end = min(length, start + n_free)
            pieces.append((number, start, end))
            n_free -= end - start
            start = end
            if not n_free:
                yield tuple(pieces)
                pieces, n_free = [], max_tokens()
    if pieces:
        yield tuple(pieces)
