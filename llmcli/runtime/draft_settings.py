"""Opens what drafting needs, as --model-draft and --ngram-draft and this model, machine and cache
allow.

`auto` drafts only where drafting cannot change the text: on a CPU with quantized K and V, each row
of a pass has, bit for bit, the logits of a single row (measured when the model is loaded), so a
seed gives the same text with and without drafting. With a float cache llama.cpp computes a single
row in another way than several, so another token may be chosen where two are almost equally likely;
`on` and a draft model accept that.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from llmcli.errors import UserError
from llmcli.runtime.binding.context import Context
from llmcli.runtime.binding.context_options import ContextOptions
from llmcli.runtime.binding.devices import free_gpu_bytes
from llmcli.runtime.binding.model import Model, open_model
from llmcli.runtime.binding.open_context import open_context
from llmcli.runtime.drafting import drafters
from llmcli.runtime.drafting.base import DrafterResources
from llmcli.runtime.drafting.draft_length import MIN_GAIN
from llmcli.runtime.drafting.draft_model import CHUNK_TOKENS
from llmcli.runtime.drafting.pass_cost import MAX_PASS_ROWS, PASS_ROWS, PassCost, measure_pass_cost
from llmcli.runtime.drafting.vocabulary_match import require_same_vocabulary
from llmcli.runtime.requests.request import RunOptions
from llmcli.runtime.strategies.base import Speculation
from quant.model_file import load_checks, read_header
from quant.model_file.model_header import ModelHeader

NGRAM_DRAFT_MODES = ("auto", "on", "off")
FLOAT_TYPES = ("f32", "f16", "bf16")


@dataclass(frozen=True, slots=True)
class DraftSettings:
    """Settings of drafting. `ngram`: whether to guess the tokens that followed the same text
    earlier (auto, on, off). `model`: the file of a draft model.
    """

    ngram: str = "auto"
    model: Path | None = None

    @property
    def is_requested(self) -> bool:
        """Return whether the user asked for drafting."""
        return self.ngram == "on" or self.model is not None

    def max_outputs(self, options: RunOptions, uses_gpu: bool) -> int:
        """Return the maximum rows of logits in one pass; 1 when nothing can be drafted."""
        return (
            MAX_PASS_ROWS
            if self.is_requested or (self.ngram == "auto" and _exact(options, uses_gpu))
            else 1
        )


NO_DRAFTING = DraftSettings("off")


def parse_ngram_draft(text: str) -> str:
    """Return the value of --ngram-draft in lower case.

    Raises UserError for an unknown value.
    """
    if text.lower() not in NGRAM_DRAFT_MODES:
        raise UserError(
            f"ngram_draft is {text!r}",
            hint=f"--ngram-draft takes one of: {', '.join(NGRAM_DRAFT_MODES)}",
        )
    return text.lower()


def uses_gpu(gpu_layers: int) -> bool:
    """Return whether a GPU computes any layer."""
    return gpu_layers != 0 and free_gpu_bytes() is not None


def _exact(options: RunOptions, gpu: bool) -> bool:
    """Return whether, with these options, each row of a pass can equal a single row at any depth of
    the context. Measuring alone cannot decide that, because it covers only a small depth.
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
    gpu_layers: int,
) -> Iterator[Speculation | None]:
    """Open what drafting needs for an empty context. The result is None when drafting is off or
    cannot pay.

    The draft model is opened with the model's `options` and on the same devices. Raises UserError
    when drafting was requested but the memory cannot drop tokens, and for a draft model with
    another vocabulary.
    """
    if context.is_recurrent and settings.is_requested:
        raise UserError(
            "drafting needs to drop rejected tokens, "
            "which this model's recurrent state does not support",
            hint="leave out --model-draft" if settings.model else "leave out --ngram-draft on",
        )
    output_rows = min(MAX_PASS_ROWS, context.n_outputs, context.n_batch)
    if settings == NO_DRAFTING or output_rows < PASS_ROWS[0] or context.is_recurrent:
        yield None
        return
    with ExitStack() as stack:
        draft = (
            stack.enter_context(_draft(settings.model, header, context, options, gpu_layers))
            if settings.model
            else None
        )
        curve = measure_pass_cost(context, output_rows)
        exact_rows = curve.exact_rows if _exact(options, uses_gpu(gpu_layers)) else 0
        max_rows = output_rows if settings.is_requested and not options.reproducible else exact_rows
        tools = DrafterResources(
            settings.ngram == "on" or (settings.ngram == "auto" and max_rows > 0), draft, model
        )
        kinds = sorted(drafters().values(), key=lambda kind: kind.order)
        created = tuple(drafter for kind in kinds if (drafter := kind.create(tools)))
        guesses = Speculation(created, curve, max_rows, exact_rows, options.reproducible)
        yield guesses if created and _pays(curve, max_rows) else None


def draft_context_options(context: ContextOptions) -> ContextOptions:
    """Return the options of the draft model's context, given those of the model's context."""
    return ContextOptions(
        context.n_ctx,
        CHUNK_TOKENS,
        CHUNK_TOKENS,
        1,
        context.n_threads,
        context.n_threads_batch,
        flash_attn=context.flash_attn,
        n_outputs=PASS_ROWS[0],
    )


@contextmanager
def _draft(
    path: Path, header: ModelHeader, context: Context, options: RunOptions, gpu_layers: int
) -> Iterator[tuple[Context, PassCost]]:
    """Open the draft model's context and measure the cost of its passes."""
    draft_header = read_header.read_header(path)
    load_checks.check_loadable(draft_header)
    require_same_vocabulary(header, draft_header)
    assert options.threads
    main_options = ContextOptions(
        context.n_ctx,
        n_threads=options.threads,
        n_threads_batch=options.threads_batch or options.threads,
        flash_attn=options.flash_attn,
    )
    wanted = draft_context_options(main_options)
    gpu_layers = -1 if gpu_layers else 0
    with (
        open_model(path, gpu_layers=gpu_layers, latent=draft_header.has_latent_attention) as model,
        open_context(model, wanted) as draft_context,
    ):
        if draft_context.is_recurrent:
            raise UserError(
                f"{path.name} cannot draft: drafting needs to drop rejected tokens, "
                "which its recurrent state does not support",
                hint="leave out --model-draft",
            )
        yield draft_context, measure_pass_cost(draft_context, PASS_ROWS[0])


def _pays(curve: PassCost, most: int) -> bool:
    """Return whether passes of some size, up to `most` rows, would pay if all their guesses were
    right.
    """
    return any(
        width * curve.single_seconds > MIN_GAIN * curve(width)
        for width in PASS_ROWS
        if width <= most
    )
