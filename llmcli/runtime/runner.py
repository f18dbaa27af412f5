"""`Runner`: a model that is loaded and ready to answer, with its llama.cpp context, its engine and
its chat template.

All commands that run a model use it. It turns conversations and texts into prompts, starts replies,
computes embeddings and reports the memory of the KV cache.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from llmcli.errors import UserError
from llmcli.runtime import kv_size, reproducible
from llmcli.runtime.binding.contexts.context import Context
from llmcli.runtime.binding.contexts.context_options import MAX_SEQUENCES, ContextOptions
from llmcli.runtime.binding.contexts.open_context import open_context
from llmcli.runtime.binding.grammar import NativeGrammars
from llmcli.runtime.binding.kernels import gemm, products
from llmcli.runtime.binding.model import Model, open_model
from llmcli.runtime.binding.placement.model_placement import EVERYWHERE, ON_HOST, ModelPlacement
from llmcli.runtime.binding.rows.batch import no_cache_error
from llmcli.runtime.binding.sampler import NativeChains
from llmcli.runtime.constraint.base import Grammar
from llmcli.runtime.constraint.compile import GrammarCompiler
from llmcli.runtime.draft_settings import (
    DEFAULT_DRAFTING,
    MIN_DRAFT_ROWS,
    NO_DRAFTING,
    DraftSettings,
    uses_gpu,
)
from llmcli.runtime.drafting.gain.pass_cost import MeasuredPasses
from llmcli.runtime.drafting.ngram import PromptLookup
from llmcli.runtime.drafting.ngram_pool import PoolDrafter
from llmcli.runtime.engine import prefill_context
from llmcli.runtime.engine.engine import Engine
from llmcli.runtime.engine.prefill_context import PrefillContext
from llmcli.runtime.engine.thread_team import ThreadTeam
from llmcli.runtime.interrupt import on_interrupt
from llmcli.runtime.model_identity import file_stamp
from llmcli.runtime.open_speculation import DraftTarget, open_speculation
from llmcli.runtime.requests.beam_settings import TooManyBeams
from llmcli.runtime.requests.end_conditions import NO_CONDITIONS
from llmcli.runtime.requests.request import Answer, Request, RunOptions
from llmcli.runtime.requests.thinking import ThinkingLimit
from llmcli.runtime.sampling import logit_bias
from llmcli.runtime.scoring.embedder import Embedder
from llmcli.runtime.strategies.base import Speculation
from llmcli.runtime.text.chat_template import PART_PROBES, ChatTemplate
from llmcli.runtime.text.prompt_tokens import begins_with, find_turn_marks, tokenize_prompt
from llmcli.runtime.text.reasoning import (
    CHANNEL_TAGS,
    THINKING_TAGS,
    ThinkingTags,
    find_opened_tags,
)
from llmcli.runtime.text.thinking_close import ThinkingClose, find_thinking_close
from llmcli.runtime.text.tracked_text import TrackedText
from llmcli.types import Event, Message
from quant.model_file import load_checks, model_header, read_header

# drafters that --ngram-draft switches: from repetitions in the text, and in earlier answers
REPETITION_DRAFTERS = (PromptLookup.name, PoolDrafter.name)
MAX_TAG_TOKENS = 16  # maximum number of tokens of a thinking tag at the end of a prompt
STATE_CELL_BYTES = 12  # of each cell in a saved state: position, number of owners, owner
NAMED_TEMPLATE_KEY = "tokenizer.chat_template."


@dataclass(frozen=True, slots=True)
class KVReport:
    """The memory of a context, as `/kv` and `/metrics` show it.

    `allocated_bytes` and `compute_bytes` are None when this build of llama.cpp does not report
    memory. `predicted_bytes` and `bytes_per_token` are None when the cache of this architecture
    cannot be predicted.
    """

    type_k: str
    type_v: str
    bytes_per_token: int | None  # bytes of one token in the KV cache
    cells: int  # number of cells of the KV cache
    used_cells: int  # cells that hold a token
    predicted_bytes: int | None  # of the KV cache, predicted from the file's header
    allocated_bytes: int | None  # of the KV cache, reported by llama.cpp
    compute_bytes: int | None  # of the buffers for intermediate results
    output_bytes: int  # of the buffer for logits


class Reply:
    """One or several answers to a prompt while they are generated. Iterate over the object to
    generate them and get their events. Then read `answers`. A Ctrl-C ends the answers early.
    """

    def __init__(
        self, engine: Engine, context: Context, request: Request, samples: int = 1
    ) -> None:
        self._engine, self._context = engine, context
        self.ids = engine.submit_samples(request, samples)
        self._answers: dict[int, Answer] = {}

    def __iter__(self) -> Iterator[Event]:
        """Compute passes until all answers are finished, and yield the events of each pass. Ctrl-C
        ends the answers, not the program.

        If the caller stops iterating, the answers are aborted. Raises the UserError of an answer
        that failed.
        """
        try:
            with on_interrupt(self.stop, self.end_thinking):
                while len(self._answers) < len(self.ids):
                    for event in self._engine.step():
                        if event.finish is not None:
                            answer = self._answers[event.sequence] = self._engine.pop_answer(
                                event.sequence
                            )
                            if answer.error:
                                raise answer.error
                        yield event
        finally:
            for sequence_id in self.ids:
                self._engine.abort(sequence_id)

    def stop(self) -> None:
        """Finish the answers with the text that they have so far, within milliseconds. This method
        may be called from any thread.
        """
        self._engine.cancel(*self.ids)
        self._context.interrupt()

    def end_thinking(self) -> None:
        """Make the answers end their thinking, so that their replies follow. This method may be
        called from any thread.
        """
        self._engine.end_thinking(*self.ids)

    @property
    def answers(self) -> list[Answer]:
        """Return the finished answers in the order of their seeds. Read this only after the
        iteration has ended.
        """
        assert len(self._answers) == len(self.ids), "read the answers after the last event"
        return [self._answers[sequence_id] for sequence_id in self.ids]

    @property
    def answer(self) -> Answer:
        """Return the finished answer of the first seed, which is the only one without samples."""
        return self.answers[0]


@dataclass(frozen=True, slots=True)
class OpenedParts:
    """The opened objects and the settings from which a `Runner` is created."""

    header: model_header.ModelHeader
    model: Model
    context: Context
    options: RunOptions
    template: ChatTemplate | None  # None for a base model, which continues text
    load_ms: float  # milliseconds that opening took
    native_sampling: bool  # whether to sample with llama.cpp's samplers where it has all steps
    speculation: Speculation | None = None  # None when nothing is drafted
    drafting: DraftSettings = DEFAULT_DRAFTING  # as the user has set it
    draft_obstacle: str = ""  # why nothing is drafted, as it was found when the model was opened
    measured_passes: MeasuredPasses | None = None  # for another load of the model
    prefill_context: PrefillContext | None = None  # a second context that computes prompts
    thread_team: ThreadTeam | None = None  # chooses the number of threads; None: it is fixed


class Runner:
    """A loaded model that answers requests. Made by `open_runner`, and unusable after its `with`
    block.
    """

    def __init__(self, parts: OpenedParts) -> None:
        self.header, self.options, self.template = parts.header, parts.options, parts.template
        self.model = model = parts.model
        self.context = context = parts.context
        self.load_ms, self.ngram_draft = parts.load_ms, parts.drafting.ngram
        self.drafting = parts.drafting
        self._speculation, self._draft_obstacle = parts.speculation, parts.draft_obstacle
        self.measured_passes = parts.measured_passes
        for token in _tag_tokens(model):
            model.show_as_text(token)
        self.file_stamp = file_stamp(parts.header.files)
        self.native_grammars = NativeGrammars(model)
        self.grammars = GrammarCompiler(model, self.native_grammars.compile)
        self._shape = kv_size.read_shape(parts.header.metadata)
        if self._shape and parts.options.reproducible:
            self._shape = kv_size.without_windows(self._shape)
        self.engine = Engine(
            context,
            model,
            NativeChains(
                model.n_vocab,
                model.vocab,
                parts.options.threads_batch or parts.options.threads or 1,
            )
            if parts.native_sampling
            else None,
            parts.speculation,
            keeps_idle=not parts.options.reproducible or context.n_seq_max == 1,
            prefill_reader=parts.prefill_context,
            exact_rows=context.n_batch
            if parts.options.reproducible
            else max(1, parts.speculation.exact_rows if parts.speculation else 1),
            token_bytes=self._predict_token_bytes(),
            thread_team=parts.thread_team,
            overlaps_passes=parts.options.overlaps_passes,
        )
        # The sizes are read only once: they never change, and each query leaks a few bytes in
        # llama.cpp.
        breakdown = context.memory_breakdown()
        self._kv_bytes = breakdown.context_bytes if breakdown else None
        self._compute_bytes = breakdown.compute_bytes if breakdown else None
        # bytes of weights in pages that the system counts as free, but that must stay in memory
        self.mapped_bytes = 0
        if parts.options.apply_to(ON_HOST).maps_file:
            self.mapped_bytes = breakdown.mapped_bytes if breakdown else self.header.tensor_bytes
        # bytes of the context that computes prompts
        self.prefill_bytes = parts.prefill_context.nbytes if parts.prefill_context else 0
        self._thinking_closes: dict[ThinkingTags, ThinkingClose] = {}  # those that were needed
        self._known_turn_marks: frozenset[int] | None = None  # None until they are needed
        self.pooling: str | None = None  # pooling of embeddings; None uses that of the file
        self.embedding_tokens: int | None = None  # of the longest text; None: those of the context
        self._embedder: Embedder | None = None

    @property
    def n_ctx(self) -> int:
        """Return how many tokens the context can hold, prompt and answer together."""
        return self.context.n_ctx

    @property
    def can_generate(self) -> bool:
        """Return whether the model can generate text. A model without a KV cache can only compute
        embeddings.
        """
        return bool(self.context.memory)

    def embedder(self) -> Embedder:
        """Return the embedder of this model, which is created with the first call. Its context is
        created with its first text. Call this method on the engine's thread.

        Raises UserError under the conditions of embedder.resolve_pooling.
        """
        if self._embedder is None:
            self._embedder = Embedder(
                self.model,
                self.context,
                self.header,
                self.options,
                self.pooling,
                self.embedding_tokens,
            )
        return self._embedder

    @property
    def embedding_bytes(self) -> int | None:
        """Return the bytes of the embedder's context. It is 0 before the first text, and None when
        this build of llama.cpp does not report memory.
        """
        return self._embedder.nbytes if self._embedder else 0

    def close(self) -> None:
        """Free the grammars and the embedder. `open_runner` frees the model and its context."""
        self.native_grammars.close()
        if self._embedder is not None:
            self._embedder.close()

    def default_strategy(self, grammar: Grammar | None = None) -> str:
        """Return the name of the decoding strategy for a request that does not ask for beam
        search.
        """
        return (
            "speculative" if self.engine.resources.speculation else "guided" if grammar else "plain"
        )

    @property
    def draft_obstacle(self) -> str:
        """Return why nothing is drafted although the user has turned drafting on; "" otherwise."""
        if not self.drafting.is_requested:
            return ""
        if self._speculation is not None:
            errors = [drafter.failure for drafter in self._speculation.drafters]
            return "; ".join(f"llama.cpp failed: {error}" for error in errors if error)
        if self.options.reproducible and self.context.n_seq_max > 1:
            return "with --reproducible, only a context of one sequence can draft"
        if self.context.n_batch < MIN_DRAFT_ROWS:
            return f"a batch of {self.context.n_batch} tokens is too small (-b)"
        return self._draft_obstacle

    @property
    def drafts_repetitions(self) -> bool:
        """Return whether the model was loaded with a drafter that --ngram-draft switches."""
        speculation = self._speculation
        return speculation is not None and any(
            drafter.name in REPETITION_DRAFTERS for drafter in speculation.drafters
        )

    def set_ngram_draft(self, ngram: str) -> bool:
        """Use `ngram` (auto, on or off) as the value of --ngram-draft for later answers. Return
        False, with nothing changed, when it is "on" but the model was loaded without such drafters.
        """
        loaded = self._speculation
        if ngram == "on" and not self.drafts_repetitions:
            return False
        self.ngram_draft = ngram
        if loaded and self.drafts_repetitions:
            is_named = self.drafting.method == PoolDrafter.name  # so "auto" is not left to llmcli
            uses_repetitions = ngram == "on" or (
                ngram == "auto" and (is_named or loaded.exact_rows > 0)
            )
            others = tuple(
                drafter for drafter in loaded.drafters if drafter.name not in REPETITION_DRAFTERS
            )
            drafters = loaded.drafters if uses_repetitions else others
            only_exact = ngram == "auto" and not others and not is_named
            speculation = replace(loaded, drafters=drafters) if drafters else None
            if speculation and only_exact:
                speculation = replace(
                    speculation, max_rows=loaded.exact_rows, is_reproducible=True, max_branches=1
                )
            self.engine.resources = replace(self.engine.resources, speculation=speculation)
        return True

    def encode_chat(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True
    ) -> tuple[int, ...]:
        """Return the token ids of a conversation, rendered with the model's chat template. The
        model must have one.
        """
        assert self.template is not None, "a base model has no template"
        return self.encode_prompt(
            self.template.render(messages, add_generation_prompt=add_generation_prompt)
        )

    def encode_prompt(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a text that the chat template rendered. The tokenizer adds no BOS
        token if the template has written one.

        The names of control tokens in a text from outside the template stay text. In a text without
        sources, every name becomes its token.
        """
        add_bos = self.model.add_bos and not self.begins_with_bos(text)
        return tuple(tokenize_prompt(self.model, text, add_bos, self._turn_marks))

    def begins_with_bos(self, text: str) -> bool:
        """Return whether the chat template has written a BOS token at the beginning of a prompt."""
        return self.template is not None and begins_with(text, self.template.bos)

    def _turn_marks(self) -> frozenset[int]:
        """Return the user-defined tokens with which the chat template marks the turns of a
        conversation.
        """
        if self._known_turn_marks is None:
            tags = {tag for tags in THINKING_TAGS for tag in (tags.opening, tags.closing)}
            try:
                prompt = (
                    self.template.render(PART_PROBES["assistant"])
                    if self.template
                    else TrackedText("")
                )
            except UserError:
                prompt = TrackedText("")
            marks = find_turn_marks(self.model, prompt)
            thinking = {
                token
                for token, special in self.model.special_tokens(marks).items()
                if special.name in tags
            }
            self._known_turn_marks = marks - thinking
        return self._known_turn_marks

    def show_control_tokens(self, words: Iterable[str]) -> None:
        """Include the control tokens of these words, such as the tags of function calls, in the
        text of answers; normally control tokens are left out. Call this before the first answer.
        """
        for token in {token for word in words for token in self.model.tokenize(word, special=True)}:
            if self.model.is_control(token):
                self.model.show_as_text(token)

    def encode_text(self, text: str) -> tuple[int, ...]:
        """Return the token ids of plain text, with a BOS token before it if the file asks for one.
        The names of control tokens in the text are read as ordinary text.
        """
        ids = self.model.tokenize(text, special=False, add_special=self.model.add_bos)
        if not ids and self.model.bos is not None:
            ids = [self.model.bos]
        return tuple(ids)

    def opened_tags(self, tokens: Sequence[int]) -> ThinkingTags | None:
        """Return the thinking tags whose opening tag ends the prompt `tokens`, or None. The answer
        to such a prompt starts inside the thinking.
        """
        tail = b"".join(self.model.piece(token, special=True) for token in tokens[-MAX_TAG_TOKENS:])
        return find_opened_tags(tail.decode("utf-8", "replace"))

    def thinking_limit(self, opened: ThinkingTags | None, budget: int | None) -> ThinkingLimit:
        """Return how long an answer may think. `opened`: the thinking tags that are open at the end
        of its prompt, or None. `budget`: the largest number of tokens inside them, or None.
        """
        return ThinkingLimit(self._closing_tokens, opened, budget)

    def _closing_tokens(
        self, tags: ThinkingTags, n_written: int, is_line_start: bool, is_constrained: bool
    ) -> tuple[int, ...]:
        """Return the tokens that end thinking in these tags (see ClosingTokens)."""
        close = self._thinking_closes.get(tags)
        if close is None:
            close = self._thinking_closes[tags] = find_thinking_close(self.template, tags)
        after = "" if is_constrained else close.after
        rest = tags.closing.encode()[n_written:].decode("utf-8", "replace")
        if n_written and tags.closing.endswith(rest):
            return self._tokenize_exactly(rest, after)
        line_end = "" if is_line_start else close.line_end
        return self._tokenize_exactly(line_end + close.before + close.tag, after)

    def _tokenize_exactly(self, *texts: str) -> tuple[int, ...]:
        """Return the tokens of joined texts, in which the names of control tokens become these
        tokens. A space that the tokenizer puts before a text is left out.
        """
        model = self.model

        def spell(tokens: Sequence[int]) -> bytes:
            return b"".join(model.piece(token, special=True) for token in tokens)

        joined = "".join(texts)
        tokens = model.tokenize(joined, special=True)
        if spell(tokens) == joined.encode():
            return tuple(tokens)
        tokens = []
        for text in texts:
            part = model.tokenize(text, special=True)
            tokens += part[1:] if spell(part[1:]) == text.encode() else part
        return tuple(tokens)

    def reply(self, request: Request, samples: int = 1) -> Reply:
        """Start an answer to a request, or `samples` answers with different seeds. They are
        generated while the caller iterates over the result.

        Raises UserError under the conditions of `check_request`.
        """
        self.check_request(request, samples)
        return Reply(self.engine, self.context, request, samples)

    def check_request(self, request: Request, samples: int = 1) -> None:
        """Raise UserError when this model or its context cannot answer the request `samples` times,
        for example because the prompt is too long.
        """
        if not self.can_generate:
            raise no_cache_error(self.model.is_diffusion, self.model.is_encoder_decoder)
        logit_bias.check_biases(request.sampling["logit_bias"], self.model.n_vocab)
        count = len(request.tokens)
        if count == 0:
            raise UserError("the prompt is empty", hint="enter a question, or give one with -p")
        if count >= self.n_ctx:
            raise UserError(
                f"the prompt has {count} tokens; the context holds {self.n_ctx} tokens "
                "and must leave room for an answer",
                hint=f"shorten the prompt, or use --ctx-size {kv_size.round_up_cells(count + 512)}",
            )
        if request.strategy == "beam":
            self._refuse_beams(request)
            if request.thinking and request.thinking.budget is not None:
                raise UserError(
                    "a beam search has no budget of thinking tokens",
                    hint="leave out --reasoning-budget (-1 in a request: no budget), or the beams",
                )
        if request.grammar and request.ignore_eos:
            raise UserError(
                "a grammar says where the answer ends, but --ignore-eos ignores the end",
                hint="leave out --ignore-eos or the grammar",
            )
        if request.grammar and request.strategy == "post_sampling":
            raise UserError(
                "post_sampling_probs does not work inside a grammar",
                hint="leave out post_sampling_probs or the grammar",
            )
        _check_end_conditions(request, self.model.n_vocab)
        if samples > 1:
            self._refuse_samples(samples, count, request.max_tokens)

    def _refuse_samples(self, samples: int, prompt: int, max_tokens: int | None) -> None:
        """Raise UserError when the context has too few cells for several samples. Without a limit
        of tokens (`max_tokens` None), it is enough that one token of each sample fits. `prompt`:
        the number of prompt tokens.
        """
        # the last token of an answer takes no cell
        answer_cells = 1 if max_tokens is None else max(0, max_tokens - 1)
        prompt_cells = prompt if self.engine.ledger.can_branch else samples * prompt
        cells = prompt_cells + samples * answer_cells
        if cells > self.n_ctx:
            length = "" if max_tokens is None else f" of {max_tokens} tokens"
            raise UserError(
                f"{samples} samples{length} and a prompt of {prompt} tokens need {cells} cells, "
                f"the context has {self.n_ctx}",
                hint=f"use --ctx-size {kv_size.round_up_cells(cells)}, a smaller -n, or fewer samples",
            )

    def _refuse_beams(self, request: Request) -> None:
        """Raise UserError when this context cannot run the request's beam search."""
        beams, count = request.search.beams, len(request.tokens)
        if beams > self.context.n_seq_max:
            raise TooManyBeams(beams, self.context.n_seq_max)
        if beams > self.context.n_batch:  # all beams get their next tokens in one pass
            raise UserError(
                f"{beams} beams need passes of {beams} tokens, and those of this context have at "
                f"most {self.context.n_batch}",
                hint=f"use --ubatch-size {beams}, or fewer beams",
            )
        if not self.engine.ledger.can_branch:
            raise UserError(
                "beams share cells, and this context has a separate cache for each sequence",
                hint="leave out --beams",
            )
        if count + beams > self.n_ctx:
            raise UserError(
                f"the prompt has {count} tokens and each of {beams} beams adds more; "
                f"the context holds {self.n_ctx} tokens",
                hint=f"shorten the prompt, or use --ctx-size {kv_size.round_up_cells(count + 64 * beams)}",
            )

    def kv_report(self) -> KVReport:
        """Return the present memory of the context: predicted and allocated bytes, and the cells in
        use.
        """
        cache = self.predict_cache(self.options.cache_type_k, self.options.cache_type_v)
        return KVReport(
            self.options.cache_type_k,
            self.options.cache_type_v,
            cache.bytes_per_token if cache else None,
            self.context.n_ctx,
            self.engine.ledger.used_cells,
            cache.nbytes if cache else None,
            self._kv_bytes,
            self._compute_bytes,
            self.context.output_bytes,
        )

    def _predict_token_bytes(self) -> int:
        """Return the bytes of a token in a saved state, or 0 when they cannot be predicted."""
        cache = self.predict_cache(self.options.cache_type_k, self.options.cache_type_v)
        return cache.bytes_per_token + STATE_CELL_BYTES if cache else 0

    def predict_cache(
        self, type_k: str, type_v: str, n_ctx: int | None = None
    ) -> kv_size.KVCache | None:
        """Return the predicted KV cache of a context like this one with other cache types, and with
        `n_ctx` tokens if given. Return None when it cannot be predicted, or when llama.cpp would
        refuse these types.
        """
        if self._shape is None or kv_size.find_refusal(self._shape, type_k, type_v):
            return None
        flash = self.options.flash_attn != "off"
        return kv_size.predict_cache(
            self._shape,
            n_ctx or self.context.n_ctx,
            type_k,
            type_v,
            n_ubatch=self.context.n_ubatch,
            n_seq_max=self.context.n_seq_max,
            flash=flash,
        )


