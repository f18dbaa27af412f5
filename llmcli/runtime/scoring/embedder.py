"""Embeddings and reranking: turn texts into vectors, or pairs of texts into scores. Vectors are
pooled as the model's file says, and normalized like those of llama-server.

The llama.cpp context for embeddings is created with the first text, and replaced by a larger one
for a longer text. Texts are read in several short forward passes, so that running answers can
continue between them.

A file without a pooling type is usually that of a text-generating model. The vector of the last
token is used, because only this token has seen the whole text. Output is requested only for this
token, because llama.cpp also computes logits for every token that gives a vector. (llama-server
refuses such a file for /v1/embeddings.)

A reranking model must have a head whose last matrix gives its scores. With any other file,
llama.cpp would read the scores of all texts except the first from the wrong position of the output.
llama.cpp's converter writes the head, but no pooling type that says that the model ranks.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from llmcli.errors import UserError
from llmcli.runtime.binding.contexts.context import Context
from llmcli.runtime.binding.contexts.pooled_context import (
    POOLING,
    PooledContext,
    PooledOptions,
    Vector,
    is_causal,
    open_pooled_context,
)
from llmcli.runtime.binding.model import Model
from llmcli.runtime.binding.rows.batch import BatchRows
from llmcli.runtime.requests.request import RunOptions
from llmcli.runtime.scoring.chunk_scorer import max_logit_rows
from quant.gguf.header import GgufArray
from quant.model_file.model_header import ModelHeader

PASS_TOKENS = 512  # maximum number of tokens of a pass
# the same while answers are generated, whose next tokens have to wait for the pass
SHORT_PASS_TOKENS = 64
MAX_TEXTS = 16  # maximum number of texts that are read together
MIN_CELLS = 512  # KV cells of the smallest context
POOLING_CHOICES = tuple(POOLING)  # pooling types that a user may request
# the last matrix of a head that scores pairs of texts, the likelier name first
RERANK_HEADS = "cls.output.weight", "cls.weight"


EUCLIDEAN, NO_NORM = 2, -1  # values of `norm` (see normalize)
MAX_INT16 = 32760.0  # as in llama.cpp


@dataclass(frozen=True, slots=True)
class EmbeddingPass:
    """A forward pass over pieces of several texts."""

    # for each piece: the index of the text, and the range of the text's tokens as start and end
    pieces: tuple[tuple[int, int, int], ...]
    gives_vectors: bool  # whether the tokens of the pass give vectors

    def rows(self, texts: Sequence[Sequence[int]]) -> BatchRows:
        """Return the batch for llama.cpp, with each text in its own sequence. `texts`: the tokens
        of each text of the group.
        """
        tokens = [token for text, start, end in self.pieces for token in texts[text][start:end]]
        positions = [position for _, start, end in self.pieces for position in range(start, end)]
        sequences = [text for text, start, end in self.pieces for _ in range(start, end)]
        return BatchRows(tokens, positions, sequences, [self.gives_vectors] * len(tokens))


class Embedder:
    """Computes embeddings or reranking scores with one model, in a context that it creates. All
    methods must be called on the engine's thread, which shares the model.
    """

    def __init__(
        self,
        model: Model,
        context: Context,
        header: ModelHeader,
        options: RunOptions,
        wanted_pooling: str | None = None,
        wanted_tokens: int | None = None,
    ) -> None:
        """`context`: the context in which the model generates answers, from which the size and the
        kind of attention are read. `wanted_pooling`: a pooling type to use instead of that in the
        file. `wanted_tokens`: the longest text, if it is not the size of `context`.

        Raises UserError under the conditions of `resolve_pooling`.
        """
        self._model, self._options = model, options
        self._gemm_min_rows = context.gemm_min_rows
        self.vector_size, self.n_vocab = model.n_embd, model.n_vocab
        self.is_causal = is_causal(model, context)
        self.pooling = resolve_pooling(header, self.is_causal, wanted_pooling)
        template = header.metadata.get("tokenizer.chat_template.rerank")
        self._rerank_template = template if isinstance(template, str) else ""
        n_tokens = wanted_tokens or context.n_ctx
        self.max_tokens = n_tokens if self.is_causal else min(n_tokens, model.n_ctx_train)
        self._exit_stack = ExitStack()
        self._pooled: PooledContext | None = None
        self._n_cells = self._pass_tokens = 0  # of the present context
        self.uses_short_passes = False  # True while answers are generated

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Return the token ids of a text, with the special tokens around it that the file asks for.
        The names of control tokens in the text become control tokens, as in llama-server.
        """
        return self._model.tokenize(text, special=True, add_special=add_special)

    def min_tokens(self, *texts: str) -> int:
        """Return a lower bound of the total number of tokens of these texts, without tokenizing."""
        return sum(map(self._model.min_tokens, texts))

    @property
    def is_reranker(self) -> bool:
        """Return whether the model gives scores for pairs of texts instead of vectors."""
        return self.pooling == "rank"

    def encode_pair(self, query: str, text: str) -> list[int]:
        """Return the token ids of the prompt for which a reranking model scores how well `text`
        fits `query`. It is written with the file's rerank template, or without one as llama-server
        does.
        """
        if not self._rerank_template:
            return self._model.tokenize_pair(query, text)
        # The template is filled in around "{document}", so that a placeholder inside the query is
        # not replaced.
        prefix, _, suffix = self._rerank_template.partition("{document}")
        prompt = prefix.replace("{query}", query) + text + suffix.replace("{query}", query)
        return self._model.tokenize(prompt, special=True)

    @property
    def gives_token_vectors(self) -> bool:
        """Return whether the model gives a vector for each token instead of one for each text."""
        return self.pooling == "none"

    def start_job(self, texts: Sequence[Sequence[int]], norm: int = EUCLIDEAN) -> "EmbeddingJob":
        """Return a job that computes the vectors or scores of these texts, given as token ids. Only
        one job may run at a time, because all use the same context. `norm`: see `normalize`.

        Raises UserError when a text has more than `max_tokens` tokens.
        """
        self.check_texts(texts)
        return EmbeddingJob(self, texts, norm)

    def check_texts(self, texts: Sequence[Sequence[int]]) -> None:
        """Raise UserError when a text, given as token ids, has more than `max_tokens` tokens."""
        longest = max(map(len, texts))
        if longest > self.max_tokens:
            raise UserError(
                f"a text has {longest} tokens, and this model embeds up to {self.max_tokens}",
                hint="shorten the text"
                + (f", or use --ctx-size {longest}" if self.is_causal else ""),
            )
        assert all(texts), "an empty text"

    def ensure_context(self, tokens: int) -> PooledContext:
        """Return a context that can read a text of `tokens` tokens. If the present context is too
        small, it is closed and a larger one is created.
        """
        if self._pooled is None or tokens > self._n_cells:
            self.close()
            n_cells = self.needed_cells(tokens)
            options = self._context_options(n_cells)
            self._pooled = self._exit_stack.enter_context(open_pooled_context(self._model, options))
            self._n_cells, self._pass_tokens = n_cells, options.pass_tokens
        return self._pooled

    def needed_cells(self, tokens: int) -> int:
        """Return the number of cells that the context will have after `ensure_context(tokens)`: the
        present number if it is enough, otherwise the next power of two.
        """
        if self._pooled is not None and tokens <= self._n_cells:
            return self._n_cells
        return min(self.max_tokens, max(MIN_CELLS, 1 << (tokens - 1).bit_length()))

    @property
    def n_cells(self) -> int:
        """Return the number of KV cells of the present context; 0 when there is no context."""
        return self._n_cells

    @property
    def pass_tokens(self) -> int:
        """Return the maximum number of tokens of a pass in the present context; 0 when there is no
        context.
        """
        return self._pass_tokens

    def _max_pass_tokens(self) -> int:
        """Return the maximum number of tokens of the next pass. It is lower while answers are
        generated.
        """
        return (
            min(SHORT_PASS_TOKENS, self._pass_tokens)
            if self.uses_short_passes
            else self._pass_tokens
        )

    @property
    def nbytes(self) -> int | None:
        """Return the bytes of the context's KV cache and compute buffers. It is 0 before the first
        text, and None when this build of llama.cpp does not report memory.
        """
        if self._pooled is None:
            return 0
        breakdown = self._pooled.memory_breakdown()
        return breakdown.context_bytes + breakdown.compute_bytes if breakdown else None

    def close(self) -> None:
        """Free the context. The next text creates a new one."""
        self._exit_stack.close()
        self._pooled, self._n_cells, self._pass_tokens = None, 0, 0

    def groups(self, texts: Sequence[Sequence[int]]) -> Iterator[list[int]]:
        """Divide the texts into groups that fit into the context together. Yield the indices of the
        texts of each group.
        """
        group: list[int] = []
        for index, text in enumerate(texts):
            if group and (
                len(group) == MAX_TEXTS
                or sum(len(texts[member]) for member in group) + len(text) > self._n_cells
            ):
                yield group
                group = []
            group.append(index)
        yield group

    def passes(self, texts: Sequence[Sequence[int]]) -> Iterator[EmbeddingPass]:
        """Yield the forward passes that read one group of texts. A model that is not causal must
        read all tokens in a single pass. With pooling "last" or "rank", only the final pass, over
        the last token of each text, gives vectors.
        """
        if not self.is_causal:
            yield EmbeddingPass(
                tuple((number, 0, len(text)) for number, text in enumerate(texts)), True
            )
            return
        uses_last_token = self.pooling in ("last", "rank")
        ends = [len(text) - uses_last_token for text in texts]
        for pieces in split_into_passes(ends, self._max_pass_tokens):
            yield EmbeddingPass(pieces, not uses_last_token)
        if uses_last_token:
            yield EmbeddingPass(
                tuple((number, end, end + 1) for number, end in enumerate(ends)), True
            )

    def _context_options(self, n_cells: int) -> PooledOptions:
        """Return the options of an embedding context with `n_cells` KV cells."""
        options = self._options
        pass_tokens = max_vector_rows = max(n_cells, MAX_TEXTS)
        if self.is_causal and self.pooling in ("last", "rank"):
            pass_tokens, max_vector_rows = PASS_TOKENS, MAX_TEXTS
        elif self.is_causal:
            pass_tokens = max_vector_rows = max(
                MAX_TEXTS, min(PASS_TOKENS, max_logit_rows(self._model.n_vocab))
            )
        assert options.threads
        return PooledOptions(
            n_cells,
            pass_tokens,
            MAX_TEXTS,
            max_vector_rows,
            self.pooling,
            options.threads,
            options.threads_batch or options.threads,
            options.cache_type_k,
            options.cache_type_v,
            options.flash_attn,
            self._gemm_min_rows,
        )


