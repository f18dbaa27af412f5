"""Prepare speculative decoding for a model: read the settings --draft, --model-draft and
--ngram-draft, open the draft model, the draft heads or the model's prediction layers, and measure the
cost of passes.

Without these settings llmcli drafts only where drafting cannot change the answer. This needs a CPU and
quantized K and V: there, several tokens in one pass have bit for bit the logits that they would
have one by one, which is measured when the model is loaded. With a float KV cache llama.cpp
computes a single token differently from several. The answer may then change where two tokens are
almost equally likely. A method that is named accepts that.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from llmcli.errors import UsageError, UserError
from llmcli.runtime.binding.contexts.context import Context
from llmcli.runtime.binding.contexts.context_options import MAX_SEQUENCES, ContextOptions
from llmcli.runtime.binding.contexts.eagle_context import (
    MAX_ROWS,
    EagleContext,
    LayerInputs,
    can_read_layer_inputs,
)
from llmcli.runtime.binding.contexts.open_context import (
    open_context,
    open_eagle_context,
    open_prediction_context,
)
from llmcli.runtime.binding.contexts.prediction_context import (
    ARCHITECTURES as PREDICTING_ARCHITECTURES,
)
from llmcli.runtime.binding.contexts.prediction_context import prediction_options, stop_states
from llmcli.runtime.binding.model import Model, open_model
from llmcli.runtime.binding.placement.devices import free_gpu_bytes
from llmcli.runtime.binding.placement.model_placement import ModelPlacement
from llmcli.runtime.drafting import drafters
from llmcli.runtime.drafting.base import DrafterResources
from llmcli.runtime.drafting.draft_files.eagle3_match import (
    EAGLE3,
    count_layers,
    is_eagle3,
    read_layers,
    require_eagle3_match,
)
from llmcli.runtime.drafting.draft_files.head_graph import open_heads
from llmcli.runtime.drafting.draft_files.heads_file import (
    BLOCKWISE,
    HEAD_METHODS,
    MEDUSA,
    DraftHeads,
    is_heads_file,
    read_heads,
    require_fitting_heads,
)
from llmcli.runtime.drafting.draft_files.vocabulary_match import require_same_vocabulary
from llmcli.runtime.drafting.draft_length import MIN_GAIN
from llmcli.runtime.drafting.draft_model import CHUNK_TOKENS
from llmcli.runtime.drafting.gain.pass_cost import (
    MAX_PASS_ROWS,
    PASS_ROWS,
    PassCost,
    measure_pass_cost,
)
from llmcli.runtime.kv_size import read_shape
from llmcli.runtime.requests.request import RunOptions
from llmcli.runtime.strategies.base import Speculation
from quant.model_file import load_checks, read_header
from quant.model_file.model_header import ModelHeader

NGRAM_DRAFT_MODES = ("auto", "on", "off")
METHODS = (
    "auto",
    "off",
    "ngram",
    "pool",
    "lookahead",
    "model",
    "mtp",
    "eagle3",
    *HEAD_METHODS,
)  # of --draft
# the methods that need a file (-md), and what it must be
DRAFT_FILES = {
    "model": "a draft model",
    EAGLE3: "an EAGLE-3 draft of the model",
    MEDUSA: "draft heads",
    BLOCKWISE: "draft heads",
}
MIN_DRAFT_ROWS = PASS_ROWS[0]  # tokens of the shortest pass that checks a draft
FLOAT_TYPES = ("f32", "f16", "bf16")
MIN_BRANCHES = 8  # sequences for the branches of trees of tokens, if there are any


@dataclass(frozen=True, slots=True)
class DraftSettings:
    """The user's settings of speculative decoding."""

    ngram: str = "auto"  # one of NGRAM_DRAFT_MODES: whether to guess from repetitions in the text
    # the GGUF file of a draft model or of an EAGLE-3 draft; before `for_draft_file`, also of heads
    model: Path | None = None
    method: str = "auto"  # one of METHODS; all but "auto" use no other method
    heads: DraftHeads | None = None  # of the methods that have some
    is_checked: bool = False  # whether `for_draft_file` has checked the file
    # whether to create the drafters even where they can save no time, so that they can be measured
    measures: bool = False

    @property
    def file(self) -> Path | None:
        """Return the draft file (-md)."""
        return self.heads.path if self.heads else self.model

    @property
    def is_requested(self) -> bool:
        """Return whether the user has turned drafting on, so that it is not left to "auto"."""
        return self.ngram == "on" or self.model is not None or self.method not in ("auto", "off")

    def uses_prediction(self, header: ModelHeader, options: RunOptions, uses_gpu: bool) -> bool:
        """Return whether the model's prediction layers (MTP) are opened. Raises UserError if they
        are requested and the model has none, or with --reproducible.
        """
        has_layers = header.architecture in PREDICTING_ARCHITECTURES and bool(
            header.get_int("nextn_predict_layers")
        )
        if self.method == "mtp":
            if not has_layers:
                raise UserError(
                    "--draft mtp: this file has no layers that predict further tokens (MTP)",
                    hint="quantize the checkpoint without --no-mtp, or leave out --draft mtp",
                )
            if options.reproducible:
                raise UserError(
                    "--draft mtp does not work with --reproducible",
                    hint="leave out --draft mtp or --reproducible",
                )
            return True
        is_exact = _can_be_exact(options, uses_gpu) and not options.reproducible
        return has_layers and self.method == "auto" and self.ngram != "off" and is_exact

    def for_draft_file(
        self, model: ModelHeader, suggestion: str = "", *, has_weights: bool = True
    ) -> "DraftSettings":
        """Return the settings with the method that the draft file is for: an EAGLE-3 draft means
        --draft eagle3, and draft heads the method that they were trained for. A file is checked
        only once. `suggestion`: the name of a model that can draft, for the hint. `has_weights`:
        whether the file has more than its header.

        Raises UserError if the file cannot draft for `model` with the method that the user has
        named.
        """
        if self.model is None or self.is_checked:
            return self
        draft = read_header.read_header(self.model)
        if is_heads_file(draft):
            heads = read_heads(draft)
            self._require_use(heads.shapes.method, f"has heads for --draft {heads.shapes.method}")
            require_fitting_heads(model, heads)
            return replace(self, model=None, method=heads.shapes.method, heads=heads)
        if not is_eagle3(draft):
            self._require_use("model", f"is a model of architecture {draft.architecture}")
            load_checks.check_loadable(draft)
            require_same_vocabulary(model, draft, suggestion)
            return replace(self, is_checked=True)
        self._require_use(EAGLE3, "is an EAGLE-3 draft")
        load_checks.check_loadable(draft, is_draft=True)
        require_eagle3_match(model, draft, has_weights=has_weights)
        if not can_read_layer_inputs():
            raise UserError(
                "--draft eagle3: this build of llama.cpp does not give the inputs of layers",
                hint="leave out --model-draft",
            )
        return replace(self, method=EAGLE3, is_checked=True)

    def _require_use(self, method: str, description: str) -> None:
        """Raise UserError if the user has named another method than `method`, for which the draft
        file is, or --ngram-draft beside a method that does not use it. `description`: what the file
        is.
        """
        assert self.model
        if self.method not in ("auto", method):
            raise UserError(
                f"--draft {self.method}: {self.model.name} {description}",
                hint=f"--draft {method}, or name another file with -md REF",
            )
        if self.ngram == "on" and method != "model":
            raise UserError(
                f"--draft {method}, for which {self.model.name} is, does not use --ngram-draft",
                hint="leave out --ngram-draft or --model-draft",
            )

    def max_outputs(self, options: RunOptions, uses_gpu: bool) -> int:
        """Return how many rows of logits a pass of one sequence may need. It is 1 when nothing can
        be drafted with these options.
        """
        return (
            MAX_PASS_ROWS
            if self.is_requested or (self.ngram == "auto" and _can_be_exact(options, uses_gpu))
            else 1
        )

    def count_branches(self, header: ModelHeader, options: RunOptions, n_sequences: int) -> int:
        """Return how many sequences to add to a context with `n_sequences` for the branches of
        trees of tokens: so many that all together are a power of two, because llama.cpp rounds the
        rows of a pass up to a multiple of them. It is 0 when no trees are drafted: in recurrent
        state and sliding windows, where each sequence takes memory, and where a draft must not
        change the answer, because llama.cpp adds up the cells of a branch in another order.
        """
        shape = read_shape(header.metadata)
        if not self.is_requested or options.reproducible or shape is None or shape.window:
            return 0
        total = 1 << (n_sequences + MIN_BRANCHES - 1).bit_length()
        return total - n_sequences if total <= MAX_SEQUENCES else 0