def context_options(
    options: RunOptions,
    slots: int,
    drafting: DraftSettings,
    placement: ModelPlacement,
    header: model_header.ModelHeader,
) -> ContextOptions:
    """Return the options of the llama.cpp context for these run options. `options` must have
    ctx_size and threads. `slots`: the number of sequences. `placement`: that of the model.

    Raises UserError if the user has requested drafts that this model does not offer.
    """
    assert options.ctx_size and options.threads, options
    draft_rows = drafting.max_outputs(header, options, uses_gpu(placement))
    predicts = drafting.uses_prediction(header, options, uses_gpu(placement))
    outputs = max(draft_rows, options.scoring_outputs + slots)
    rows = (
        min(options.max_rows, prefill_context.DECODE_UBATCH_ROWS)
        if options.prefill_cells
        else options.max_rows
    )
    # recurrent state and sliding windows have no parts, and each sequence takes memory in them
    shape = kv_size.read_shape(header.metadata) if options.saves_states else None
    has_spare = shape is not None and not shape.window and slots < MAX_SEQUENCES
    n_sequences = slots + (options.prefill_cells > 0 or has_spare)
    return ContextOptions(
        options.ctx_size,
        options.batch_size,
        rows,
        slots,
        options.threads,
        options.threads_batch or options.threads,
        options.cache_type_k,
        options.cache_type_v,
        options.flash_attn,
        n_outputs=outputs,
        outputs_final_states=drafting.heads is not None,
        offload_kqv=options.kv_offload,
        swa_full=options.reproducible,
        can_append=options.prefill_cells > 0,
        has_spare=has_spare,
        gemm_min_rows=gemm.choose_min_rows(options.gemm, slots, draft_rows > 1),
        # the guesses of the shortest draft can be dropped for nothing
        n_rs_seq=MIN_DRAFT_ROWS - 1 if predicts or drafting.is_requested else 0,
        outputs_states=predicts,
        n_branches=drafting.count_branches(header, options, n_sequences),
    )