class EmbeddingJob:
    """The computation of the vectors of several texts, one forward pass per step. When `step` has
    returned False, `vectors` contains the normalized vector of each text, its scores for a
    reranking model, or the vectors of its tokens `[tokens, vector_size]`, which are not normalized.
    """

    def __init__(self, embedder: Embedder, texts: Sequence[Sequence[int]], norm: int) -> None:
        self.vectors: list[Vector] = []
        self.tokens = sum(map(len, texts))  # total number of tokens
        self.n_passes = 0  # forward passes so far
        self._norm = norm
        self._steps = self._run(embedder, texts)

    def step(self) -> bool:
        """Compute one forward pass and return True. Return False when all passes are computed."""
        is_computed = next(self._steps, False)
        self.n_passes += is_computed
        return is_computed

    def _run(self, embedder: Embedder, texts: Sequence[Sequence[int]]) -> Iterator[bool]:
        """Compute the vectors of all texts, and yield True after each forward pass. Where a text
        needs several passes, its vectors are averaged with the number of tokens as weights (mean),
        or the vector of the first (cls) or the last pass is used.
        """
        pooled = embedder.ensure_context(max(map(len, texts)))
        for group in embedder.groups(texts):
            group_texts = [texts[number] for number in group]
            sums = np.zeros((len(group_texts), pooled.vector_size), np.float64)
            token_vectors: list[list[Vector]] = [[] for _ in group_texts]
            pooled.clear()
            for forward_pass in embedder.passes(group_texts):
                if not forward_pass.gives_vectors:
                    pooled.read(forward_pass.rows(group_texts))
                else:
                    vectors = pooled.compute_vectors(forward_pass.rows(group_texts))
                    for number, start, end in forward_pass.pieces:
                        if embedder.gives_token_vectors:
                            token_vectors[number].append(vectors[number])
                        elif embedder.pooling == "mean":
                            sums[number] += vectors[number].astype(np.float64) * (end - start)
                        elif embedder.pooling != "cls" or start == 0:
                            sums[number] = vectors[number]
                yield True
            if embedder.gives_token_vectors:
                self.vectors += [np.concatenate(pieces) for pieces in token_vectors]
            else:
                norm = NO_NORM if embedder.is_reranker else self._norm
                self.vectors += [normalize(vector, norm) for vector in sums]