DEFAULT_DRAFTING, NO_DRAFTING = DraftSettings(), DraftSettings("off")


def choose_drafting(method: str, ngram: str) -> DraftSettings:
    """Return the settings of the options --draft and --ngram-draft."""
    if method == "off":
        return NO_DRAFTING
    return DraftSettings("on" if method == "ngram" else ngram, method=method)


def parse_method(text: str) -> str:
    """Return `text`, a value of --draft, in lower case. Raises UserError when it is not one of
    METHODS.
    """
    if text.lower() not in METHODS:
        raise UserError(f"draft is {text!r}", hint=f"--draft takes one of: {', '.join(METHODS)}")
    return text.lower()


def require_draft_file(option: str, method: str, file: object) -> None:
    """Raise UsageError if `method` needs a draft file and `file` is None. `option`: where the
    method was named, such as "--draft".
    """
    if file is None and method in DRAFT_FILES:
        raise UsageError(
            f"{option} {method} needs {DRAFT_FILES[method]}", hint="name the file with -md REF"
        )


def parse_ngram_draft(text: str) -> str:
    """Return `text`, a value of --ngram-draft, in lower case.

    Raises UserError when it is not one of NGRAM_DRAFT_MODES.
    """
    if text.lower() not in NGRAM_DRAFT_MODES:
        raise UserError(
            f"ngram_draft is {text!r}",
            hint=f"--ngram-draft takes one of: {', '.join(NGRAM_DRAFT_MODES)}",
        )
    return text.lower()