@contextmanager
def open_runner(
    path: Path,
    options: RunOptions,
    *,
    template: str | None = None,
    raw: bool = False,
    slots: int = 1,
    placement: ModelPlacement = EVERYWHERE,
    native_sampling: bool = True,
    drafting: DraftSettings = NO_DRAFTING,
    needs_text: bool = True,
    measured_passes: MeasuredPasses | None = None,
    was_rehearsed: bool = False,
) -> Iterator[Runner]:
    """Check and load a GGUF file, and yield its runner. Everything is freed after the `with` block.

    - `options`: must have ctx_size and threads (planning/resolve_options.py).
    - `template`: the text of a chat template that replaces the file's. `raw`: use no template.
    - `slots`: the number of sequences that can be computed at once.
    - `placement`: on which devices the weights are put.
    - `needs_text`: whether the model must generate text. False also accepts a model that only
      computes embeddings.
    - `measured_passes`: those of an earlier load with the same options; None: they are measured if
      drafts need them.
    - `was_rehearsed`: whether a child process has loaded this file before.

    Raises UserError for a file that is damaged or that llama.cpp does not run, for a model that
    writes by diffusion, and for an embedding model if `needs_text`.
    """
    start_time = time.perf_counter()
    header = read_header.read_header(path)
    load_checks.check_loadable(header, was_rehearsed=was_rehearsed)
    kv_size.check_cache(header.metadata, options.cache_type_k, options.cache_type_v)
    requested_drafting = drafting = drafting.for_draft_file(header)
    if options.reproducible:
        reproducible.check_model(header)
        # With several sequences, the cells of rejected drafts would be reused by another sequence,
        # and its cells would no longer be in the order of its tokens.
        if slots > 1:
            drafting = NO_DRAFTING
    context_settings = context_options(options, slots, drafting, placement, header)
    opened = (
        reproducible.open_reproducible(header, context_settings, placement.on_host())
        if options.reproducible
        else _open_model(header, context_settings, placement)
    )
    with ExitStack() as stack:
        model, context = stack.enter_context(opened)
        if not context.memory:
            if needs_text or model.is_diffusion:
                raise no_cache_error(model.is_diffusion, model.is_encoder_decoder)
            drafting = NO_DRAFTING  # drafting needs a KV cache
        prefill = (
            stack.enter_context(
                prefill_context.open_prefill_context(model, context, context_settings, options)
            )
            if options.prefill_cells
            else None
        )
        target = DraftTarget(header, model, context, options, placement, measured_passes)
        drafts = stack.enter_context(open_speculation(drafting, target))
        parts = OpenedParts(
            header,
            model,
            context,
            options,
            template=None if raw else open_template(header, model, template),
            load_ms=(time.perf_counter() - start_time) * 1e3,
            native_sampling=native_sampling,
            speculation=drafts.speculation,
            drafting=requested_drafting,
            draft_obstacle=drafts.obstacle,
            measured_passes=drafts.passes,
            prefill_context=prefill,
            thread_team=_thread_team(context, options, placement),
        )
        runner = Runner(parts)
        stack.callback(runner.close)
        yield runner