def resolve_pooling(header: ModelHeader, is_causal: bool, wanted: str | None = None) -> str:
    """Return how the vectors of a text's tokens become the vector of the text: "mean", "cls" (the
    first token), "last", or "rank" for a reranking model. "none" keeps the vectors of the tokens.

    `wanted` is the user's choice and precedes that of the file. Without either, a model is a
    reranking model if it reads a text in one pass and its head gives one score; other causal models
    get "last", and all others "mean".

    Raises UserError if `wanted` contradicts the file, or if a reranking model has no head.
    """
    kind = header.metadata.get(f"{header.architecture}.pooling_type")
    names = {number: name for name, number in POOLING.items()}
    name = names.get(kind, "none") if isinstance(kind, int) else "none"
    if "rank" in (name, wanted):
        if wanted not in (None, "rank"):
            raise UserError(
                "this model ranks pairs of texts and has no pooling", hint="leave out --pooling"
            )
        if not _has_rerank_head(header):
            raise UserError(
                "a model that ranks pairs of texts needs a head, and this file has no"
                f" {RERANK_HEADS[0]} with a row for each of its labels",
                hint="use another model" if name == "rank" else "leave out --pooling",
            )
        return "rank"
    if wanted or name != "none":
        return wanted or name
    if not is_causal and _count_labels(header) == 1 and _has_rerank_head(header):
        return "rank"
    return "last" if is_causal else "mean"


