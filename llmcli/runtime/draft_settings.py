"""The settings of speculative decoding: --draft, --model-draft and --ngram-draft.

Without these settings llmcli drafts only where drafting cannot change the answer. This needs a CPU,
quantized K and V and quantized weights: there, several tokens in one pass have bit for bit the
logits that they would have one by one, which is measured when the model is loaded. With a float KV
cache, or float weights such as those that choose experts, llama.cpp computes a single token differently
from several. The answer may then change. A method that is named accepts that.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from llmcli.errors import UsageError, UserError
from llmcli.runtime.binding.contexts.context_options import MAX_SEQUENCES
from llmcli.runtime.binding.contexts.eagle_context import can_read_layer_inputs
from llmcli.runtime.binding.contexts.prediction_context import (
    ARCHITECTURES,
    first_prediction_layer,
)
from llmcli.runtime.binding.placement.devices import free_gpu_bytes
from llmcli.runtime.binding.placement.model_placement import ModelPlacement
from llmcli.runtime.drafting.draft_files.eagle3_match import EAGLE3, is_eagle3, require_eagle3_match
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
from llmcli.runtime.drafting.gain.pass_cost import MAX_PASS_ROWS, PASS_ROWS
from llmcli.runtime.kv_size import RECURRENT_STATE_ARCHS, read_shape
from llmcli.runtime.requests.request import RunOptions
from quant.model_file import load_checks, read_header
from quant.model_file.model_header import ModelHeader
from quant.model_file.product_weights import float_weights

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
PATH_METHODS = ("ngram", "pool")  # that never draft trees
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
class DraftFile:
    """A draft file. `method`: the method that it is for, one of DRAFT_FILES. `heads`: its draft
    heads, if it has some.
    """

    header: ModelHeader
    method: str
    heads: DraftHeads | None = None


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
        require_prediction_layers(self.method, header)
        if self.method == "mtp":
            if options.reproducible:
                raise UserError(
                    "--draft mtp does not work with --reproducible",
                    hint="leave out --draft mtp or --reproducible",
                )
            return True
        is_exact = can_be_exact(header, options, uses_gpu) and not options.reproducible
        has_layers = first_prediction_layer(header) is not None
        return has_layers and self.method == "auto" and self.ngram != "off" and is_exact

    def for_draft_file(
        self,
        model: ModelHeader,
        suggestion: str = "",
        *,
        has_weights: bool = True,
        draft_file: DraftFile | None = None,
    ) -> "DraftSettings":
        """Return the settings with the method that the draft file is for: an EAGLE-3 draft means
        --draft eagle3, and draft heads the method that they were trained for. A file is checked
        only once. `suggestion`: the name of a model that can draft, for the hint. `has_weights`:
        whether the file has more than its header. `draft_file`: the file, if it was read before.

        Raises UserError if the file cannot draft for `model` with the method that the user has
        named.
        """
        if self.model is None or self.is_checked:
            return self
        draft_file = draft_file or read_draft_file(self.model)
        draft, method, heads = draft_file.header, draft_file.method, draft_file.heads
        if heads is not None:
            self._require_use(method, f"has heads for --draft {method}")
            require_fitting_heads(model, heads)
            return replace(self, model=None, method=method, heads=heads)
        if method == "model":
            self._require_use(method, f"is a model of architecture {draft.architecture}")
            load_checks.check_loadable(draft)
            if draft.architecture in RECURRENT_STATE_ARCHS:
                raise UserError(
                    f"{draft.path.name} cannot draft: a draft model must drop wrong guesses token "
                    "by token, which llmcli does not do with the recurrent state of "
                    f"{draft.architecture}",
                    hint=f"use --model-draft {suggestion}, or --draft ngram"
                    if suggestion
                    else "name another model with -md, without such layers, or use --draft ngram",
                )
            require_same_vocabulary(model, draft, suggestion)
            return replace(self, is_checked=True)
        self._require_use(method, "is an EAGLE-3 draft")
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
                hint=f"use --draft {method}, or name another file with -md REF",
            )
        if self.ngram == "on" and method != "model":
            raise UserError(
                f"--draft {method}, for which {self.model.name} is, does not use --ngram-draft",
                hint="leave out --ngram-draft or --model-draft",
            )

    def max_outputs(self, header: ModelHeader, options: RunOptions, uses_gpu: bool) -> int:
        """Return how many rows of logits a pass of one sequence may need. It is 1 when nothing can
        be drafted for this model with these options.
        """
        is_automatic = self.ngram == "auto" and can_be_exact(header, options, uses_gpu)
        return MAX_PASS_ROWS if self.is_requested or is_automatic else 1

    def count_branches(self, header: ModelHeader, options: RunOptions, n_sequences: int) -> int:
        """Return how many sequences to add to a context with `n_sequences` for the branches of
        trees of tokens: so many that all together are a power of two, because llama.cpp rounds the
        rows of a pass up to a multiple of them. It is 0 when no trees are drafted: by methods that
        guess paths, in recurrent state and sliding windows, where each sequence takes memory, and
        where a draft must not change the answer, because llama.cpp adds up the cells of a branch in
        another order.
        """
        shape = read_shape(header.metadata)
        if (
            not self.is_requested
            or self.method in PATH_METHODS
            or options.reproducible
            or shape is None
            or shape.window
        ):
            return 0
        total = 1 << (n_sequences + MIN_BRANCHES - 1).bit_length()
        return total - n_sequences if total <= MAX_SEQUENCES else 0


DEFAULT_DRAFTING, NO_DRAFTING = DraftSettings(), DraftSettings("off")


def choose_drafting(method: str, ngram: str, *, has_file: bool) -> DraftSettings:
    """Return the settings of the options --draft and --ngram-draft. `has_file`: whether a draft
    file is named, too. Without one, --ngram-draft on means --draft ngram.
    """
    if method == "off":
        return NO_DRAFTING
    if method == "auto" and ngram == "on" and not has_file:
        method = "ngram"
    return DraftSettings("on" if method == "ngram" else ngram, method=method)


def read_draft_file(path: Path) -> DraftFile:
    """Return the draft file `path`, as its header describes it. Raises UserError if it cannot be
    read, and for damaged draft heads.
    """
    header = read_header.read_header(path)
    if is_heads_file(header):
        heads = read_heads(header)
        return DraftFile(header, heads.shapes.method, heads)
    return DraftFile(header, EAGLE3 if is_eagle3(header) else "model")


def require_prediction_layers(method: str, header: ModelHeader) -> None:
    """Raise UserError if `method` is "mtp" and llmcli does not compute prediction layers of this
    model.
    """
    if method != "mtp" or first_prediction_layer(header) is not None:
        return
    if header.architecture in ARCHITECTURES:
        raise UserError(
            "--draft mtp: this file has no layers that predict further tokens (MTP)",
            hint="quantize the checkpoint without --no-mtp, or leave out --draft mtp",
        )
    raise UserError(
        "--draft mtp: llama.cpp computes no layers that predict further tokens (MTP) for models of "
        f"architecture {header.architecture}",
        hint="leave out --draft mtp, or use --draft ngram",
    )


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


def can_be_exact(header: ModelHeader, options: RunOptions, gpu: bool) -> bool:
    """Return whether several tokens in a pass can have the same logits as one by one, for every
    text. The measurement of a loaded model cannot decide this. It covers only a short context, and
    rounding the inputs of quantized products hides other last bits from most logits, but not from
    all. With --reproducible, float weights get single tokens.
    """
    return (
        not gpu
        and options.cache_type_k not in FLOAT_TYPES
        and options.cache_type_v not in FLOAT_TYPES
        and (options.reproducible or not float_weights(header))
    )