def _thread_team(
    context: Context, options: RunOptions, placement: ModelPlacement
) -> ThreadTeam | None:
    """Return what changes the number of threads of a context; None if it is fixed, or does not
    matter because a GPU computes.
    """
    assert options.threads, options
    if not options.adapts_threads or options.threads == 1 or uses_gpu(placement):
        return None
    batch_threads = options.threads_batch or options.threads
    return ThreadTeam(
        options.threads,
        # a context that has its full number computes passes of several rows with theirs
        lambda count: context.set_threads(
            count, batch_threads if count == options.threads else min(count, batch_threads)
        ),
        lambda: not products.leaves_attention_to_ggml(),
    )


def open_template(
    header: model_header.ModelHeader, model: Model, source: str | None = None
) -> ChatTemplate | None:
    """Return the chat templates of a model file; None if it has none. `source`: the text of a
    template that replaces them.
    """
    main = source or header.chat_template
    if not main:
        return None
    named = {
        key.removeprefix(NAMED_TEMPLATE_KEY): value
        for key, value in header.metadata.items()
        if key.startswith(NAMED_TEMPLATE_KEY) and isinstance(value, str) and not source
    }
    bos, eos = model.token_text(model.bos), model.token_text(model.eos)
    return ChatTemplate(main, bos=bos, eos=eos, named=named)