def uses_gpu(placement: ModelPlacement) -> bool:
    """Return whether a GPU of this machine or of a worker computes any layer."""
    return placement.uses_gpu and free_gpu_bytes() is not None


def _can_be_exact(options: RunOptions, gpu: bool) -> bool:
    """Return whether several tokens in a pass can have the same logits as one by one, whatever the
    length of the context. The measurement of a loaded model cannot decide this, because it covers
    only a short context.
    """
    return (
        not gpu
        and options.cache_type_k not in FLOAT_TYPES
        and options.cache_type_v not in FLOAT_TYPES
    )


@contextmanager
def open_speculation(
    settings: DraftSettings,
    header: ModelHeader,
    model: Model,
    context: Context,
    options: RunOptions,
    placement: ModelPlacement,
) -> Iterator[Speculation | None]:
    """Create the drafters for a model and measure the cost of its passes in `context`, which must
    be empty. Yield None when drafting is off or cannot save time, unless it shall be measured. Then
    nothing that was opened for drafts stays open, and the context keeps no hidden states.

    A draft model is opened with the same `options` and on the same devices as the model. It is
    closed after the `with` block. Its file was checked by `DraftSettings.for_draft_file`. Raises
    UserError when the draft model has a recurrent state.
    """
    with ExitStack() as stack:
        speculation = _create_speculation(
            stack, settings, header, model, context, options, placement
        )
        if speculation is None:
            stack.close()
            stop_states(context)
        yield speculation


def _create_speculation(
    stack: ExitStack,
    settings: DraftSettings,
    header: ModelHeader,
    model: Model,
    context: Context,
    options: RunOptions,
    placement: ModelPlacement,
) -> Speculation | None:
    """Do as `open_speculation`. `stack` closes what was opened."""
    output_rows = min(MAX_PASS_ROWS, context.n_outputs, context.n_batch)
    if settings == NO_DRAFTING or output_rows < MIN_DRAFT_ROWS:
        return None
    draft = (
        stack.enter_context(_open_draft_model(settings.model, context, options, placement))
        if settings.model and settings.method in ("auto", "model")
        else None
    )
    eagle = (
        stack.enter_context(
            _open_eagle3(settings.model, header, context, options.reproducible, placement)
        )
        if settings.model and settings.method == EAGLE3
        else None
    )
    cost = measure_pass_cost(context, output_rows)
    exact_rows = cost.exact_rows if _can_be_exact(options, uses_gpu(placement)) else 0
    max_rows = output_rows if settings.is_requested and not options.reproducible else exact_rows
    if not settings.measures and not _pays(cost, max_rows):
        return None
    uses_ngrams = settings.method in ("auto", "ngram") and (
        settings.ngram == "on" or (settings.ngram == "auto" and max_rows > 0)
    )
    prediction = (
        stack.enter_context(
            open_prediction_context(model, context, prediction_options(context.options))
        )
        if context.outputs_states
        else None
    )
    heads = (
        stack.enter_context(open_heads(settings.heads, header, options.threads or 1))
        if settings.heads
        else None
    )
    resources = DrafterResources(
        vocabulary=model,
        uses_ngrams=uses_ngrams,
        uses_pool=settings.method == "pool" or (settings.method == "auto" and uses_ngrams),
        uses_lookahead=settings.method == "lookahead",
        draft_model=draft,
        prediction=(context, prediction) if prediction else None,
        eagle=eagle,
        heads=(context, heads) if heads else None,
    )
    drafter_types = sorted(drafters().values(), key=lambda drafter_type: drafter_type.order)
    created = tuple(
        drafter for drafter_type in drafter_types if (drafter := drafter_type.create(resources))
    )
    # Drafts that the user has not asked for do not change the answer of a seed.
    is_reproducible = options.reproducible or not settings.is_requested
    max_branches = context.max_branches if context.can_branch and not is_reproducible else 1
    speculation = Speculation(
        created, cost, max_rows, exact_rows, is_reproducible, max_branches=max_branches
    )
    return speculation if created else None