def _count_labels(header: ModelHeader) -> int:
    """Return the number of labels of a classifier, which is the number of scores of a pair."""
    labels = header.metadata.get(f"{header.architecture}.classifier.output_labels")
    return max(1, labels.count) if isinstance(labels, GgufArray) else 1


def _has_rerank_head(header: ModelHeader) -> bool:
    """Return whether the last matrix of the model's head gives as many values as it has labels."""
    shapes = {tensor.name: tuple(tensor.shape) for tensor in header.tensors}
    shape = next((shapes[name] for name in RERANK_HEADS if name in shapes), ())
    return len(shape) > 0 and (shape[1] if len(shape) > 1 else 1) == _count_labels(header)


def normalize(vector: Vector | np.ndarray, norm: int = EUCLIDEAN) -> Vector:
    """Return the vector divided by its norm, as llama.cpp's common_embd_normalize does. A vector of
    zeros is not changed.

    `norm`: EUCLIDEAN, NO_NORM (the vector as it is), 0 (the largest absolute value becomes 32760),
    or the p of a p-norm.
    """
    wide = np.asarray(vector, np.float64)
    if norm == NO_NORM:
        return wide.astype(np.float32)
    if norm == 0:
        length = float(np.abs(wide).max(initial=0.0)) / MAX_INT16
    elif norm == EUCLIDEAN:
        length = math.sqrt(float(wide @ wide))
    else:
        length = float((np.abs(wide) ** norm).sum()) ** (1 / norm)
    return (wide / length if length > 0 else wide).astype(np.float32)


def split_into_passes(
    lengths: Sequence[int], max_tokens: Callable[[], int]
) -> Iterator[tuple[tuple[int, int, int], ...]]:
    """Divide texts of these lengths into passes, and yield the pieces of each pass. A piece is the
    index of a text and a range of its tokens, as start and end.

    `max_tokens`: returns the maximum number of tokens of the next pass. It is called before each
    pass, because the maximum depends on whether answers are being generated.
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