@contextmanager
def _open_model(
    header: model_header.ModelHeader, options: ContextOptions, placement: ModelPlacement
) -> Iterator[tuple[Model, Context]]:
    """Open the model with this header, and a context for it."""
    opened = open_model(header.path, placement.for_header(header), load_mtp=options.outputs_states)
    with opened as model, open_context(model, options) as context:
        yield model, context


def _check_end_conditions(request: Request, n_vocab: int) -> None:
    """Raise UserError for conditions that contradict the rest of the request, or that name tokens
    outside a vocabulary of `n_vocab` tokens.
    """
    conditions = request.end_conditions
    if unknown := next((token for token in conditions.stop_tokens if token >= n_vocab), None):
        raise UserError(
            f"stop_token_ids names token {unknown}, but the vocabulary ends at {n_vocab - 1}",
            hint="run --json shows the ids of a model's tokens",
        )
    if request.grammar and conditions.min_tokens:
        raise UserError(
            "a grammar says where the answer ends, but min_tokens forbids the end",
            hint="leave out min_tokens or the grammar",
        )
    if request.strategy == "beam" and conditions != NO_CONDITIONS:
        raise UserError(
            "a beam search has no stop_token_ids, min_tokens, n_indent or t_max_predict_ms",
            hint="leave them or beams out",
        )


def _tag_tokens(model: Model) -> set[int]:
    """Return the control tokens that are part of thinking tags. Answers must show them as text, so
    that the thinking can be found there.
    """
    tag_texts = [text for tags in THINKING_TAGS for text in (tags.opening, tags.closing)]
    tokens = {
        token
        for text in tag_texts
        for token in model.tokenize(text, special=True)
        if model.is_control(token)
    }
    if any(model.piece(token, special=True) == b"<|channel|>" for token in tokens):
        tokens |= {
            token
            for text in CHANNEL_TAGS
            for token in model.tokenize(text, special=True)
            if model.is_control(token)
        }
    return tokens