def draft_file_options(draft: ModelHeader, context: ContextOptions) -> ContextOptions:
    """Return the options of the context of a draft file, a model or an EAGLE-3 draft. `context`:
    those of the model's context.
    """
    return (eagle_context_options if is_eagle3(draft) else draft_context_options)(context)


def layer_input_bytes(draft: ModelHeader, context: ContextOptions) -> int:
    """Return the bytes that a model's context keeps for a draft file besides its logits: the inputs
    of layers for an EAGLE-3 draft. `context`: the options of that context.
    """
    if not is_eagle3(draft):
        return 0
    width = draft.get_int("target_hidden_size") or 0
    return 4 * width * len(set(read_layers(draft))) * context.n_batch


def eagle_context_options(context: ContextOptions) -> ContextOptions:
    """Return the options of the context of an EAGLE-3 draft. `context`: those of the model's
    context, which has the same length.
    """
    return replace(
        draft_context_options(context), n_batch=MAX_ROWS, n_ubatch=MAX_ROWS, n_outputs=MAX_ROWS
    )


def draft_context_options(context: ContextOptions) -> ContextOptions:
    """Return the options of the draft model's context. `context`: those of the model's context,
    which has the same length.
    """
    return ContextOptions(
        context.n_ctx,
        CHUNK_TOKENS,
        CHUNK_TOKENS,
        1,
        context.n_threads,
        context.n_threads_batch,
        flash_attn=context.flash_attn,
        n_outputs=PASS_ROWS[0],
        offload_kqv=context.offload_kqv,
        gemm_min_rows=context.gemm_min_rows,
    )


@contextmanager
def _open_eagle3(
    path: Path,
    header: ModelHeader,
    context: Context,
    reproducible: bool,
    placement: ModelPlacement,
) -> Iterator[EagleContext]:
    """Open the EAGLE-3 draft in the file `path`, which was checked by `for_draft_file`, for the
    model with this header and context. Yield its context.

    Raises UserError with `reproducible` if the draft reads the state after the last layer: then
    llama.cpp computes the last layer for more rows, which may change the last bits of the logits.
    """
    draft_header = read_header.read_header(path)
    layers, n_layers = read_layers(draft_header), count_layers(header)
    if reproducible and max(layers) == n_layers:
        raise UserError(
            f"--reproducible cannot draft with {path.name}, which reads the state after the last "
            "layer",
            hint="leave out --model-draft or --reproducible",
        )
    width = draft_header.get_int("target_hidden_size") or 0
    inputs = LayerInputs(context, layers, n_layers, width)
    with (
        open_model(path, placement.for_draft().for_header(draft_header)) as model,
        open_eagle_context(model, inputs, eagle_context_options(context.options)) as eagle,
    ):
        yield eagle


@contextmanager
def _open_draft_model(
    path: Path, context: Context, options: RunOptions, placement: ModelPlacement
) -> Iterator[tuple[Context, PassCost]]:
    """Open the draft model in the file `path`, which was checked by `for_draft_file`. Yield its
    context and the measured cost of its passes. The other arguments are those of the model that it
    drafts for.

    Raises UserError when the draft model has a recurrent state.
    """
    draft_header = read_header.read_header(path)
    assert options.threads
    main_options = ContextOptions(
        context.n_ctx,
        n_threads=options.threads,
        n_threads_batch=options.threads_batch or options.threads,
        flash_attn=options.flash_attn,
        offload_kqv=options.kv_offload,
    )
    context_options = draft_context_options(main_options)
    with (
        open_model(path, placement.for_draft().for_header(draft_header)) as model,
        open_context(model, context_options) as draft_context,
    ):
        if draft_context.is_recurrent:
            raise UserError(
                f"{path.name} cannot draft: drafting needs to drop rejected tokens, "
                "which its recurrent state does not support",
                hint="leave out --model-draft",
            )
        yield draft_context, measure_pass_cost(draft_context, PASS_ROWS[0])


def _pays(cost: PassCost, max_rows: int) -> bool:
    """Return whether there is a size of passes, up to `max_rows` tokens, at which drafting saves
    time if all guesses are right.
    """
    return any(
        n_rows * cost.single_seconds > MIN_GAIN * cost(n_rows)
        for n_rows in PASS_ROWS
        if n_rows <= max_rows
    )
